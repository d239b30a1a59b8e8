"""Laws 4 and 9: conversion leaves everything of a model but its backward pass, sees through wrappers, and says what it skips."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers import normal
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import hot
from hot import Backend, BackendError, ConversionError, LayerPlan, PolicyError, Skip, register_backend
from hot.backends import backends

HOT, INT8, EXACT = hot.load_policy("hot"), hot.load_policy("int8"), hot.load_policy("exact")


class Net(nn.Module):
    """A linear layer, a 3×3 and a 1×1 convolution, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Conv2d(3, 8, 3, padding=1)
        self.mix = nn.Conv2d(8, 16, 1)
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(self.entry(x)).flatten(2).transpose(1, 2)
        return self.head(self.body(x).mean(1))


def images() -> Tensor:
    return normal(2, 3, 8, 8)


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The output and every gradient."""
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


def test_the_report() -> None:
    """It names every layer with its plan or its reason, by name and printed."""
    model = Net()
    report = hot.convert(model, HOT)
    assert list(report.converted) == ["entry", "mix", "body.0", "body.2"] and list(report.skipped) == ["head"]
    assert isinstance(report["mix"], LayerPlan) and isinstance(report["head"], Skip)
    assert report["mix"].buffer.is_packed and not report["entry"].buffer.is_packed
    text = str(report)
    assert text.startswith("HOT: 4 of 5 layers converted") and all(n in text for n in (*report.layers, "policy exact"))
    assert type(model.head) is nn.Linear and isinstance(model.entry, nn.Conv2d) and isinstance(model.mix, hot.HotConv2d)


def test_nothing_else_changes() -> None:
    """Law 4: the same Parameters under the same names, the optimizer's references, hooks and buffers."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    seen: list[str] = []
    model.mix.register_forward_pre_hook(lambda *_: seen.append("pre"))
    before, state = dict(model.named_parameters()), copy.deepcopy(model.state_dict())
    hot.convert(model, HOT)
    assert all(p is before[name] for name, p in model.named_parameters()) and len(before) == 10
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in before.values()]
    assert list(model.state_dict()) == list(state)
    assert all(type(a) is type(b) for a, b in zip(model.state_dict().values(), state.values(), strict=True))
    step(model, images())
    optimizer.step()
    assert seen == ["pre"] and not torch.equal(model.mix.weight, state["mix.weight"])


@pytest.mark.parametrize("file", [False, True], ids=["dict", "weights_only file"])
def test_state_dicts_fit_both_ways(file: bool) -> None:
    """Law 4: strict, and no class of HOT is in a checkpoint."""

    def through_a_file(state: dict) -> dict:
        if not file:
            return state
        buffer = io.BytesIO()
        torch.save(state, buffer)
        return torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)

    plain, converted = Net(), Net()
    hot.convert(converted, HOT)
    for source, target in ((plain, converted), (converted, Net()), (converted, converted)):
        target.load_state_dict(through_a_file(source.state_dict()), strict=True)
        assert all(torch.equal(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True))


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def saved(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)


class PlainLinear(nn.Linear):
    """A subclass with torch's forward: it is converted."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size)


@pytest.mark.parametrize("how", [copy.deepcopy, pickled, saved])
def test_copies(how: Callable[[nn.Module], nn.Module]) -> None:
    """Law 4: copies are converted as their original is, share nothing with it, and can be reverted."""
    model = Net()
    model.add_module("extra", PlainLinear(4))
    hot.convert(model, INT8)
    twin = how(model)
    assert [type(m) for m in twin.modules()] == [type(m) for m in model.modules()] and repr(twin) == repr(model)
    assert same(step(model, images()), step(twin, images()))
    assert not {id(p) for p in model.parameters()} & {id(p) for p in twin.parameters()}
    assert hot.revert(twin) == hot.revert(model) == 5


def test_revert() -> None:
    """Law 4: class, repr and gradients of an unconverted model; a second revert finds nothing."""
    model = Net()
    text, exact = repr(model), step(model, images())
    hot.convert(model, HOT)
    assert repr(model) != text and "grad_input" in repr(model) and not same(step(model, images()), exact)
    assert hot.revert(model) == 4
    assert repr(model) == text and same(step(model, images()), exact)
    assert not any("hot_plan" in vars(m) for m in model.modules()) and hot.revert(model) == 0


def test_convert_again() -> None:
    """A second conversion replaces the first, layers that it leaves exact included; exact takes all of it back."""
    model = Net()
    text = repr(model)
    hot.convert(model, INT8)
    hot.convert(model, HOT.with_rules([{"match": "entry", "policy": "exact"}]))
    assert type(model.entry) is nn.Conv2d and model.mix.hot_plan == HOT.defaults
    assert hot.convert(model, HOT).converted.keys() == hot.convert(model, HOT).converted.keys()
    assert not hot.convert(model, EXACT).converted and repr(model) == text


def test_exact_is_not_an_error() -> None:
    """Law 1: the policy exact changes not a bit; nor does a converted model's forward under any policy."""
    model = Net()
    exact = step(model, images())
    report = hot.convert(model, EXACT)
    assert not report.converted and len(report.skipped) == 5 and same(step(model, images()), exact)
    for name in ("hot", "hot-paper", "int8", "luq", "lbp-wht", "hlq"):
        hot.convert(model, hot.load_policy(name))
        assert torch.equal(step(model, images())[0], exact[0])


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: nn.ReLU(), "no nn.Linear and no nn.Conv2d"),
        (lambda: nn.Sequential(nn.LazyLinear(3)), "lazy"),
        (lambda: nn.MultiheadAttention(8, 2), "never calls"),
        (lambda: nn.Sequential(nn.Conv2d(4, 4, 3, groups=4)), "groups=4"),
        (lambda: nn.ModuleDict({"head": nn.Linear(4, 4)}), "policy exact"),
    ],
)
def test_converting_nothing_is_an_error(build: Callable[[], nn.Module], reason: str) -> None:
    """Law 9: with the reasons, and the model untouched."""
    model = build()
    text = repr(model)
    with pytest.raises(ConversionError, match=reason):
        hot.convert(model, HOT)
    assert repr(model) == text


def test_a_rule_that_matches_nothing_is_an_error() -> None:
    """And what was converted before stays so."""
    model = Net()
    hot.convert(model, INT8)
    text = repr(model)
    with pytest.raises(PolicyError, match="matches no layer"):
        hot.convert(model, HOT.with_rules([{"match": "bodi.*", "policy": "exact"}]))
    assert repr(model) == text


class OwnForward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class OwnConvForward(nn.Conv2d):
    def _conv_forward(self, *args: Tensor | None) -> Tensor:
        return super()._conv_forward(*args) * 2  # type: ignore[arg-type]


def patched() -> nn.Linear:
    layer = nn.Linear(4, 4)
    layer.forward = lambda x: F.linear(x, layer.weight) * 3  # type: ignore[method-assign]
    return layer


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: OwnForward(4, 4), "OwnForward has its own forward"),
        (lambda: OwnConvForward(4, 4, 1), "OwnConvForward has its own _conv_forward"),
        (patched, "replaced on the instance"),
        (lambda: nn.Conv2d(4, 4, 1, groups=2), "groups=2"),
        (lambda: nn.Conv2d(4, 4, 1, groups=4), "groups=4"),
        (lambda: nn.LazyLinear(4), "lazy"),
        (lambda: nn.LazyConv2d(4, 1), "lazy"),
        (lambda: nn.Linear(4, 4, dtype=torch.complex64), "complex64"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_skipped(build: Callable[[], nn.Module], reason: str) -> None:
    """Law 9: each with its reason, and untouched."""
    model = nn.Sequential(nn.Linear(4, 4), build())
    kind = type(model[1])
    report = hot.convert(model, HOT)
    assert list(report.converted) == ["0"] and reason in report["1"].reason and type(model[1]) is kind
    assert reason in str(hot.convert(model, HOT)["1"])


def test_multihead_attention() -> None:
    """Law 9: it reads the weights of its layers and never calls them; other layers of an encoder are converted."""
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    report = hot.convert(model, HOT)
    assert list(report.converted) == ["linear1", "linear2"]
    assert "nn.MultiheadAttention" in report["self_attn.out_proj"].reason
    y = model(normal(2, 8, 16))
    y.sum().backward()
    model.eval()
    with torch.no_grad():
        assert model(normal(2, 8, 16)).isfinite().all()


def test_lazy_layers_after_a_run() -> None:
    model = nn.Sequential(nn.LazyConv2d(4, 1), nn.Flatten(2), nn.LazyLinear(8))
    model(normal(2, 3, 4, 4))
    assert list(hot.convert(model, HOT).converted) == ["0", "2"]
    model(normal(2, 3, 4, 4)).sum().backward()


def test_subclasses_keep_what_they_are() -> None:
    """A subclass with torch's forward stays an instance of itself, and is itself again after revert."""
    model = nn.Sequential(PlainLinear(4), PlainLinear(4))
    hot.convert(model, HOT)
    assert all(isinstance(m, PlainLinear) and isinstance(m, hot.HotLinear) for m in model) and type(model[0]) is type(
        model[1]
    )
    hot.convert(model, INT8)
    assert hot.revert(model) == 2 and type(model[0]) is PlainLinear


def test_the_model_may_be_a_layer() -> None:
    layer = nn.Linear(4, 4)
    assert list(hot.convert(layer, HOT).converted) == [""] and "(the model itself)" in str(hot.convert(layer, HOT))
    layer(normal(2, 4)).sum().backward()
    assert hot.revert(layer) == 1 and type(layer) is nn.Linear


class Tied(nn.Module):
    """Two layers of one Parameter, and one layer used twice under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = self.a.weight
        self.again = self.a

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.b(self.a(x)))


def test_tied_weights() -> None:
    """One Parameter, one gradient, the sum of its uses; a module under two names has one plan under the first."""
    model = Tied()
    exact = step(model, normal(2, 16, 8))
    report = hot.convert(model, INT8)
    assert list(report.layers) == ["a", "b"] and model.a is model.again and model.a.weight is model.b.weight
    ours = step(model, normal(2, 16, 8))
    assert len(ours) == len(exact) and all(
        torch.allclose(a, b, rtol=0.1, atol=0.05 * b.abs().max().item()) for a, b in zip(ours, exact, strict=True)
    )
    with pytest.raises(PolicyError, match="share one weight"):
        hot.convert(model, INT8.with_rules([{"match": "b", "policy": "exact"}]))


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize(
    "move", [lambda m: m.double(), lambda m: m.to(torch.bfloat16), lambda m: m.to(memory_format=torch.channels_last)]
)
def test_to(move: Callable[[nn.Module], nn.Module], first: bool) -> None:
    """Conversion before and after ``.to()``."""
    model = Net()
    if first:
        hot.convert(model, HOT)
    model = move(model)
    if not first:
        hot.convert(model, HOT)
    found = step(model, images().to(model.entry.weight.dtype))
    assert model.mix.hot_plan == HOT.defaults and all(
        t.isfinite().all() and t.dtype == model.entry.weight.dtype for t in found
    )


def twice(build: Callable[[nn.Module], nn.Module]) -> tuple[nn.Module, nn.Module, hot.Report]:
    """A model converted before it is wrapped, another one after, and the second report."""
    before, after = Net(), Net()
    after.load_state_dict(before.state_dict())
    hot.convert(before, INT8)
    wrapped = build(before), build(after)
    report = hot.convert(wrapped[1], INT8)
    return *wrapped, report


def test_compiled_model() -> None:
    """torch.compile's wrapper is seen through; a conversion after it has run is not missed."""
    layer, x = nn.Linear(16, 16), normal(4, 16)
    compiled = torch.compile(nn.Sequential(layer), backend="eager")
    exact = step(compiled, x)
    assert list(hot.convert(compiled, INT8).converted) == ["0"]
    ours = step(compiled, x)
    assert torch.equal(ours[0], exact[0]) and not torch.equal(ours[1], exact[1])
    assert same(ours, step(nn.Sequential(layer), x))
    assert hot.revert(compiled) == 1 and same(step(compiled, x), exact)


def test_data_parallel() -> None:
    _, _, report = twice(nn.DataParallel)
    assert list(report.layers) == ["entry", "mix", "body.0", "body.2", "head"]


def test_checkpoint_wrapper() -> None:
    """The wrapper of activation checkpointing, around any part of the model."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def wrap(model: nn.Module) -> nn.Module:
        model.body = checkpoint_wrapper(model.body)
        model.mix = checkpoint_wrapper(model.mix)
        return model

    before, after, report = twice(wrap)
    plain = Net()
    plain.load_state_dict(before.state_dict())
    hot.convert(plain, INT8)
    assert list(report.layers) == ["entry", "mix", "body.0", "body.2", "head"]
    assert same(step(plain, images()), step(before, images())) and same(step(plain, images()), step(after, images()))


class Chat(nn.Module):
    """What PEFT adapts: projections named as in a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"q_proj": nn.Linear(16, 16), "o_proj": nn.Linear(16, 16)}) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer["o_proj"](F.gelu(layer["q_proj"](x)))
        return x


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_lora(first: bool) -> None:
    """PEFT: the base layers go by their own names, frozen ones save nothing of their input, adapters train."""
    peft = pytest.importorskip("peft")
    from helpers import saved_tensors

    torch.manual_seed(0)
    model = Chat()
    if first:
        hot.convert(model, HOT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    report = hot.convert(wrapped, HOT)
    assert {"layers.0.q_proj", "layers.0.q_proj.lora_A.default", "layers.1.o_proj"} <= set(report.converted)
    hot.revert(wrapped)
    x = normal(2, 32, 16)
    exact = step(wrapped, x)
    hot.convert(wrapped, hot.load_policy("hot-lora"))
    ours = step(wrapped, x)
    assert torch.equal(ours[0], exact[0]) and len(ours) == len(exact) == 5  # A and B of two layers
    base = wrapped.base_model.model.layers[0]["o_proj"]
    with saved_tensors() as packed:
        base(x.requires_grad_())
    assert {t.data_ptr() for t in packed} == {base.weight.data_ptr()}
    assert not any(p.requires_grad for n, p in wrapped.named_parameters() if "lora" not in n)
    merged = wrapped.merge_and_unload()
    assert torch.allclose(merged(x), ours[0], atol=1e-5)


def test_parametrized_layers() -> None:
    """weight_norm and its like, put on before conversion and after; taken off after reverting."""
    for first in (True, False):
        layer = nn.Linear(8, 8)
        if first:
            hot.convert(layer, INT8)
        parametrizations.weight_norm(layer)
        hot.convert(layer, INT8)
        assert isinstance(layer, hot.HotLinear) and parametrize.is_parametrized(layer)
        layer(normal(4, 8)).sum().backward()
        assert all(p.grad is not None for p in layer.parameters())
        hot.revert(layer)
        assert not isinstance(layer, hot.HotLinear) and parametrize.is_parametrized(layer)
        layer(normal(4, 8)).sum().backward()
        parametrize.remove_parametrizations(layer, "weight")
        layer(normal(4, 8)).sum().backward()
        assert isinstance(layer.weight, nn.Parameter) and type(layer) is nn.Linear


def test_functional_call() -> None:
    """Parameters from elsewhere reach the converted layer."""
    layer = nn.Linear(8, 8)
    hot.convert(layer, INT8)
    weight = normal(8, 8).requires_grad_()
    y = torch.func.functional_call(layer, {"weight": weight, "bias": torch.zeros(8)}, (normal(4, 8),))
    assert torch.equal(y, F.linear(normal(4, 8), weight))
    y.sum().backward()
    assert weight.grad is not None and layer.weight.grad is None


def test_names_that_look_like_wrappers() -> None:
    """Layers keep names of their own where a module is only named as a wrapper's would be."""
    model = nn.ModuleDict({"proj": nn.Linear(8, 8), "base_layer": nn.ModuleDict({"proj": nn.Conv2d(3, 8, 3)})})
    report = hot.convert(model, INT8)
    assert len(report.layers) == 2
    model["base_layer"]["proj"](images()).sum().backward()


def test_checkpointed_model_with_shared_input() -> None:
    """q, k and v inside a checkpointed block: the recomputed forward shares anew and gives the same gradients."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in (self.q(x), self.k(x), self.v(x)))
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    block, x = Block(), normal(2, 20, 16)
    hot.convert(block, HOT)
    plain = step(block, x)
    block.zero_grad()
    checkpoint(block, x, use_reentrant=False).square().sum().backward()
    assert same(plain[1:], [p.grad for p in block.parameters()])


def test_a_missing_backend_is_refused_before_anything_changes() -> None:
    register_backend(Backend("missing", devices=("cpu",), probe=lambda: (False, "no such chip")))
    try:
        model = nn.Sequential(nn.Linear(8, 8))
        with pytest.raises(BackendError, match="backend 'missing' is not available: no such chip; use backend: auto"):
            hot.convert(model, hot.Policy(extends="hot", backend="missing"))
        assert type(model[0]) is nn.Linear
    finally:
        backends.remove("missing")

"""What other ops save: forward is torch's to the bit, backward comes from codes (close) or bits (exact), and less is held."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hot
from hot.activations.modules import is_rms_norm
from hot.backends import ops_for
from hot.kept import layout_of
from hot.memory import saved_bytes
from hot.train.models import Vit

MASKED = ("relu", "leaky_relu", "hardtanh", "dropout")
INT8 = {"kind": "quantized", "quantizer": {"kind": "int", "bits": 8, "granularity": "row"}}
INT4 = {"kind": "quantized", "quantizer": {"kind": "int", "bits": 4, "granularity": "block", "block": 32}}
MASK = {"kind": "mask"}


class Op(nn.Module):
    """One call, as models make it: of a function, with parameters that are trained beside the input."""

    def __init__(self, call: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.call, self.weights = call, nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.call(*inputs, *self.weights)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


OPS: dict[str, tuple[str, Callable[[], nn.Module], int]] = {
    "layer_norm": ("layer_norm", lambda: nn.LayerNorm(48), 1),
    "layer_norm, function": ("layer_norm", lambda: Op(lambda x, w: F.layer_norm(x, (48,), weight=w), (48,)), 1),
    "rms_norm": ("rms_norm", lambda: nn.RMSNorm(48), 1),
    "group_norm": ("group_norm", lambda: nn.GroupNorm(1, 7), 1),
    "gelu": ("gelu", nn.GELU, 1),
    "gelu, tanh": ("gelu", lambda: nn.GELU("tanh"), 1),
    "silu": ("silu", nn.SiLU, 1),
    "attention": ("scaled_dot_product_attention", lambda: Op(attention), 3),
    "softmax": ("softmax", lambda: nn.Softmax(-1), 1),
    "softmax, method": ("softmax", lambda: Op(lambda x: x.softmax(1)), 1),
    "matmul": ("matmul", lambda: Op(lambda a, b: torch.matmul(a, b.mT)), 2),
    "matmul, operator": ("matmul", lambda: Op(lambda a, b: a @ b.mT), 2),
    "bmm": ("matmul", lambda: Op(lambda a, b: torch.bmm(a.flatten(0, 1), b.flatten(0, 1).mT)), 2),
    "relu": ("relu", nn.ReLU, 1),
    "leaky_relu": ("leaky_relu", lambda: nn.LeakyReLU(0.2), 1),
    "hardtanh": ("hardtanh", lambda: nn.Hardtanh(-0.5, 0.7), 1),
    "relu6": ("hardtanh", nn.ReLU6, 1),
    "relu6, function": ("hardtanh", lambda: Op(F.relu6), 1),
    "relu, method": ("relu", lambda: Op(lambda x: x.relu()), 1),
    "dropout": ("dropout", lambda: nn.Dropout(0.3), 1),
}


def policy(**ops: Any) -> hot.Policy:
    return hot.Policy(extends="exact", activations=[{"match": "**", **ops}])


def run(module: nn.Module, *inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The output, and the gradients of inputs and parameters."""
    torch.manual_seed(5)
    inputs = tuple(x.detach().clone().requires_grad_() for x in inputs)
    y = module(*inputs)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(6)).to(y.dtype)
    return y.detach().clone(), list(torch.autograd.grad(y, [*inputs, *module.parameters()], g))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", OPS)
def test_forward_is_torchs_and_backward_near_it(name: str, dtype: torch.dtype) -> None:
    op, build, count = OPS[name]
    torch.manual_seed(0)
    module, inputs = build().to(dtype), [torch.randn(3, 7, 10, 48).to(dtype) for _ in range(count)]
    expected, exact = run(module, *inputs)
    masked = op in MASKED
    for buffer, limit in [(MASK, 0.0)] if masked else [(INT8, 0.02), (INT4, 0.25)]:
        hot.convert(module, policy(**{op: buffer}))
        y, grads = run(module, *inputs)
        assert torch.equal(y, expected)
        assert masked or not torch.equal(exact[0], grads[0])  # it did come from codes
        for a, b in zip(exact, grads, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            error = ((a - b).double().norm() / a.double().norm()).item()
            assert error <= limit + (0.01 if dtype == torch.bfloat16 and not masked else 0)
    assert hot.revert(module) == 1
    assert all(torch.equal(a, b) for a, b in zip(exact, run(module, *inputs)[1], strict=True))


@pytest.mark.parametrize("name", OPS)
def test_bytes_that_are_saved(name: str) -> None:
    op, build, count = OPS[name]
    module, n = build(), 3 * 7 * 10 * 48
    inputs = [torch.randn(3, 7, 10, 48).requires_grad_() for _ in range(count)]
    before = saved_bytes(module, lambda: module(*(x * 1 for x in inputs))).total
    hot.convert(module, policy(**{op: MASK if op in MASKED else INT8}))
    after = saved_bytes(module, lambda: module(*(x * 1 for x in inputs))).total
    codes = n // 8 if op in MASKED else count * (n + 4 * n // 48)
    scalars = 64  # the factor of x * 1, and the like
    assert codes <= after <= codes + scalars < before


def test_a_tensor_that_two_ops_read_is_kept_once() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x * 1
            return F.gelu(x) + F.silu(x)

    module, x = Two(), torch.randn(64, 96, requires_grad=True)
    hot.convert(module, policy(gelu=INT8, silu=INT8))
    assert saved_bytes(module, lambda: module(x)).total <= 64 * 96 + 64 * 4 + 64


def test_the_innermost_plan_speaks() -> None:
    model, x = nn.Sequential(nn.GELU(), nn.GELU()), torch.randn(64, 96, requires_grad=True)
    codes, raw = 64 * 96 + 64 * 4, 64 * 96 * 4
    for rules, expected in (
        ([{"match": "**", "gelu": INT8}], 2 * codes),
        ([{"match": "**", "gelu": INT8}, {"match": "1", "gelu": {"kind": "raw"}}], codes + raw),
        ([{"match": "1", "gelu": INT8}], codes + raw),
    ):
        hot.convert(model, hot.Policy(extends="exact", activations=rules))
        assert expected <= saved_bytes(model, lambda: model(x)).total <= expected + 64


@pytest.mark.parametrize("kind", [nn.ReLU, nn.LeakyReLU, nn.Hardtanh, nn.ReLU6])
def test_relus_in_place(kind: type[nn.Module]) -> None:
    module, x = nn.Sequential(nn.Linear(8, 8), kind(inplace=True)), torch.randn(5, 8)
    expected = run(module, x)
    hot.convert(module, policy(relu=MASK, leaky_relu=MASK, hardtanh=MASK))
    got = run(module, x)
    assert torch.equal(got[0], expected[0])
    assert all(torch.equal(a, b) for a, b in zip(got[1], expected[1], strict=True))


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("training", [True, False])
def test_dropout_draws_as_torch_does(p: float, training: bool) -> None:
    module, x = nn.Dropout(p).train(training), torch.randn(33, 7)
    expected = run(module, x)
    hot.convert(module, policy(dropout=MASK))
    got = run(module, x)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1][0], expected[1][0])


def test_attention_draws_the_same_again_and_nothing_of_what_comes_after() -> None:
    def draws(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)

    module, inputs = Op(draws), [held_by_int8((2, 3, 10, 16)) for _ in range(3)]
    expected, after = run(module, *inputs), torch.rand(3)
    hot.convert(module, policy(scaled_dot_product_attention=INT8))
    got, then = run(module, *inputs), torch.rand(3)
    assert torch.equal(got[0], expected[0]) and torch.equal(after, then)
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(got[1], expected[1], strict=True))


def test_nothing_is_saved_where_nothing_is_differentiated() -> None:
    module = nn.Sequential(nn.LayerNorm(16), nn.GELU(), nn.ReLU())
    hot.convert(module, policy(layer_norm=INT8, gelu=INT8, relu=MASK))
    x = torch.randn(4, 16)
    with torch.no_grad():
        assert not module(x).requires_grad
    module.requires_grad_(False)
    assert saved_bytes(module, lambda: module(x)).total == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("op", ["layer_norm", "gelu", "silu"])
def test_what_is_not_finite_stays_so_in_its_row(op: str, bad: float) -> None:
    module, x = {"layer_norm": lambda: nn.LayerNorm(16), "gelu": nn.GELU, "silu": nn.SiLU}[op](), torch.randn(4, 16)
    x[2, 3] = bad
    hot.convert(module, policy(**{op: INT8}))
    grad = run(module, x)[1][0]
    assert not grad[2].isfinite().all() and grad[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_recomputes_the_same(reentrant: bool) -> None:
    block = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 16))
    hot.convert(block, policy(layer_norm=INT8, gelu=INT8, dropout=MASK))
    x = torch.randn(6, 16)
    plain = run(block, x)
    wrapped = nn.Module()
    wrapped.block = block
    wrapped.forward = lambda x: checkpoint(block, x, use_reentrant=reentrant)
    torch.manual_seed(5)
    x = x.requires_grad_()
    y = wrapped.forward(x)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(6))
    y.backward(g)
    assert torch.equal(x.grad, plain[1][0])


def test_autocast_is_that_of_forward() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU())
    x = torch.randn(8, 32)

    def grads() -> tuple[Tensor, list[Tensor]]:
        with torch.autocast("cpu", torch.bfloat16):
            y = module(x)
        return y, list(torch.autograd.grad(y.float().square().sum(), module.parameters()))

    y, exact = grads()
    hot.convert(module, policy(layer_norm=INT8, gelu=INT8))
    same, near = grads()
    assert y.dtype == same.dtype and torch.equal(y, same)
    for a, b in zip(exact, near, strict=True):
        assert a.dtype == b.dtype and (a - b).norm() < 0.03 * a.norm()


def held_by_int8(shape: tuple[int, ...]) -> Tensor:
    """Values that codes of 8 bits a row are equal to: whole numbers up to 127, which is in every row, over 32."""
    x = torch.randint(-126, 127, shape).float()
    x[..., 0] = 127.0
    return x / 32


FUSED = ("layer_norm", "gelu", "silu")


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("name", [name for name, (op, *_) in OPS.items() if op not in (*MASKED, "softmax")])
def test_where_codes_hold_the_values_gradients_are_torchs(name: str, low: bool) -> None:
    """To the bit, under autocast too: what runs again runs in the dtype that it ran in. A backward of our own rounds otherwise."""
    op, build, count = OPS[name]
    torch.manual_seed(0)
    module, inputs = build(), [held_by_int8((3, 7, 10, 48)) for _ in range(count)]

    def grads() -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            y, found = run(module, *inputs)
        return [y, *found]

    exact = grads()
    hot.convert(module, policy(**{op: INT8}))
    for a, b in zip(exact, grads(), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5) if op in FUSED else torch.equal(a, b)


@pytest.mark.parametrize("build", [nn.ReLU, nn.LeakyReLU, lambda: nn.LeakyReLU(-0.5), nn.Hardtanh, nn.ReLU6])
def test_relus_let_pass_what_torchs_do(build: Callable[[], nn.Module]) -> None:
    inf = float("inf")
    x, module = torch.tensor([-inf, -2.0, -1.0, -0.0, 0.0, 0.5, 1.0, 5.0, 6.0, 7.0, inf, float("nan")]), build()
    expected = run(module, x)[1][0]
    hot.convert(module, policy(relu=MASK, leaky_relu=MASK, hardtanh=MASK))
    assert torch.equal(run(module, x)[1][0], expected)


class Eager(nn.Module):
    """Attention as models write it out."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.softmax(q @ k.transpose(-2, -1) / 4, -1) @ v


@pytest.mark.parametrize("low", [False, True])
def test_written_out_attention_keeps_its_chances_once(low: bool) -> None:
    """What softmax gave and the product behind it reads, n² values, is a byte each; gradients as those of the fused op."""
    torch.manual_seed(0)
    module, inputs = Eager(), [torch.randn(2, 3, 64, 16) for _ in range(3)]

    def grads() -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            y, found = run(module, *inputs)
        return [y, *found]

    (y, *exact), row = (
        grads(),
        {"kind": "quantized", "quantizer": {"kind": "int", "bits": 8, "granularity": "block", "block": 64}},
    )
    hot.convert(module, policy(softmax=row, matmul=row))
    same, *near = grads()
    assert torch.equal(y, same)
    for a, b in zip(exact, near, strict=True):
        assert 0 < (a - b).norm() < (0.03 if low else 0.02) * a.norm() and a.dtype == b.dtype
    given = [x.clone().requires_grad_() for x in inputs]
    saved = saved_bytes(module, lambda: module(*(x * 1 for x in given))).total
    codes = (2 * 3 * 64 * (64 + 3 * 16)) * (1 + 4 / 48)
    assert saved <= codes + 4096


def test_a_product_keeps_what_the_other_operand_needs() -> None:
    class Fixed(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return (a * 1) @ b

    module, a, b = Fixed(), torch.randn(64, 96, requires_grad=True), torch.randn(96, 256)
    hot.convert(module, policy(matmul=INT8))
    assert saved_bytes(module, lambda: module(a, b)).total <= 96 * (256 + 4) + 64  # no code of a, whose factor is fixed


def test_products_of_other_than_two_activations_are_torchs() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    for call in (
        lambda x, w: x @ w,  # a parameter
        lambda x, w: (x * 1) @ w[:, 0],  # a vector
        lambda x, w: torch.matmul((x * 1).expand(3, 4, 8), w * 1),  # broadcast
    ):
        module = Op(call, (8, 5))
        expected = run(module, x)
        hot.convert(module, policy(matmul=INT4))
        got = run(module, x)
        found = zip([got[0], *got[1]], [expected[0], *expected[1]], strict=True)
        assert all(torch.equal(a, b) for a, b in found)


def test_a_second_derivative_raises() -> None:
    module, x = nn.GELU(), torch.randn(3, 16, requires_grad=True)
    hot.convert(module, policy(gelu=INT8))
    (grad,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_conversion_and_back() -> None:
    model = Vit(dim=16, depth=2, heads=2, dropout=0.1).build((1, 28, 28), 10)
    kinds = {name: type(module) for name, module in model.named_modules()}
    state = model.state_dict()
    report = hot.convert(model, hot.load_policy("memory"))
    assert "blocks.0.mlp.act" in report.activations and "blocks.0.mlp.fc1" not in report.activations
    assert f"in {len(report.activations)} modules: layer_norm: int4 block 64 nearest · rms_norm" in str(report)
    assert model.state_dict().keys() == state.keys()
    x = torch.randn(4, 1, 28, 28)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.manual_seed(1)
        expected = model(x)
        torch.manual_seed(1)
        assert torch.equal(twin(x), expected)
        assert "hot_plan" in vars(twin.blocks[0].mlp.act)
    hot.convert(model, hot.load_policy("hot"))  # a second call replaces the first
    assert not hasattr(model.blocks[0].mlp.act, "hot_plan")
    hot.revert(model)
    assert {name: type(module) for name, module in model.named_modules()} == kinds


def test_rules_go_by_module_and_the_later_wins(tmp_path: Any) -> None:
    rules = [
        {"match": "**", "gelu": INT4},
        {"match": "blocks.0.**", "gelu": {"quantizer": {"bits": 8}}},
        {"match": {"type": "VisionTransformer"}, "gelu": {"kind": "raw"}},
    ]
    written = hot.Policy(extends="exact", activations=rules)
    hot.save_policy(written, tmp_path / "mine.yaml")
    assert hot.load_policy(tmp_path / "mine.yaml") == written == hot.Policy(**written.to_dict())
    child = hot.Policy(extends=written, activations=[{"match": "blocks.1.**", "gelu": {"kind": "raw"}}])
    found = hot.convert(Vit(dim=16, depth=2, heads=2).build((1, 28, 28), 10), child).activations
    assert str(found["blocks.0.mlp"]) == "gelu: int8 block 32 nearest"
    assert str(found[""]) == "raw" and str(found["blocks.1.mlp"]) == "raw"
    lost = hot.Policy(extends="exact", activations=[{"match": "heed", "gelu": INT8}])
    with pytest.raises(hot.PolicyError, match=r"matches no module of the model; the nearest layer is 'head'"):
        hot.convert(nn.ModuleDict({"head": nn.GELU()}), lost)


def test_a_transformer_trains_on_less() -> None:
    """Losses fall as under exact, with a third of the bytes."""

    def train(name: str) -> tuple[float, float, int]:
        torch.manual_seed(0)
        model = Vit(dim=32, depth=2, heads=2, patch=4).build((1, 28, 28), 10)
        x, y = torch.randn(32, 1, 28, 28), torch.randint(0, 10, (32,))
        hot.convert(model, hot.load_policy(name))
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        losses = []
        saved = saved_bytes(model, lambda: F.cross_entropy(model(x), y)).total
        for _ in range(40):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses[0], losses[-1], saved

    (first, exact, all_bytes), (same, memory, fewer) = train("exact"), train("memory")
    assert first == same and memory < 0.7 * first and abs(memory - exact) < 0.35 * first
    assert fewer < 0.36 * all_bytes


@given(st.data())
def test_a_layout_is_a_view_and_comes_back(data: st.DataObject) -> None:
    """Any permutation of a tensor with gaps; a slice of a projection is not copied."""
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    wide = torch.randn([2 * n for n in shape])
    parts = [slice(start, start + n) for n in shape for start in [data.draw(st.integers(0, n))]]
    x = wide[tuple(parts)].permute(data.draw(st.permutations(range(len(shape)))))
    layout = layout_of(x.shape, x.stride())
    assert torch.equal(layout.tensor(layout.matrix(x).clone()), x)
    q = torch.randn(2, 5, 3 * 4 * 8)[..., :32].unflatten(-1, (4, 8)).transpose(1, 2)
    matrix = layout_of(q.shape, q.stride()).matrix(q)
    assert matrix.shape == (10, 32) and matrix.data_ptr() == q.data_ptr()


@given(st.lists(st.integers(0, 5), min_size=2, max_size=2), st.integers(0, 2**31))
def test_bits_come_back(shape: list[int], seed: int) -> None:
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.5
    ops = ops_for("reference", "cpu")
    packed = ops.pack1(mask)
    assert packed.numel() == -(-mask.numel() // 8)
    assert torch.equal(ops.pass1(torch.ones(shape), packed, 1.0).bool(), mask)


def test_a_quantizer_that_is_none_keeps_the_values() -> None:
    module, x = nn.GELU(), torch.randn(5, 16)
    expected = run(module, x)
    hot.convert(module, policy(gelu={"kind": "quantized", "quantizer": {"kind": "none"}}))
    got = run(module, x)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1][0], expected[1][0])


class SwiGlu(nn.Module):
    """down(silu(gate(x)) · up(x)), as in Llama."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(dim, hidden), nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def test_what_can_be_made_again_is_not_kept() -> None:
    """The product behind a SiLU, and the layer behind both, keep nothing but the other factor's codes."""
    torch.manual_seed(0)
    module, x = SwiGlu(64, 256), torch.randn(32, 64)
    expected, exact = run(module, x)
    child = hot.Policy(
        extends="int8",
        defaults={"buffer": {"kind": "packed", "recompute": True}},
        activations=[{"match": "**", "silu": INT8, "mul": INT8}],
    )
    hot.convert(module, child)
    y, grads = run(module, x)
    assert torch.equal(y, expected)
    for a, b in zip(exact, grads, strict=True):
        assert (a - b).norm() < 0.03 * a.norm()
    codes = 2 * (32 * 256 + 32 * 4)
    packed = 64 * (32 + 4)  # of x, which both layers share
    inputs = torch.randn(32, 64)
    assert codes + packed <= saved_bytes(module, lambda: module(inputs)).total <= codes + packed + 32 * 64 * 4 + 64
    held = hot.Policy(extends=child, activations=[{"match": "**", "mul": {"kind": "raw"}}])
    hot.convert(module, held)
    assert saved_bytes(module, lambda: module(inputs)).total > codes + packed + 32 * 256 * 4


def test_products_of_other_shapes_are_left_alone() -> None:
    module = Op(lambda x, w: x * w * 2.0, (48,))
    x = torch.randn(5, 48)
    expected = run(module, x)
    hot.convert(module, policy(mul=INT8))
    got = run(module, x)
    assert torch.equal(got[0], expected[0]) and all(map(torch.equal, got[1], expected[1]))


class SpelledOut(nn.Module):
    """A norm as models write it themselves."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim))

    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        wide = x.to(torch.float32)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) + shift).to(x.dtype)


def test_a_module_keeps_its_input_and_runs_again() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(SpelledOut(64), nn.Dropout(0.4))
    x = held_by_int8((8, 64))
    expected, after = run(model, x), torch.rand(3)
    before = saved_bytes(model, lambda: model(x)).total
    rules = hot.Policy(
        extends="exact", activations=[{"match": {"type": "SpelledOut"}, "module": INT8}, {"match": "1", "module": INT8}]
    )
    hot.convert(model, rules)
    got, then = run(model, x), torch.rand(3)
    assert torch.equal(got[0], expected[0]) and torch.equal(after, then)
    for a, b in zip(expected[1], got[1], strict=True):
        assert (a - b).norm() < 0.02 * a.norm()
    assert saved_bytes(model, lambda: model(x)).total <= 2 * (8 * 64 + 8 * 4) + 64 < before
    with torch.no_grad():
        assert torch.equal(model.eval()(x), model(x))


class WrittenOut(nn.Module):
    """RMS norm as transformers' decoders have it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim))
        self.variance_epsilon = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)


class Shifted(WrittenOut):
    """Another norm, with the same parameters."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (1 + self.weight) * wide


@pytest.mark.parametrize("kind", [WrittenOut, Shifted])
def test_an_rms_norm_that_is_written_out_has_the_kernel_of_one(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module, x, calls = kind(64), held_by_int8((2, 8, 64)), []
    expected, forward = run(module, x), kind.forward
    assert is_rms_norm(kind, 1e-5) == (kind is WrittenOut)
    hot.convert(module, policy(module=INT8))
    monkeypatch.setattr(kind, "forward", lambda self, x: calls.append(0) or forward(self, x))
    got = run(module, x)
    assert len(calls) == (1 if kind is WrittenOut else 2)  # in backward it does not run again
    assert torch.equal(got[0], expected[0])
    for a, b in zip(expected[1], got[1], strict=True):
        assert (a - b).norm() < 0.02 * a.norm()


def test_a_module_that_returns_more_than_a_tensor_says_so() -> None:
    module = Op(lambda x: (x, x))
    hot.convert(module, policy(module=INT8))
    with pytest.raises(hot.HotError, match="its forward returns a tuple, not one tensor: leave it out"):
        module(torch.randn(3, requires_grad=True))


@pytest.mark.parametrize("last", [False, True])
def test_batch_norm_counts_a_batch_once(last: bool) -> None:
    torch.manual_seed(0)
    module, x = nn.BatchNorm2d(8), torch.randn(4, 8, 7, 7)
    x = x.to(memory_format=torch.channels_last) if last else x
    twin = copy.deepcopy(module)
    expected, exact = run(module, x)
    hot.convert(twin, policy(batch_norm=INT8))
    y, grads = run(twin, x)
    assert torch.equal(y, expected)
    assert all(torch.equal(a, b) for a, b in zip(module.buffers(), twin.buffers(), strict=True))
    for a, b in zip(exact, grads, strict=True):
        assert (a - b).norm() < 0.03 * a.norm()
    twin.eval()
    assert torch.equal(twin(x), module.eval()(x))


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy(reduction: str, low: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Part by part: torch's loss to the bit, and its gradient from codes; targets to ignore, too."""
    monkeypatch.setattr("hot.activations.losses.ELEMENTS", 7 * 50)
    torch.manual_seed(0)
    logits, target = held_by_int8((33, 50)) * 4, torch.randint(0, 50, (33,))
    target[[3, 20]] = -100

    class Loss(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.cross_entropy(x, target, reduction=reduction)

    def both(module: nn.Module) -> tuple[Tensor, Tensor]:
        x = logits.to(torch.bfloat16 if low else torch.float32).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            loss = module(x)
        return loss.detach(), torch.autograd.grad(loss.sum(), x)[0]

    module = Loss()
    expected, exact = both(module)
    x = logits.clone().requires_grad_()
    before = saved_bytes(module, lambda: module(x * 1)).total
    hot.convert(module, policy(cross_entropy=INT8))
    loss, grad = both(module)
    assert torch.equal(loss, expected) and grad.dtype == exact.dtype
    assert torch.allclose(grad.float(), exact.float(), rtol=0.01 if low else 1e-4, atol=1e-6)
    assert saved_bytes(module, lambda: module(x * 1)).total < before / 2


def test_cross_entropy_of_what_it_does_not_know_is_torchs() -> None:
    class Loss(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            smooth = F.cross_entropy(x, torch.arange(6), label_smoothing=0.1)
            return (
                smooth + F.cross_entropy(x, x.detach().softmax(1)) + F.cross_entropy(x[None].mT, torch.arange(6)[None])
            )

    module, x = Loss(), torch.randn(6, 6)
    expected = run(module, x)
    hot.convert(module, policy(cross_entropy=INT8))
    got = run(module, x)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1][0], expected[1][0])


def test_exact_products_from_compressed_inputs() -> None:
    """A convolution and a linear layer whose arithmetic is torch's: where codes hold the input, its gradients to the bit."""
    torch.manual_seed(0)
    rule = {"match": "**", "buffer": INT8}
    for layer, x in (
        (nn.Conv2d(4, 6, 3, 2, 1), held_by_int8((2, 4, 9, 32))),
        (nn.Conv2d(32, 6, 3, padding="same"), held_by_int8((2, 6, 5, 32)).permute(0, 3, 1, 2)),
        (nn.Linear(32, 5), held_by_int8((3, 7, 32))),
    ):
        expected = run(layer, x)
        hot.convert(layer, hot.Policy(extends="exact", rules=[rule]))
        got = run(layer, x)
        assert torch.equal(got[0], expected[0]) and all(map(torch.equal, got[1][:2], expected[1][:2]))
        assert torch.allclose(got[1][2], expected[1][2], rtol=1e-5)  # the bias gradient is a sum, in another order
        twin = x.detach() * 1
        assert saved_bytes(layer, lambda layer=layer, twin=twin: layer(twin)).total <= 1.2 * x.numel() + 64


@pytest.mark.parametrize("rounding", ["hashed", "nearest"])
def test_hashed_codes_are_unbiased(rounding: str) -> None:
    """Where gradients are linear in a kept input, their mean over many equal inputs is exact's, within 4 deviations."""
    keeps = {
        "kind": "quantized",
        "quantizer": {"kind": "int", "bits": 4, "granularity": "block", "block": 64, "rounding": rounding},
    }
    step, value = 1 / 7, 0.3
    x = torch.full((4096, 64), value)
    x[:, ::64] = 1.0  # the largest of each block, which all others are scaled by
    others = 4096 * 63
    # a coefficient is one of its two neighbours: by the chance that makes its mean the value
    low = value // step
    chance = value / step - low
    deviation = step * (chance * (1 - chance)) ** 0.5 / others**0.5

    gate = Op(lambda x, w: x * (w + 0), (4096, 64))
    hot.convert(gate, policy(mul=keeps))
    y = gate(x)
    (of_weight,) = torch.autograd.grad(y, list(gate.parameters()), torch.ones_like(y))
    layer = nn.Conv2d(64, 1, 1, bias=False)
    hot.convert(layer, hot.Policy(extends="exact", rules=[{"match": "**", "buffer": keeps}]))
    y = layer(x.view(1, 64, 64, 64).permute(0, 3, 1, 2))
    (of_layer,) = torch.autograd.grad(y, [layer.weight], torch.ones_like(y))
    for found in (of_weight.sum() - of_weight[:, 0].sum(), of_layer.sum() - of_layer[0, 0].sum()):
        off = abs(found.item() / others - value)
        assert off < 4 * deviation if rounding == "hashed" else off > 0.2 * step * min(chance, 1 - chance)


def test_recompute_is_refused_where_it_means_nothing() -> None:
    with pytest.raises(hot.PolicyError, match="activations: gelu: recompute is for the buffer of a layer"):
        hot.convert(nn.GELU(), policy(gelu={**INT8, "recompute": True}))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("how", [(3, 2, 1), (2,), (3, 1, 1, 2), ((2, 3), (3, 1), (1, 0), 1, False, True)])
def test_max_pool_keeps_a_byte(how: tuple[Any, ...], last: bool) -> None:
    module, x = nn.MaxPool2d(*how), torch.randn(2, 4, 11, 13).round(decimals=1)  # with ties
    x = x.to(memory_format=torch.channels_last) if last else x
    expected = run(module, x)
    hot.convert(module, policy(max_pool2d={"kind": "byte"}))
    got = run(module, x)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1][0], expected[1][0])
    x = x.requires_grad_()
    assert saved_bytes(module, lambda: module(x * 1)).total <= got[0].numel() + 64


def test_a_convolution_behind_batch_norm_and_relu_keeps_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.Conv2d(32, 8, 3))
    x = torch.randn(4, 3, 12, 12).to(memory_format=torch.channels_last)
    expected = run(model, x)
    keep = {"buffer": {**INT8, "recompute": True}}
    hot.convert(
        model,
        hot.Policy(
            extends="exact",
            rules=[{"match": "3", **keep}],
            activations=[{"match": "**", "batch_norm": INT8, "relu": MASK}],
        ),
    )
    got = run(model, x)
    assert torch.equal(got[0], expected[0])
    for a, b in zip(expected[1], got[1], strict=True):
        assert (a - b).norm() < 0.05 * a.norm() + 1e-4
    n = 4 * 32 * 100
    saved = saved_bytes(model, lambda: model(x)).total - x.numel() * 4
    assert n + n // 8 <= saved <= 1.3 * n + n // 8


class Unknown(nn.Module):
    """Ops that have no rule: a softmax by hand, a sine, a product with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64))

    def forward(self, x: Tensor) -> Tensor:
        y = x.sin() * self.weight
        return y.softmax(-1) + x.tanh() + (y @ self.weight.expand(64, 64).T) + x.sum(-1, keepdim=True).exp()


def test_the_catch_all_keeps_codes_of_whatever_is_saved() -> None:
    torch.manual_seed(0)
    module, x = Unknown(), torch.randn(300, 64) * 0.3
    expected, exact = run(module, x)
    inner = x.clone().requires_grad_() * 1  # no leaf, which would be left alone
    before = saved_bytes(module, lambda: module(inner)).total
    hot.convert(module, policy(other=INT8))
    y, grads = run(module, x)
    assert torch.equal(y, expected)
    for a, b in zip(exact, grads, strict=True):
        assert 0 < (a - b).norm() < 0.02 * a.norm()
    after = saved_bytes(module, lambda: module(inner)).total
    assert after < 0.35 * before  # seen by hooks outside, which get the codes


def test_a_module_inside_that_catches_nothing_hands_all_to_hooks_outside() -> None:
    model = nn.Sequential(nn.Sequential(Unknown()), nn.Sigmoid())
    x = torch.randn(300, 64) * 0.3
    rules = [{"match": "**", "other": INT8}, {"match": "0.**", "other": {"kind": "raw"}}]
    hot.convert(model, hot.Policy(extends="exact", activations=rules))
    seen: list[torch.dtype] = []

    def note(t: Tensor) -> Tensor:
        seen.append(t.dtype)
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        y = model(x.requires_grad_())
    assert seen.count(torch.int8) == 1 and seen.count(torch.float32) > 3  # the sigmoid's result alone is caught
    with torch.autograd.graph.save_on_cpu():
        offloaded = model(x)
    one, two = (torch.autograd.grad(each.sum(), x)[0] for each in (y, offloaded))
    assert torch.equal(one, two)


def test_the_catch_all_leaves_alone_what_others_keep() -> None:
    """The codes and scales of ops that have a rule are saved as they are, however many scales there are."""
    model = nn.Sequential(nn.LayerNorm(1024), nn.Linear(1024, 8))
    x = torch.randn(300, 1024)
    blocks = {"kind": "quantized", "quantizer": {"kind": "int", "bits": 8, "granularity": "block", "block": 16}}
    hot.convert(model, policy(layer_norm=blocks))
    expected = run(model, x)
    hot.convert(model, policy(layer_norm=blocks, other=INT8))
    got = run(model, x)
    assert torch.equal(got[1][0], expected[1][0])  # the norm saw the same codes; the linear layer's weight did not
    assert 0 < (got[1][3] - expected[1][3]).norm() < 0.02 * expected[1][3].norm()


def test_what_was_changed_in_place_is_not_made_again() -> None:
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = F.gelu(x)
            with torch.no_grad():
                y += 3.0
            return self.layer(y)

    torch.manual_seed(0)
    module, x = Changes(), torch.randn(32, 64)
    _, exact = run(module, x)
    child = hot.Policy(
        extends="int8",
        defaults={"buffer": {"kind": "packed", "recompute": True}},
        activations=[{"match": "**", "gelu": INT8}],
    )
    hot.convert(module, child)
    _, grads = run(module, x)
    assert (exact[1] - grads[1]).norm() < 0.03 * exact[1].norm()

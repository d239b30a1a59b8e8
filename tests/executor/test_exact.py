"""Laws 1 and 2: exact is bitwise torch's, and so is the forward output under every plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers import HOT, PLANS, Grads, for_conv, grads, normal, relative
from torch import nn
from torch.utils.checkpoint import checkpoint

from hot.convert import HotConv2d, HotLinear
from hot.executor import conv2d, linear
from hot.policies.buffers import Quantized, Raw
from hot.policies.plan import GradInputPlan, GradWeightPlan, LayerPlan

EXACT = LayerPlan()
SHAPES = [(8,), (5, 8), (2, 5, 8), (2, 3, 5, 8)]
CONVOLUTIONS = {
    "1x1": ({}, 1),
    "3x3": ({}, 3),
    "stride": ({"stride": 2}, 3),
    "1x1 stride": ({"stride": 2}, 1),
    "1x1 padded": ({"padding": 1}, 1),
    "padding": ({"padding": (2, 1), "stride": (1, 2)}, (3, 2)),
    "same": ({"padding": "same"}, 3),
    "same, even": ({"padding": "same"}, (2, 4)),
    "same, dilated": ({"padding": "same", "dilation": (2, 1)}, (4, 3)),
    "valid": ({"padding": "valid"}, 3),
    "dilation": ({"dilation": (2, 3), "padding": 3}, (3, 2)),
    "strided to a ragged edge": ({"stride": 3, "padding": 1}, 2),
}
IMAGES = {
    "batch": ((2, 3, 9, 11), None),
    "unbatched": ((3, 9, 11), None),
    "channels_last": ((2, 3, 9, 11), torch.channels_last),
}


def assert_bitwise(got: Grads, torchs: Grads, names: tuple[str, ...] = Grads._fields) -> None:
    for name in names:
        a, b = getattr(got, name), getattr(torchs, name)
        assert a.dtype == b.dtype and torch.equal(a, b), name


def image(name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    shape, layout = IMAGES[name]
    x = normal(*shape, dtype=dtype)
    return x if layout is None else x.contiguous(memory_format=layout)


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_exact_linear(shape: tuple[int, ...], dtype: torch.dtype, autocast: bool) -> None:
    """Law 1, the functional form."""
    operands = normal(*shape, dtype=dtype), normal(12, 8, dtype=dtype, seed=1), normal(12, dtype=dtype, seed=2)
    got = grads(lambda *t: linear(*t, EXACT), *operands, autocast=autocast)
    assert_bitwise(got, grads(F.linear, *operands, autocast=autocast))


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", IMAGES)
@pytest.mark.parametrize("case", CONVOLUTIONS)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_exact_conv2d(case: str, kind: str, dtype: torch.dtype, autocast: bool) -> None:
    """Law 1, the functional form."""
    options, kernel = CONVOLUTIONS[case]
    weight = nn.Conv2d(3, 4, kernel).weight.to(dtype)
    operands = image(kind, dtype), weight, normal(4, dtype=dtype)
    got = grads(lambda *t: conv2d(*t, EXACT, **options), *operands, autocast=autocast)
    assert_bitwise(got, grads(lambda *t: F.conv2d(*t, **options), *operands, autocast=autocast))


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", [0, (1, 2), "same"], ids=str)
@pytest.mark.parametrize("kind", IMAGES)
def test_exact_modules(kind: str, padding: int | tuple[int, int] | str, mode: str) -> None:
    """Law 1, the converted module: its padding_mode goes to the right axis, and nothing else is lost."""
    theirs = nn.Conv2d(3, 4, (3, 2), padding=padding, padding_mode=mode)
    x = image(kind)
    expected = grads(theirs, x)
    weight_grad, theirs.weight.grad = theirs.weight.grad, None
    theirs.__class__, theirs.hot_plan = HotConv2d, EXACT
    assert_bitwise(grads(theirs, x), expected, ("output", "grad_input"))
    assert torch.equal(theirs.weight.grad, weight_grad)


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("path", ["grad_input", "grad_weight"])
def test_half_exact_linear(path: str, shape: tuple[int, ...], autocast: bool) -> None:
    """Law 1 for one path: the other one is quantized."""
    operands = normal(*shape), normal(12, 8, seed=1), normal(12, seed=2)
    got = grads(lambda *t: linear(*t, half_exact(path)), *operands, autocast=autocast)
    theirs = grads(F.linear, *operands, autocast=autocast)
    assert_bitwise(got, theirs, ("output", path))
    other = {"grad_input": "grad_weight", "grad_weight": "grad_input"}[path]
    assert not torch.equal(getattr(got, other), getattr(theirs, other))


@pytest.mark.parametrize("path", ["grad_input", "grad_weight"])
@pytest.mark.parametrize("kind", IMAGES)
@pytest.mark.parametrize("case", CONVOLUTIONS)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_half_exact_conv2d(case: str, kind: str, path: str) -> None:
    """Law 1 for one path: the other one is quantized."""
    options, kernel = CONVOLUTIONS[case]
    operands = image(kind), nn.Conv2d(3, 4, kernel).weight, normal(4)
    got = grads(lambda *t: conv2d(*t, half_exact(path), **options), *operands)
    theirs = grads(lambda *t: F.conv2d(*t, **options), *operands)
    assert_bitwise(got, theirs, ("output", path))
    assert relative(got.grad_bias, theirs.grad_bias) < 1e-6


def half_exact(path: str) -> LayerPlan:
    if path == "grad_input":
        return LayerPlan(GradInputPlan(), HOT.grad_weight, Quantized())
    return LayerPlan(HOT.grad_input, GradWeightPlan(), Raw())


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("name", PLANS)
def test_forward_is_torchs(name: str, autocast: bool) -> None:
    """Law 2, and the bias gradient is exact under every plan."""
    for shape in SHAPES:
        operands = normal(*shape), normal(12, 8, seed=1), normal(12, seed=2)
        got = grads(lambda *t: linear(*t, PLANS[name]), *operands, autocast=autocast)
        theirs = grads(F.linear, *operands, autocast=autocast)
        assert_bitwise(got, theirs, ("output",))
        assert relative(got.grad_bias, theirs.grad_bias) < (1e-2 if autocast else 1e-6)
    for kind in IMAGES:
        operands = image(kind), normal(4, 3, 3, 3, seed=1), normal(4, seed=2)
        got = grads(lambda *t: conv2d(*t, for_conv(PLANS[name]), 1, 1), *operands, autocast=autocast)
        assert_bitwise(got, grads(lambda *t: F.conv2d(*t, 1, 1), *operands, autocast=autocast), ("output",))


@pytest.mark.parametrize("name", PLANS)
def test_output_may_be_changed_in_place(name: str) -> None:
    """Law 2: what a layer returns is nobody's view, as torch's."""
    for shape in SHAPES:
        for bias in (None, normal(12)):
            y = linear(normal(*shape), normal(12, 8).requires_grad_(), bias, PLANS[name])
            y += 1
            y.relu_()
            y.sum().backward()
    for kind in IMAGES:
        conv2d(image(kind), normal(4, 3, 1, 1).requires_grad_(), None, PLANS[name]).relu_().sum().backward()


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("name", PLANS)
def test_checkpointing(name: str, reentrant: bool) -> None:
    """Law 2: the forward may run twice, dropout between two layers included."""
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 16))
    for layer in (model[0], model[3]):
        layer.__class__, layer.hot_plan = HotLinear, PLANS[name]
    x = normal(2, 20, 16)
    plain, again = (run_seeded(model, x, f) for f in (model, lambda t: checkpoint(model, t, use_reentrant=reentrant)))
    if reentrant and name in ("random_rows", "stochastic"):
        # its first forward runs without gradients and draws nothing, so the draws, and the dropout, are others
        assert all(torch.isfinite(t).all() for t in again)
        return
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def run_seeded(model: nn.Module, x: torch.Tensor, f: object) -> list[torch.Tensor]:
    torch.manual_seed(5)
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = f(x)  # type: ignore[operator]
    y.backward(normal(*y.shape, seed=7))
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("buffer", [Raw(), Quantized()], ids=str)
def test_exact_products_of_a_buffer(buffer: Raw | Quantized) -> None:
    """A plan that only compresses the buffer computes both products as torch does."""
    operands = normal(4, 20, 32), normal(24, 32, seed=1), normal(24, seed=2)
    got = grads(lambda *t: linear(*t, replace(EXACT, buffer=buffer)), *operands)
    theirs = grads(F.linear, *operands)
    assert_bitwise(got, theirs, ("output", "grad_input"))
    assert relative(got.grad_weight, theirs.grad_weight) < 0.02

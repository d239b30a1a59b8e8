"""Law 10: convolution with every option, against torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import HOT, PLANS, UNQUANTIZED, decibels, for_conv, grads, normal, relative
from torch import nn

from hot.convert import HotConv2d
from hot.executor import conv2d

GRID = [
    ({}, 3),
    ({"stride": 2}, 3),
    ({"stride": (1, 3), "padding": (2, 0)}, (2, 3)),
    ({"padding": 1}, 3),
    ({"padding": "same"}, 3),
    ({"padding": "same"}, 4),
    ({"padding": "same", "dilation": (1, 2)}, (2, 4)),
    ({"padding": "valid", "dilation": 2}, 3),
    ({"stride": 3, "padding": 1, "dilation": (2, 1)}, (2, 3)),
    ({"stride": 4}, 2),
    ({}, 1),
    ({"stride": 2}, 1),
    ({"stride": (3, 1), "padding": (1, 2)}, 1),
    ({"padding": "same"}, 1),
    ({"padding": 4}, 5),
]
SHAPES = {"batch": (2, 6, 10, 13), "unbatched": (6, 10, 13), "one pixel": (3, 6, 5, 5)}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["", "channels_last"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("options", "kernel"), GRID, ids=str)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_every_option(options: dict, kernel: int | tuple[int, int], shape: str, layout: torch.memory_format) -> None:
    """Unquantized: torch's gradients to rounding. 8 bits: above 35 dB."""
    x = normal(*SHAPES[shape])
    if x.dim() == 4:
        x = x.contiguous(memory_format=layout)
    operands = x, nn.Conv2d(6, 7, kernel).weight, normal(7)
    theirs = grads(lambda *t: F.conv2d(*t, **options), *operands)
    for name, plan, floor in (
        ("packed", UNQUANTIZED["packed"], 100),
        ("raw", UNQUANTIZED["raw"], 100),
        ("int8", PLANS["hadamard_int8"], 35),
    ):
        pointwise = kernel == 1 and options.get("padding", 0) in (0, "same", "valid")
        own = plan if pointwise else for_conv(plan)
        ours = grads(lambda *t, p=own: conv2d(*t, p, **options), *operands)
        for got, exact in zip(ours, theirs, strict=True):
            assert got.shape == exact.shape and got.dtype == exact.dtype and decibels(got, exact) > floor, name


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", [(1, 2), "same"], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 7, 9), (3, 7, 9)], ids=str)
@pytest.mark.parametrize("name", ["hadamard_int8", "unquantized"])
def test_padding_modes(name: str, shape: tuple[int, ...], padding: tuple[int, int] | str, mode: str) -> None:
    plan = for_conv(UNQUANTIZED["packed"] if name == "unquantized" else PLANS[name])
    layer = nn.Conv2d(3, 5, (3, 4), padding=padding, padding_mode=mode, dilation=(1, 2))
    theirs = grads(layer, normal(*shape))
    weight, layer.weight.grad = layer.weight.grad, None
    layer.__class__, layer.hot_plan = HotConv2d, plan
    ours = grads(layer, normal(*shape))
    floor = 100 if name == "unquantized" else 35
    assert decibels(ours.grad_input, theirs.grad_input) > floor and decibels(layer.weight.grad, weight) > floor


@pytest.mark.parametrize("columns", [1, 500, 5000])
def test_columns_in_pieces(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """grad_input of a k×k layer works on some samples at a time, with their own scales, and gives the same."""
    import hot.executor as executor

    sizes, product = [], executor.product

    def measured(*args: object) -> torch.Tensor:
        made = product(*args)  # type: ignore[arg-type]
        sizes.append(made.numel())
        return made

    operands = normal(5, 4, 6, 6), normal(7, 4, 3, 3), normal(7)
    for plan in (HOT, PLANS["tensor_scales"], PLANS["block_scales"], UNQUANTIZED["packed"]):
        run = lambda *t, p=for_conv(plan): conv2d(*t, p, padding=1)  # noqa: E731
        monkeypatch.undo()
        whole = grads(run, *operands)
        monkeypatch.setattr("hot.views.COLUMNS", columns)
        monkeypatch.setattr(executor, "product", measured)
        assert all(relative(a, b) < 1e-6 for a, b in zip(grads(run, *operands), whole, strict=True))
        assert max(sizes) <= max(columns, 6 * 6 * 4 * 9)  # one sample at least


def test_pair_options() -> None:
    """Options come as numbers, pairs, lists and torch's one-element tuples."""
    operands = normal(2, 3, 6, 6), normal(4, 3, 3, 3), normal(4)
    for options in ({"stride": (2,)}, {"padding": [1, 1]}, {"dilation": torch.Size([2, 1])}, {"stride": [2]}):
        ours, theirs = (grads(lambda *t, f=f: f(*t, **options), *operands) for f in (
            lambda *t, **k: conv2d(*t, for_conv(UNQUANTIZED["packed"]), **k), F.conv2d))  # fmt: skip
        assert all(relative(a, b) < 1e-5 for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("kernel", [1, 3])
def test_patches(kernel: int) -> None:
    """A patch embedding (stride = kernel) and a layer of one output pixel."""
    for size, stride in ((kernel * 4, kernel), (kernel, 1)):
        operands = normal(3, 5, size, size), normal(6, 5, kernel, kernel), normal(6)
        plan = PLANS["hadamard_int8"] if kernel == 1 else for_conv(PLANS["hadamard_int8"])
        ours = grads(lambda *t, p=plan, s=stride: conv2d(*t, p, s), *operands)
        theirs = grads(lambda *t, s=stride: F.conv2d(*t, s), *operands)
        assert decibels(ours.grad_input, theirs.grad_input) > 35 and decibels(ours.grad_weight, theirs.grad_weight) > 35

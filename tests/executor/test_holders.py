"""Codes of grad_input that are held as float8: whether, is the backend's choice; the gradients are the same to the last bit."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from helpers import FLOAT, FULL, HOT, I4, I8, integer
from torch import Tensor

import hot
from hot.backends import REFERENCE, backends, get_ops, ops_for
from hot.backends.ops import in_float8
from hot.operands import holders
from hot.policies.plan import GradInputPlan
from hot.policies.quantizers import Luq, Quantizer


@pytest.fixture(autouse=True)
def _a_chip_with_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend of that kind without kernels of its own: `auto` prefers it and ends with the reference."""
    chip = dataclasses.replace(backends[REFERENCE], name="chip", priority=9, float8=lambda: 100)
    monkeypatch.setitem(backends._entries, "chip", chip)
    monkeypatch.setattr("hot.backends.table._ready", {})


def grads(backend: str, x_shape: tuple[int, ...]) -> list[Tensor]:
    x, w, b, g = (torch.randn(shape) for shape in (x_shape, (56, x_shape[-1]), (56,), (*x_shape[:-1], 56)))
    inputs = [t.requires_grad_() for t in (x, w, b)]
    return list(torch.autograd.grad(hot.linear(*inputs, dataclasses.replace(HOT, backend=backend)), inputs, g))


@pytest.mark.parametrize("x_shape", [(41, 48), (3, 197, 33), (5,)])
def test_they_change_no_bit(x_shape: tuple[int, ...]) -> None:
    assert get_ops("auto", "cpu").float8 == 100 and get_ops(REFERENCE, "cpu").float8 == math.inf
    torch.manual_seed(1)
    held = grads("auto", x_shape)
    torch.manual_seed(1)
    assert all(torch.equal(a, b) for a, b in zip(held, grads(REFERENCE, x_shape), strict=True))


BLOCK = integer(4, granularity="block", block=16)
BLOCK128, TILE128 = (integer(4, granularity=kind, block=128) for kind in ("block", "tile"))


@pytest.mark.parametrize(
    ("grad_output", "weight", "expected"),
    [
        (integer(4, "hashed"), I4, ("int4.e4m3", "int4.e4m3")),
        (integer(5), integer(2, granularity="tensor"), ("int5.e4m3", "int2.e4m3")),
        (Luq(bits=4), I4, ("log4.e4m3", "int4.e4m3")),
        (I8, I4, (None, None)),
        (I4, integer(6), (None, None)),
        (BLOCK, BLOCK, (None, None)),
        (BLOCK128, TILE128, ("int4.e4m3", "int4.e4m3")),
        (BLOCK128, BLOCK128, (None, None)),
        (TILE128, BLOCK128, (None, None)),
        (BLOCK128, I4, (None, None)),
        (integer(4, granularity="token"), I4, (None, None)),
        (FLOAT, I4, (None, None)),
    ],
)
def test_who_is_held(grad_output: Quantizer, weight: Quantizer, expected: tuple[str | None, str | None]) -> None:
    path = GradInputPlan(FULL, grad_output, weight)
    assert holders(path, ops_for("auto", "cpu")) == expected
    assert holders(path, ops_for("auto", "cpu"), 100) == expected
    assert holders(path, ops_for("auto", "cpu"), 99) == (None, None)  # a small product
    assert holders(path, ops_for(REFERENCE, "cpu")) == (None, None)


@pytest.mark.parametrize("format", ["int2", "int3", "int4", "int5", "log2", "log3", "log4"])
def test_float8_holds_every_code(format: str) -> None:
    ops = ops_for(REFERENCE, "cpu")
    x = torch.linspace(-1, 1, 511).view(1, -1)
    how = "row", 0, "nearest", ()
    codes, scale = ops.quantize(x, format, *how)
    held, same = ops.quantize(x, in_float8(format), *how)
    assert held.dtype == torch.float8_e4m3fn and torch.equal(held.float(), codes.float()) and torch.equal(scale, same)


@pytest.mark.parametrize("format", ["int6", "int8", "e4m3", "e5m2", "int4.e4m3"])
def test_what_float8_does_not_hold(format: str) -> None:
    assert in_float8(format) is None

"""Tests of kernels that the table of `hot check` is too small for, for every backend that runs on the CPU.

A test file imports them all and has a fixture `ours`, the backend's ops there.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hot.backends import Ops, ops_for
from hot.hadamard import random_signs, sequency_order

REFERENCE = ops_for("reference", "cpu")


def same(ours: Ops, x: Tensor, *how: object) -> None:
    got, want = ours.quantize(x, *how), REFERENCE.quantize(x, *how)
    assert got[0].dtype == want[0].dtype and torch.equal(got[0].float(), want[0].float())
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("layout", ["contiguous", "rows innermost"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("granularity", "group"), [("row", 0), ("block", 17_000), ("token", 0), ("tensor", 0)])
def test_rows_that_take_two_passes(ours: Ops, granularity: str, group: int, dtype: torch.dtype, layout: str) -> None:
    x = torch.randn(5, 40_001, dtype=dtype) * torch.logspace(-2, 2, 5, dtype=dtype)[:, None]
    x[3] = 0.0
    same(ours, x if layout == "contiguous" else x.T.contiguous().T, "int4", granularity, group, "hashed", ())


@pytest.mark.parametrize("granularity", ["row", "token", "tensor"])
def test_what_is_not_finite_in_two_passes(ours: Ops, granularity: str) -> None:
    x = torch.randn(8, 33_000)
    x[1, 20_000], x[2, 7] = float("nan"), float("-inf")
    codes, scale = ours.quantize(x, "int8", granularity, 0, "nearest", ())
    want_codes, want = REFERENCE.quantize(x, "int8", granularity, 0, "nearest", ())
    assert torch.equal(codes, want_codes) and torch.equal(scale.isnan(), want.isnan())


@pytest.mark.parametrize("format", ["int2", "int3", "int5", "int6", "log2", "log3", "int5.e4m3", "log3.e4m3"])
def test_the_other_formats(ours: Ops, format: str) -> None:
    for rounding in ("nearest", "hashed", "pseudo_stochastic"):
        same(ours, torch.randn(9, 130), format, "block", 64, rounding, ())


def test_stochastic_follows_the_seed_as_the_reference_does(ours: Ops) -> None:
    x = torch.randn(20, 30)
    for format in ("int4", "log4", "e4m3"):
        torch.manual_seed(5)
        got = ours.quantize(x, format, "row", 0, "stochastic", ())[0]
        torch.manual_seed(5)
        assert torch.equal(got.float(), REFERENCE.quantize(x, format, "row", 0, "stochastic", ())[0].float())


SHAPES = {
    "wide": torch.randn(3, 5000),
    "tall": torch.randn(300, 40),
    "rows innermost": torch.randn(400, 70).T,
    "operand of tokens": torch.randn(3, 197, 50).permute(2, 0, 1),
    "samples outermost": torch.randn(3, 50, 197).permute(1, 0, 2),
    "five axes that do not merge": torch.randn(2, 3, 4, 5, 64)[:, ::2, ::3, 1:],
    "one element a row": torch.randn(7, 1),
    "one row, strided": torch.randn(64, 2).T[:1],
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("block", [1, 4, 64])
@pytest.mark.parametrize(("prefix", "tail"), [(0, "pad"), (1, "keep"), (3, "pad")])
def test_transforms_of_every_shape(
    ours: Ops, name: str, block: int, prefix: int, tail: str, dtype: torch.dtype
) -> None:
    """Exact: whole numbers, so that no order of summation matters; the gain of these blocks is a power of two."""
    x = (SHAPES[name].double() * 8).round().to(dtype)
    rows, signs = sequency_order(block)[: max(block // 2, 1)], random_signs(block, 3)
    for how in ((tuple(range(block)), ()), (rows, signs)):
        got, want = (ops.project(x, block, *how, prefix, tail, None) for ops in (ours, REFERENCE))
        assert got.is_contiguous() and torch.equal(got, want)
        back, expected = (ops.expand(want, x.shape[-1], block, *how, prefix, tail, None) for ops in (ours, REFERENCE))
        assert torch.equal(back, expected)


@pytest.mark.parametrize("block", [2**bits for bits in range(13)])
def test_every_block_is_its_own_inverse(ours: Ops, block: int) -> None:
    x = torch.randn(3, 2 * block)
    torch.testing.assert_close(ours.hadamard(ours.hadamard(x, block), block), x)


def test_a_draw_is_read_where_it_is(ours: Ops) -> None:
    x, draw = torch.randn(4, 64), torch.tensor([5, 1, 15, 8])
    rows = tuple(range(16))
    got, want = (ops.project(x, 16, rows, (), 0, "pad", draw) for ops in (ours, REFERENCE))
    torch.testing.assert_close(got, want)
    back, expected = (ops.expand(want, 64, 16, rows, (), 0, "pad", draw) for ops in (ours, REFERENCE))
    torch.testing.assert_close(back, expected)

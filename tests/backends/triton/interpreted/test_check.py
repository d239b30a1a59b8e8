"""The table of `hot check` under the interpreter, and what the table is too small for.

Left out, because the interpreter is at fault: denormal bfloat16, which it reads wrongly; bfloat16 results, which it truncates;
products of two float8 or bfloat16 matrices. Left out, because the oracle is: transforms in float64, where its own product is off
by twice the limit; they have a test of their own.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from hot.backends import OPS, kernels, ops_for
from hot.checking import Case, cases
from hot.checking.runner import ONE_DTYPE, TRANSFORMS, _judge
from hot.checking.sources import DTYPES, LAYOUTS
from hot.hadamard import random_signs, sequency_order

OURS, REFERENCE = ops_for("triton", "cpu"), ops_for("reference", "cpu")
CPU = torch.device("cpu")
SERVED = [op for op in OPS if f"triton.{op}" in kernels]


def is_right(op: str, dtype: str, case: Case) -> bool:
    """Whether interpreter and oracle are to be trusted with a case."""
    if dtype == "bfloat16":
        return case.edge != "denormal" and op not in (
            "dequantize",
            "matmul",
            "transform_quantize",
            "grad_output_operands",
        )
    return dtype != "float64" or op not in TRANSFORMS


def table() -> Iterator[tuple[str, str, str]]:
    """Every op, dtype and layout; of the fused ops, which take the interpreter long, three of them."""
    for op in SERVED:
        if OPS[op].composition is not None:
            yield from (
                (op, *each) for each in (("float32", "contiguous"), ("float32", "transposed"), ("float16", "sliced"))
            )
            continue
        for dtype in DTYPES[:1] if op in ONE_DTYPE else DTYPES:
            for layout in LAYOUTS:
                yield op, dtype, layout


def served(op: str, dtype: str, layout: str) -> list[Case]:
    """The cases to be trusted that the op's kernel serves."""
    trusted = [case for case in cases(op, dtype, layout, CPU) if is_right(op, dtype, case)]
    return [case for case in trusted if kernels[f"triton.{op}"].supports(*case.args.values())]


def test_every_op_has_a_kernel() -> None:
    assert {"hadamard", "project", "expand", "quantize", "dequantize", "pack4", "unpack4"} <= set(SERVED)


@pytest.mark.parametrize("op", SERVED)
def test_every_kernel_is_tried(op: str) -> None:
    assert sum(len(served(op, "float32", layout)) for layout in LAYOUTS) > 5


@pytest.mark.parametrize(
    ("op", "dtype", "layout"),
    [pytest.param(*each, id="-".join(each) + "-fused" * (OPS[each[0]].composition is not None)) for each in table()],
)
def test_the_table_of_hot_check(op: str, dtype: str, layout: str) -> None:
    tried = served(op, dtype, layout)
    if not tried:
        pytest.skip("the kernel serves none of these, or interpreter or oracle are not to be trusted with them")
    verdicts = [(case, _judge(kernels[f"triton.{op}"], case, CPU)) for case in tried]
    assert [f"{case}: {verdict.what}" for case, verdict in verdicts if not verdict.ok] == []


def same(x: Tensor, *how: object) -> None:
    got, want = OURS.quantize(x, *how), REFERENCE.quantize(x, *how)
    assert got[0].dtype == want[0].dtype and torch.equal(got[0].float(), want[0].float())
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("layout", ["contiguous", "rows innermost"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("granularity", "group"), [("row", 0), ("block", 17_000), ("token", 0), ("tensor", 0)])
def test_rows_that_take_two_passes(granularity: str, group: int, dtype: torch.dtype, layout: str) -> None:
    x = torch.randn(5, 40_001, dtype=dtype) * torch.logspace(-2, 2, 5, dtype=dtype)[:, None]
    x[3] = 0.0
    same(x if layout == "contiguous" else x.T.contiguous().T, "int4", granularity, group, "hashed", ())


@pytest.mark.parametrize("granularity", ["row", "token", "tensor"])
def test_what_is_not_finite_in_two_passes(granularity: str) -> None:
    x = torch.randn(8, 33_000)
    x[1, 20_000], x[2, 7] = float("nan"), float("-inf")
    codes, scale = OURS.quantize(x, "int8", granularity, 0, "nearest", ())
    want_codes, want = REFERENCE.quantize(x, "int8", granularity, 0, "nearest", ())
    assert torch.equal(codes, want_codes) and torch.equal(scale.isnan(), want.isnan())


@pytest.mark.parametrize("format", ["int2", "int3", "int5", "int6", "log2", "log3", "int5.e4m3", "log3.e4m3"])
def test_the_other_formats(format: str) -> None:
    for rounding in ("nearest", "hashed", "pseudo_stochastic"):
        same(torch.randn(9, 130), format, "block", 64, rounding, ())


def test_stochastic_follows_the_seed_as_the_reference_does() -> None:
    x = torch.randn(20, 30)
    for format in ("int4", "log4", "e4m3"):
        torch.manual_seed(5)
        got = OURS.quantize(x, format, "row", 0, "stochastic", ())[0]
        torch.manual_seed(5)
        assert torch.equal(got.float(), REFERENCE.quantize(x, format, "row", 0, "stochastic", ())[0].float())


def test_what_is_left_to_the_reference() -> None:
    supports = kernels["triton.quantize"].supports
    x = torch.randn(2, 64)
    assert not supports(x, "int4", "row", 0, "nearest", (12.1, 12.2))
    assert not supports(x, "int4", "block", 3, "hashed", ()) and supports(x, "int4", "block", 3, "nearest", ())
    assert not kernels["triton.hadamard"].supports(torch.randn(8192), 8192)
    assert not kernels["triton.project"].supports(torch.randn(48), 16, (0, 0), (), 0, "pad", None)
    assert kernels["triton.project"].supports(x=x, block=16, rows=(0, 1), signs=(), prefix=0, tail="pad", draw=None)


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


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("block", [1, 4, 64])
@pytest.mark.parametrize(("prefix", "tail"), [(0, "pad"), (1, "keep"), (3, "pad")])
def test_transforms_of_every_shape(name: str, block: int, prefix: int, tail: str) -> None:
    """In float64 and exact: whole numbers, so that no order of summation matters; the gain of these blocks is a power of two."""
    x = (SHAPES[name].double() * 8).round()
    rows, signs = sequency_order(block)[: max(block // 2, 1)], random_signs(block, 3)
    for how in ((tuple(range(block)), ()), (rows, signs)):
        got, want = (ops.project(x, block, *how, prefix, tail, None) for ops in (OURS, REFERENCE))
        assert got.is_contiguous() and torch.equal(got, want)
        back, expected = (ops.expand(want, x.shape[-1], block, *how, prefix, tail, None) for ops in (OURS, REFERENCE))
        assert torch.equal(back, expected)


@pytest.mark.parametrize("block", [2**bits for bits in range(13)])
def test_every_block_is_its_own_inverse(block: int) -> None:
    x = torch.randn(3, 2 * block)
    torch.testing.assert_close(OURS.hadamard(OURS.hadamard(x, block), block), x)


def test_a_draw_is_read_where_it_is() -> None:
    x, draw = torch.randn(4, 64), torch.tensor([5, 1, 15, 8])
    rows = tuple(range(16))
    got, want = (ops.project(x, 16, rows, (), 0, "pad", draw) for ops in (OURS, REFERENCE))
    torch.testing.assert_close(got, want)
    back, expected = (ops.expand(want, 64, 16, rows, (), 0, "pad", draw) for ops in (OURS, REFERENCE))
    torch.testing.assert_close(back, expected)

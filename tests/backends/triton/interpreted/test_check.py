"""The table of `hot check` under the interpreter, and what the table is too small for.

Left out, because the interpreter is at fault: denormal bfloat16, which it reads wrongly; bfloat16 results, which it truncates;
products of two float8 or bfloat16 matrices. Left out, because the oracle is: transforms in float64, where its own product is off
by twice the limit; they have a test of their own.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from beyond_the_table import *  # noqa: F403  tests that take `ours`

from hot.backends import OPS, Ops, kernels, ops_for
from hot.checking import Case, cases
from hot.checking.runner import ONE_DTYPE, TRANSFORMS, _judge
from hot.checking.sources import DTYPES, LAYOUTS

OURS, CPU = ops_for("triton", "cpu"), torch.device("cpu")
SERVED = [op for op in OPS if f"triton.{op}" in kernels]


@pytest.fixture
def ours() -> Ops:
    return OURS


def is_right(op: str, dtype: str, case: Case) -> bool:
    """Whether interpreter and oracle are to be trusted with a case."""
    if dtype == "bfloat16":
        return case.edge != "denormal" and op not in (
            "dequantize",
            "matmul",
            "transform_quantize",
            "grad_output_operands",
            "activation",
            "activation_backward",
            "norm_backward",
            "batch_norm_backward",
            "batch_norm",
            "pass1",
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


def test_what_is_left_to_the_reference() -> None:
    supports = kernels["triton.quantize"].supports
    x = torch.randn(2, 64)
    assert not supports(x, "int4", "row", 0, "nearest", (12.1, 12.2))
    assert not supports(x, "int4", "block", 3, "hashed", ()) and supports(x, "int4", "block", 3, "nearest", ())
    assert not kernels["triton.hadamard"].supports(torch.randn(8192), 8192)
    assert not kernels["triton.project"].supports(torch.randn(48), 16, (0, 0), (), 0, "pad", None)
    assert kernels["triton.project"].supports(x=x, block=16, rows=(0, 1), signs=(), prefix=0, tail="pad", draw=None)


def test_a_draw_without_a_transform_is_none_fused() -> None:
    """Of a block of one element there is nothing to draw: the operand is that of no draw."""
    x, how = torch.randn(6, 2, 32), ("int8", "row", 0, "hashed", ())
    for view in (x, x.permute(2, 1, 0)):
        got, want = (
            OURS.transform_quantize(view, 1, (0,), (), 0, "pad", draw, *how) for draw in (torch.tensor([0]), None)
        )
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])

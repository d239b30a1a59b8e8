"""The kernels in CUDA C++ on the CPU: the table of `hot check`, and what that is too small for.

Left out: the fused ops, which are instructions of tensor cores.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from beyond_the_table import *  # noqa: F403  tests that take `ours`
from beyond_the_table import REFERENCE, same
from cuda_on_host import emulation, needs_compiler

from hot.backends import Ops, kernels
from hot.checking import cases
from hot.checking.runner import ONE_DTYPE, _judge, _settled
from hot.checking.sources import DTYPES, LAYOUTS

pytestmark = needs_compiler
CPU = torch.device("cpu")
SERVED = ("hadamard", "project", "expand", "quantize", "dequantize", "pack4", "unpack4", "matmul")


@pytest.fixture
def ours() -> Iterator[Ops]:
    with emulation() as ops:
        yield ops


@pytest.mark.parametrize(
    ("op", "dtype"), [(op, dtype) for op in SERVED for dtype in (DTYPES[:1] if op in ONE_DTYPE else DTYPES)]
)
def test_the_table_of_hot_check(ours: Ops, op: str, dtype: str) -> None:
    kernel, tried = kernels[f"cupy.{op}"], [case for layout in LAYOUTS for case in cases(op, dtype, layout, CPU)]
    served = [case for case in tried if kernel.supports(*case.args.values())]
    assert served or (op, dtype) == ("matmul", "float64")
    with _settled(CPU):
        verdicts = [(case, _judge(kernel, case, CPU)) for case in served]
    assert [f"{case}: {verdict.what}" for case, verdict in verdicts if not verdict.ok] == []


@pytest.mark.parametrize("layout", ["contiguous", "rows innermost", "every second"])
@pytest.mark.parametrize(
    ("k", "dtype", "format", "rounding"),
    [
        (3, torch.bfloat16, "int8", "hashed"),
        (300, torch.float16, "int4.e4m3", "hashed"),
        (520, torch.float32, "e4m3", "pseudo_stochastic"),
        (1024, torch.bfloat16, "int4", "nearest"),
        (1800, torch.bfloat16, "int8", "hashed"),  # a tile of rows, each the work of a whole program
        (2500, torch.float64, "log4", "hashed"),
        (9001, torch.bfloat16, "e5m2", "hashed"),
    ],
)
def test_rows_of_every_length(ours: Ops, k: int, dtype: torch.dtype, format: str, rounding: str, layout: str) -> None:
    """Teams of every size, for one scale a row and for tiles."""
    x = (torch.randn(37, 2 * k) * torch.logspace(-2, 2, 37)[:, None]).to(dtype)
    x = {"contiguous": x[:, :k].contiguous(), "rows innermost": x.T.contiguous().T[:, :k], "every second": x[:, ::2]}[
        layout
    ]
    same(ours, x, format, "row", 0, rounding, ())
    same(ours, x, format, "tile", 16, rounding, ())


@pytest.mark.parametrize("group", [1, 2, 6, 16, 100, 128])
def test_groups_of_every_size(ours: Ops, group: int) -> None:
    x = torch.randn(33, 333).bfloat16()
    for view in (x, x.T):
        for granularity in ("block", "tile"):
            same(ours, view, "int4", granularity, group, "hashed" if group % 2 == 0 else "nearest", ())


@pytest.mark.parametrize("block", [2, 64, 1024, 2048])
def test_rows_read_across(ours: Ops, block: int) -> None:
    """What is read across lies where the chosen coefficients are put, one row after another."""
    x = torch.randn(2 * block + 3, 70).T
    for rows in (range(block), range(0, block, 2), (block - 1,)):
        got, want = (ops.project(x, block, tuple(rows), (), 0, "pad", None) for ops in (ours, REFERENCE))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        back, expected = (
            ops.expand(want.T.contiguous().T, 2 * block + 3, block, tuple(rows), (), 0, "pad", None)
            for ops in (ours, REFERENCE)
        )
        torch.testing.assert_close(back, expected, rtol=1e-5, atol=1e-5)


def test_what_is_left_to_others(ours: Ops) -> None:
    supports = kernels["cupy.quantize"].supports
    x = torch.randn(2, 64)
    assert not supports(x, "int4", "row", 0, "nearest", (12.1, 12.2))
    assert not supports(x, "int4", "block", 3, "hashed", ()) and supports(x, "int4", "block", 3, "nearest", ())
    assert not kernels["cupy.hadamard"].supports(torch.randn(8192), 8192)
    assert not kernels["cupy.project"].supports(torch.randn(48), 16, (0, 0), (), 0, "pad", None)
    assert kernels["cupy.project"].supports(x=x, block=16, rows=(0, 1), signs=(), prefix=0, tail="pad", draw=None)

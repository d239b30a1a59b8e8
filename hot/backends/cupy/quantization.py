"""quantize and dequantize: how the kernels of kernels/quantization.cu and dequantization.cu are launched.

x is read once where a row, or a K-block, fits into the registers of a team of threads; else once for the largest magnitudes and
once for the codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from hot.backends.cupy.launch import NUMBERS, Kernel, fits
from hot.backends.devices import multiprocessors, on_device
from hot.backends.layouts import cdiv, power_of_2
from hot.backends.ops import FLOAT8, MANTISSA, code_dtype, is_tiled, largest_code, scale_shape
from hot.backends.table import register_kernel

LAYOUT, DEQUANTIZE = "@5Q8qd3i", "@3Q8q3i"
"""Of struct Quantize and struct Dequantize."""
ROOM = 96 * 1024
"""Bytes of shared memory that every chip gives a program."""


class Team(NamedTuple):
    """W threads with E elements each hold one row of a strip of columns."""

    w: int
    e: int

    @property
    def columns(self) -> int:
        return self.w * self.e

    @property
    def threads(self) -> int:
        """Of a program, which is at least one team."""
        return max(self.w, 256)


class Matrix(NamedTuple):
    """x (rows, K) in runs of `span` columns, `down` rows of which share a scale; innermost: neighbouring rows are nearer."""

    x: Tensor
    span: int
    down: int

    @property
    def steps(self) -> tuple[int, int]:
        row, column = (stride if size > 1 else 1 for stride, size in zip(self.x.stride(), self.x.shape, strict=True))
        return row, column

    @property
    def innermost(self) -> bool:
        return self.x.shape[0] > 1 and 0 < self.steps[0] < self.steps[1]

    @property
    def runs(self) -> int:
        return cdiv(self.x.shape[1], self.span)

    def dense(self, t: Tensor, row_step: int) -> bool:
        """Whether threads may move their chunks of t's rows at once, wherever a run begins."""
        chunk = 2 if self.x.dtype == torch.float64 else 4
        return fits(t, chunk, row_step, self.span if self.runs > 1 else 0)


def _kind(format: str) -> str:
    return "FLOAT8" if format in FLOAT8 else "LOGARITHMIC" if format.startswith("log") else "INTEGER"


@cache
def _quantize_kernel(
    dtype: torch.dtype, format: str, rounding: str, scales: str, team: Team, innermost: bool
) -> Kernel:
    mantissa = MANTISSA.get(code_dtype(format), 0)
    template = NUMBERS[dtype], _kind(format), str(mantissa), rounding.upper(), scales, str(team.w), str(team.e)
    return Kernel("quantization.cu", "quantize_kernel", (*template, str(innermost).lower()), LAYOUT)


@cache
def _largest_kernel(dtype: torch.dtype, each: int, innermost: bool) -> Kernel:
    return Kernel("quantization.cu", "largest_kernel", (NUMBERS[dtype], str(each), str(innermost).lower()), LAYOUT)


def _whole_run(matrix: Matrix) -> Team | None:
    """The team that holds a whole run of columns, or None where that is too long."""
    span, size = matrix.span, matrix.x.element_size()
    if span <= 256:
        team = Team(max(power_of_2(cdiv(span, 8)), 8 if matrix.innermost else 1), 8)
    elif span <= 1024:
        team = Team(32, power_of_2(cdiv(span, 32)))
    elif span <= 8192:
        team = Team(256, power_of_2(cdiv(span, 256)))
    else:
        team = Team(1024, power_of_2(cdiv(span, 1024)))
    if team.e > (16 if size == 8 and team.w == 1024 else 32):
        return None
    return team if not matrix.innermost or _tile(team, size) else None


def _tile(team: Team, size: int) -> int:
    """So many rows of a strip are held in shared memory, for elements of that size; 0: too few to be read well."""
    return next((rows for rows in (32, 16) if _shared(team, size, rows) <= ROOM), 0)


def _shared(team: Team, size: int, tile: int) -> int:
    """Bytes of shared memory: a number for each of 32 warps, and the tile with its padding."""
    return 32 * 8 + tile * (team.columns * size + max(size, 4))


def _supports(x: Tensor, format: str, granularity: str, group: int, rounding: str, clip: Sequence[float]) -> bool:
    """No clip; a pair of neighbours with one hash must lie in one K-block."""
    split_pairs = rounding == "hashed" and granularity in ("block", "tile") and group % 2 == 1
    return x.dtype in NUMBERS and not clip and not split_pairs


@register_kernel("quantize", backend="cupy", supports=_supports)
def quantize(
    x: Tensor, format: str, granularity: str, group: int, rounding: str, clip: Sequence[float]
) -> tuple[Tensor, Tensor]:
    rows, k = x.shape
    codes = torch.empty((rows, k), dtype=code_dtype(format), device=x.device)
    scale = torch.empty(scale_shape(rows, k, granularity, group), dtype=torch.float32, device=x.device)
    if not x.numel():
        return codes, scale.fill_(torch.finfo(torch.float32).tiny)
    random = torch.rand((rows, k), dtype=torch.float32, device=x.device) if rounding == "stochastic" else scale
    down = {"tensor": rows, "tile": group}.get(granularity, 1)
    matrix = Matrix(x, min(group, k) if granularity in ("block", "tile") else k, down)
    team = _whole_run(matrix) if granularity in ("row", "block") else None
    with on_device(x):
        if team is not None:
            top, scales = scale, "OWN"
        else:
            top, scales = _largest(matrix, granularity, scale), "TOKEN" if granularity == "token" else "KNOWN"
            team = (_whole_run(matrix) if matrix.span <= 256 else None) or Team(32, 8 if matrix.innermost else 16)
        _launch(matrix, team, codes, scale, random, top, format, rounding, scales)
    return codes, scale


def _largest(matrix: Matrix, granularity: str, scale: Tensor) -> Tensor:
    """The largest magnitude of every scale's group, as bits, in the scale's shape."""
    x = matrix.x
    top = torch.zeros(scale.shape, dtype=torch.int64 if x.dtype == torch.float64 else torch.int32, device=x.device)
    if granularity == "token":  # one a row of the transposed matrix
        matrix = Matrix(x.T, x.shape[0], 1)
    elif granularity == "tensor" and x.is_contiguous():
        matrix = Matrix(x.view(1, -1), x.numel(), 1)
    rows, each = matrix.x.shape[0], 8 if matrix.span <= 256 and not matrix.innermost else 32
    strips = cdiv(matrix.span, each if matrix.innermost else 32 * each)
    units = (cdiv(rows, 32) if matrix.innermost else rows) * matrix.runs * strips
    programs = min(cdiv(units, 8), 16 * multiprocessors(x.device))
    _largest_kernel(x.dtype, each, matrix.innermost)(
        programs, 256,
        x.data_ptr(), 0, 0, 0, top.data_ptr(), *matrix.x.shape, *matrix.steps, matrix.span, matrix.runs, strips,
        matrix.down, 0.0, 0, matrix.steps[1] == 1 and matrix.dense(x, matrix.steps[0]), 0,
    )  # fmt: skip
    return top


def _launch(
    matrix: Matrix, team: Team, codes: Tensor, scale: Tensor, random: Tensor, top: Tensor,
    format: str, rounding: str, scales: str,
) -> None:  # fmt: skip
    x, (rows, k), strips = matrix.x, matrix.x.shape, cdiv(matrix.span, team.columns)
    pieces, tile = matrix.runs * strips, _tile(team, x.element_size()) if matrix.innermost else 0
    programs = cdiv(rows, tile) * pieces if tile else cdiv(rows * pieces, team.threads // team.w)
    _quantize_kernel(x.dtype, format, rounding, scales, team, matrix.innermost)(
        programs, team.threads,
        x.data_ptr(), codes.data_ptr(), scale.data_ptr(), random.data_ptr(), top.data_ptr(),
        rows, k, *matrix.steps, matrix.span, matrix.runs, strips, matrix.down, largest_code(format),
        tile, matrix.steps[1] == 1 and matrix.dense(x, matrix.steps[0]), matrix.dense(codes, k),
        shared=_shared(team, x.element_size(), tile) if tile or team.w > 32 else 0,
    )  # fmt: skip


@cache
def _dequantize_kernel(dtype: torch.dtype, mantissa: int) -> Kernel:
    return Kernel("dequantization.cu", "dequantize_kernel", (NUMBERS[dtype], str(mantissa)), DEQUANTIZE)


@register_kernel("dequantize", backend="cupy", supports=lambda codes, scale, group, dtype: dtype in NUMBERS)
def dequantize(codes: Tensor, scale: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    rows, k = codes.shape
    out = torch.empty((rows, k), dtype=dtype, device=codes.device)
    if not out.numel():
        return out
    codes = codes if codes.stride(1) == 1 or k == 1 else codes.contiguous()
    row_step = codes.stride(0) if rows > 1 else 0
    steps = [stride if size > 1 else 0 for size, stride in zip(scale.shape, scale.stride(), strict=True)]
    down, wide = group if is_tiled(codes, scale, group) else 1, group or int(scale.shape[1] > 1)
    chunk = 16 // out.element_size()
    with on_device(codes):
        _dequantize_kernel(dtype, MANTISSA.get(codes.dtype, 0))(
            min(cdiv(rows * cdiv(k, chunk), 256), 2**30), 256,
            codes.data_ptr(), scale.data_ptr(), out.data_ptr(), rows, k, row_step, 1, down, wide, *steps,
            fits(codes, chunk, row_step), fits(out, chunk, k), wide % chunk == 0,
        )  # fmt: skip
    return out


SPECIMENS = [
    _quantize_kernel(torch.bfloat16, "int4.e4m3", "hashed", "OWN", Team(32, 32), False),
    _quantize_kernel(torch.float32, "int8", "stochastic", "OWN", Team(1024, 32), False),
    _quantize_kernel(torch.float64, "log4", "nearest", "OWN", Team(4, 8), False),
    _quantize_kernel(torch.float16, "e4m3", "hashed", "OWN", Team(32, 8), True),
    _quantize_kernel(torch.float32, "e5m2", "pseudo_stochastic", "KNOWN", Team(32, 16), False),
    _quantize_kernel(torch.bfloat16, "int8", "nearest", "TOKEN", Team(32, 8), True),
    _largest_kernel(torch.bfloat16, 8, False),
    _largest_kernel(torch.float64, 32, True),
    _dequantize_kernel(torch.bfloat16, 0),
    _dequantize_kernel(torch.float32, 3),
    _dequantize_kernel(torch.float64, 2),
]

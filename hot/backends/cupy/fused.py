"""transform_quantize and grad_output_operands: how the kernels of operands.cu are launched.

They take 16-bit floats whose columns are dense, blocks of 16 (or no transform), and integer codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from hot.backends.cupy.launch import Kernel
from hot.backends.devices import has_fp8, multiprocessors, on_device
from hot.backends.layouts import is_across
from hot.backends.ops import code_dtype, largest_code, scale_shape
from hot.backends.table import register_kernel
from hot.backends.transforms import held_basis

SIDE, TILE, WARPS, THREADS = 16, 128, 8, 256
"""Of a block; rows and columns of a tile; warps and threads of a program."""
STRIPS = 2 * TILE * TILE
"""Bytes of a tile in shared memory."""
LAYOUT = "@12Q2q7i2f"
"""Of struct Operands."""

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
ROUNDINGS = ("nearest", "hashed", "pseudo_stochastic")
SCALES = {"row": "ROW", "tensor": "TENSOR", "block": "GROUP", "tile": "GROUP", "": "NONE"}


class _Way(NamedTuple):
    """What one operand's transform and quantizer are to the kernels; granularity is empty for an operand that is not made."""

    rank: int
    format: str
    granularity: str
    rounding: str

    @property
    def scales(self) -> str:
        return SCALES[self.granularity]

    @property
    def holder(self) -> str:
        return "INT8" if code_dtype(self.format) == torch.int8 else "E4M3"

    @property
    def group(self) -> int:
        return TILE if self.scales == "GROUP" else 0

    def tops(self, rows: int) -> int:
        """How many largest magnitudes must be known before the first code."""
        return {"NONE": 0, "GROUP": 0, "TENSOR": 1, "ROW": rows}[self.scales]


NOTHING = _Way(SIDE, "int8", "", "nearest")


class _Matrix(NamedTuple):
    """How the kernels see a tensor: `samples` × `length` rows of `columns` that are dense."""

    samples: int
    length: int
    columns: int
    stride: int  # of a sample
    step: int  # of a row
    dtype: torch.dtype


class _Launch(NamedTuple):
    kernel: Kernel
    grid: int
    shared: int
    tiles: int  # a program


class _Job:
    """Operands of one size: what is allocated, and the launches."""

    def __init__(self, m: _Matrix, along: _Way, across: _Way, bias: bool, device: torch.device) -> None:
        many = multiprocessors(device)
        per = -(-m.length // SIDE)
        blocks, panels = m.samples * per, -(-m.columns // TILE)
        self.tiles, self.panels, rows = -(-blocks // (TILE // SIDE)), panels, m.samples * m.length
        self.columns, self.bias = m.columns, bias
        self.room = [
            (shape, dtype)
            for way, count, k in (
                (along, rows, -(-m.columns // SIDE) * SIDE),
                (across, m.columns, blocks * across.rank),
            )
            if way.granularity
            for shape, dtype in (
                ((count, k), code_dtype(way.format)),
                (scale_shape(count, k, way.granularity, way.group), torch.float32),
            )
        ]
        self.makes_along, self.makes_across = bool(along.granularity), bool(across.granularity)
        self.sizes = m.stride, m.step, m.length, per, blocks, m.columns, self.tiles, panels
        self.limits = largest_code(along.format), largest_code(across.format)

        dtype, sums, rank = DTYPES[m.dtype], str(bias).lower(), str(across.rank)
        codes = *(way.rounding.upper() for way in (along, across)), *(way.holder for way in (along, across))
        staged = WARPS * TILE * across.rank if self.makes_across else 16
        shared = 2 * STRIPS + max(staged + 8 * TILE + 2 * TILE + 4 * WARPS, 4 * WARPS * TILE)
        needs = along.tops(rows), across.tops(m.columns)
        by_rows = {along.scales, across.scales} <= {"ROW", "NONE"}
        if any(needs) and by_rows and self.tiles * panels <= 2 * many:  # all run at once, and hold all of the matrix
            both = _kernel("both_kernel", dtype, along.scales, across.scales, rank, sums, *codes)
            self.launches, self.groups, self.counters = [_Launch(both, self.tiles * panels, shared, 1)], self.tiles, 0
            self.along_tops, self.tops = needs[0] * panels, needs[0] * panels + needs[1] * self.tiles
            return
        self.launches, self.groups, self.counters = [], 0, 0
        self.along_tops, self.tops = needs[0], sum(needs)
        if bias or self.tops:
            top = [way.scales if way.tops(1) else "NONE" for way in (along, across)]
            largest = _kernel("largest_kernel", dtype, *top, rank, sums)
            self.launches.append(self._launch(largest, 2 * many, 2 * STRIPS + 4 * WARPS * TILE))
            self.groups = self.launches[0].grid // panels
            self.counters = panels + self.groups
        quantize = _kernel("quantize_kernel", dtype, along.scales, across.scales, rank, *codes)
        self.launches.append(self._launch(quantize, (3 if across.rank == 8 else 2) * many, shared))

    def _launch(self, kernel: Kernel, at_once: int, shared: int) -> _Launch:
        """The tiles a program that let `at_once` programs at a time end soonest; a program costs as much as one tile more."""
        counts = range(1, min(self.tiles, 32) + 1)
        waves = {count: -(-self.panels * -(-self.tiles // count) // at_once) for count in counts}
        count = min(counts, key=lambda count: waves[count] * (count + 1))
        return _Launch(kernel, self.panels * -(-self.tiles // count), shared, count)

    def __call__(self, x: Tensor, along_basis: Tensor, across_basis: Tensor) -> tuple[Tensor, ...]:
        """Codes and scale of each operand that is made, then, if asked for, the sums of the columns in x's dtype."""
        x = _aligned(x)
        made = [torch.empty(shape, dtype=dtype, device=x.device) for shape, dtype in self.room]
        pointers = [t.data_ptr() for t in made]
        along = pointers[:2] if self.makes_along else (0, 0)
        across = pointers[-2:] if self.makes_across else (0, 0)
        sums = bias = 0
        make = torch.zeros if self.counters else torch.empty  # both_kernel counts nothing, and writes before it reads
        words = make(self.counters + self.tops, dtype=torch.int32, device=x.device)
        counters = words.data_ptr()
        if self.bias:
            kept = torch.empty(self.groups * self.columns, dtype=torch.float32, device=x.device)
            made.append(torch.empty(self.columns, dtype=x.dtype, device=x.device))
            sums, bias = kept.data_ptr(), made[-1].data_ptr()
        top = counters + 4 * self.counters
        values = (
            x.data_ptr(), along_basis.data_ptr(), across_basis.data_ptr(), top, top + 4 * self.along_tops,
            *along, *across, sums, bias, counters, *self.sizes,
        )  # fmt: skip
        with on_device(x):
            for kernel, grid, shared, tiles in self.launches:
                kernel(grid, THREADS, *values, tiles, *self.limits, shared=shared)
        return tuple(made)


@cache
def _kernel(name: str, *template: str) -> Kernel:
    return Kernel("operands.cu", name, template, LAYOUT, cooperative=name == "both_kernel")


_job = lru_cache(maxsize=4096)(_Job)


def _fits(
    block: int, rank: int, prefix: int, tail: str, draw: Tensor | None, length: int,
    format: str, granularity: str, group: int, rounding: str, clip: Sequence[float], granularities: tuple[str, ...],
) -> bool:  # fmt: skip
    """Whether the kernels can make this operand of an axis of that length."""
    ragged = length % SIDE
    if block not in (1, SIDE) or (ragged and (block == 1 or tail == "keep")) or draw is not None or prefix or clip:
        return False
    if rounding not in ROUNDINGS or not format.startswith("int"):
        return False
    return granularity in granularities and (granularity in ("row", "tensor") or group == TILE)


ALONG, ACROSS = ("row", "tensor", "block"), ("row", "tensor", "tile")


def _is_dense(x: Tensor, stride: int, step: int, columns: int) -> bool:
    """Whether columns lie so that 16 bytes at a time can be read, once the first does: see `_aligned`. A compiler asks too,
    which knows no addresses."""
    return x.dtype in DTYPES and x.numel() > 0 and not (stride % 8 or step % 8 or columns % 8)


def _aligned(x: Tensor) -> Tensor:
    """x, or a copy laid out likewise where it begins between multiples of 16 bytes, as few views do."""
    if x.data_ptr() % 16 == 0:
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


def _holds(format: str, device: torch.device) -> bool:
    """Whether the chip makes codes of that format: float8 from capability 8.9 on."""
    return code_dtype(format) == torch.int8 or has_fp8(device)


def _serves_operand(
    x: Tensor, block: int, rows: Sequence[int], signs: Sequence[int], prefix: int, tail: str, draw: Tensor | None,
    format: str, granularity: str, group: int, rounding: str, clip: Sequence[float],
) -> bool:  # fmt: skip
    count, samples, length = x.shape
    rank = SIDE if block == 1 else len(rows)
    if not _holds(format, x.device):
        return False
    spec = block, rank, prefix, tail, draw, length, format, granularity, group, rounding, clip
    if is_across(x):
        if granularity == "tile" and (rank != SIDE or samples > 1):
            return False
        return rank in (8, 16) and _is_dense(x, x.stride(1), x.stride(2), count) and _fits(*spec, ACROSS)
    dense = x.stride(2) == 1 and samples == 1
    return dense and rank == SIDE and _is_dense(x, 0, x.stride(0), length) and _fits(*spec, ALONG)


@register_kernel("transform_quantize", backend="cupy", supports=_serves_operand)
def transform_quantize(
    x: Tensor, block: int, rows: Sequence[int], signs: Sequence[int], prefix: int, tail: str, draw: Tensor | None,
    format: str, granularity: str, group: int, rounding: str, clip: Sequence[float],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    way = _Way(SIDE if block == 1 else len(rows), format, granularity, rounding)
    count, samples, length = x.shape
    matrix = held_basis(block, tuple(rows), tuple(signs), x.dtype, x.device)  # of 16: all of the gain is in it
    if is_across(x):
        seen, ways = _Matrix(samples, length, count, x.stride(1), x.stride(2), x.dtype), (NOTHING, way)
    else:
        seen, ways = _Matrix(1, count, length, 0, x.stride(0), x.dtype), (way, NOTHING)
    codes, scale = _job(seen, *ways, False, x.device)(x, matrix, matrix)
    return codes, scale


def _serves_gradient(
    g: Tensor,
    i_block: int, i_rows: Sequence[int], i_signs: Sequence[int],
    i_format: str, i_granularity: str, i_group: int, i_rounding: str, i_clip: Sequence[float],
    w_block: int, w_rows: Sequence[int], w_signs: Sequence[int], w_prefix: int, w_tail: str, w_draw: Tensor | None,
    w_format: str, w_granularity: str, w_group: int, w_rounding: str, w_clip: Sequence[float],
    bias: bool,
) -> bool:  # fmt: skip
    _, length, outputs = g.shape
    i_rank, w_rank = SIDE if i_block == 1 else len(i_rows), SIDE if w_block == 1 else len(w_rows)
    i_spec = i_block, i_rank, 0, "pad", None, outputs, i_format, i_granularity, i_group, i_rounding, i_clip
    w_spec = w_block, w_rank, w_prefix, w_tail, w_draw, length, w_format, w_granularity, w_group, w_rounding, w_clip
    fits = i_rank == SIDE and w_rank in (8, 16) and _fits(*i_spec, ALONG) and _fits(*w_spec, ("row", "tensor"))
    fits = fits and _holds(i_format, g.device) and _holds(w_format, g.device)
    return fits and (g.stride(2) == 1 or outputs == 1) and _is_dense(g, g.stride(0), g.stride(1), outputs)


@register_kernel("grad_output_operands", backend="cupy", supports=_serves_gradient)
def grad_output_operands(
    g: Tensor,
    i_block: int, i_rows: Sequence[int], i_signs: Sequence[int],
    i_format: str, i_granularity: str, i_group: int, i_rounding: str, i_clip: Sequence[float],
    w_block: int, w_rows: Sequence[int], w_signs: Sequence[int], w_prefix: int, w_tail: str, w_draw: Tensor | None,
    w_format: str, w_granularity: str, w_group: int, w_rounding: str, w_clip: Sequence[float],
    bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    along = _Way(SIDE, i_format, i_granularity, i_rounding)
    across = _Way(SIDE if w_block == 1 else len(w_rows), w_format, w_granularity, w_rounding)
    samples, length, outputs = g.shape
    seen = _Matrix(samples, length, outputs, g.stride(0), g.stride(1), g.dtype)
    job = _job(seen, along, across, bias, g.device)
    i_basis = held_basis(i_block, tuple(i_rows), tuple(i_signs), g.dtype, g.device)
    w_basis = held_basis(w_block, tuple(w_rows), tuple(w_signs), g.dtype, g.device)
    i_codes, i_scale, w_codes, w_scale, *sums = job(g, i_basis, w_basis)
    return i_codes, i_scale, w_codes, w_scale, sums[0] if bias else g.new_empty(0)


def _specimens() -> list[Kernel]:
    """Every way in which the kernels' templates differ, for a compiler without a GPU."""
    return [
        _kernel("largest_kernel", "bf16", "ROW", "ROW", "8", "true"),
        _kernel("largest_kernel", "fp16", "TENSOR", "TENSOR", "16", "false"),
        _kernel("both_kernel", "bf16", "ROW", "ROW", "8", "true", "HASHED", "HASHED", "E4M3", "INT8"),
        _kernel("both_kernel", "fp16", "ROW", "NONE", "16", "false", "NEAREST", "NEAREST", "INT8", "INT8"),
        _kernel("both_kernel", "bf16", "NONE", "ROW", "16", "false", "NEAREST", "PSEUDO_STOCHASTIC", "INT8", "E4M3"),
        _kernel("quantize_kernel", "bf16", "ROW", "ROW", "8", "HASHED", "HASHED", "E4M3", "INT8"),
        _kernel("quantize_kernel", "fp16", "GROUP", "NONE", "16", "NEAREST", "NEAREST", "E4M3", "INT8"),
        _kernel("quantize_kernel", "bf16", "NONE", "GROUP", "16", "NEAREST", "NEAREST", "INT8", "E4M3"),
        _kernel("quantize_kernel", "fp16", "TENSOR", "TENSOR", "16", *2 * ["PSEUDO_STOCHASTIC"], "INT8", "E4M3"),
    ]


SPECIMENS = _specimens()

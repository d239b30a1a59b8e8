"""transform_quantize and grad_output_operands: how the kernels of `operands` are launched."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from hot.backends.devices import capability, on_device
from hot.backends.layouts import cdiv, is_across, power_of_2
from hot.backends.ops import code_dtype, largest_code, scale_shape
from hot.backends.table import register_kernel
from hot.backends.transforms import IDENTITY, held_basis
from hot.backends.triton.launch import Launch, Specimen, by_settings, specimen
from hot.backends.triton.matrices import Matrix, Way
from hot.backends.triton.operands import largest_kernel, quantize_kernel, scales_kernel
from hot.backends.triton.tuning import Config, Key, bucket, family, launch

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def _serves(
    block: int, rank: int, prefix: int, tail: str, format: str, granularity: str, group: int, rounding: str,
    clip: Sequence[float], length: int, samples: int,
) -> bool:  # fmt: skip
    """Whether the kernels can make this operand, whose K is `samples` times what `length` elements make."""
    if block not in (1, 16, 32, 64, 128) or prefix or clip or not format.startswith("int"):
        return False
    if rounding not in ("nearest", "hashed", "pseudo_stochastic") or (tail == "keep" and block > 1 and length % block):
        return False
    rank, side = (IDENTITY, IDENTITY) if block == 1 else (rank, block)
    k = length if block == 1 else cdiv(length, block) * rank
    if rounding == "hashed" and (rank % 2 or (samples > 1 and k % 2)):
        return False  # two neighbours along K share a hash, and a tile must hold both
    if granularity in ("row", "tensor"):
        return True
    tile = group // rank * side  # what makes one group, of which a program takes one
    fits = rank == power_of_2(rank) >= 8 and group % rank == 0 and 16 <= tile == power_of_2(tile) <= 256
    if granularity == "tile":
        return fits and samples == 1 and group == power_of_2(group) <= 128
    return granularity == "block" and fits and (samples == 1 or k % group == 0)


def _tiles(key: Key) -> int:
    """Many tiles a program, but some hundred programs."""
    _, _, _, rows, columns, _, _ = key
    assert isinstance(rows, int) and isinstance(columns, int)
    return min(max(2 ** (rows + columns) // 64**2 // 512, 1), 8)


_READ = {"ROWS": 64, "C": 64, "num_warps": 2, "num_stages": 2, "copied": 0}
_WRITTEN = {"ROWS": 64, "C": 64, "num_warps": 2, "maxnreg": 128, "copied": 0}
_SHAPES = [
    {"ROWS": rows, "C": columns, "num_warps": warps}
    for rows, columns, warps in ((64, 64, 2), (64, 64, 4), (32, 128, 2), (64, 128, 4), (128, 64, 4))
]

LARGEST = family(
    "operands_largest",
    lambda key: _READ | {"TILES": _tiles(key)},
    lambda key: [
        _READ | shape | {"TILES": tiles, "copied": copied, "num_stages": stages}
        for shape in _SHAPES
        for tiles in sorted({_tiles(key), 4, 8, 16})
        for copied, stages in ((0, 1), (0, 2), *(((1, 2), (1, 3)) if key[-1] else ()))
    ],
)
"""Shape class: the operands that are made, block sides, classes of the sizes, dtype, whether tiles may be copied."""
QUANTIZE = family(
    "operands_quantized",
    lambda key: _WRITTEN,
    lambda key: [
        _WRITTEN | shape | {"maxnreg": registers, "copied": copied}
        for shape in _SHAPES
        for registers in (128, 168)
        for copied in range(int(key[-1]) + 1)
    ],
)
"""Shape class: as of LARGEST. copied: 1 where tiles come by the copy engine, in advance; chosen by tuning only, until it is
measured."""


class _Job:
    """Operands of one size: what is allocated, and the launches by their settings."""

    def __init__(
        self, m: Matrix, along: Way | None, across: Way | None, sums: bool, dtype: torch.dtype, device: torch.device,
        aligned: bool,
    ) -> None:  # fmt: skip
        some = along or across
        assert some is not None
        self.side = across.side if across else IDENTITY
        self.m = m = m.merged(self.side)
        self.sums, self.device, self.dtype = sums, device, dtype
        self.along, self.across = (way or some._replace(granularity="", drawn=False) for way in (along, across))
        self.per = cdiv(m.length, self.side)  # blocks a sample
        self.along_piece, self.across_sample = self.along.k(m.columns), self.across.k(m.length)
        self.factors = self.along.factors(m.rows), self.across.factors(m.columns)
        self.across_factors = _even(self.factors[0])  # where those of across begin
        self.searches = sums or any(self.factors)
        self.room: list[tuple[tuple[int, ...], torch.dtype]] = []
        operands = (along, m.rows, self.along_piece * m.pieces), (across, m.columns, self.across_sample * m.samples)
        for way, rows, k in operands:
            if way:
                self.room.append(((rows, k), code_dtype(way.format)))
                self.room.append((scale_shape(rows, k, way.granularity, way.group), torch.float32))
        a, b = self.along, self.across
        self.bases = [held_basis(way.block, way.rows, way.signs, dtype, device) for way in (a, b)]
        limits = {"ALONG_LIMIT": int(largest_code(a.format)), "ACROSS_LIMIT": int(largest_code(b.format))}
        self.scaling: dict[str, Any] = {"ALONG_GAIN": a.gain, "ACROSS_GAIN": b.gain, **limits}
        kinds = "+".join(name for name, way in (("along", along), ("across", across)) if way)
        sides = self.along.side, self.across.side
        self.key: Key = (
            kinds,
            *sides,
            bucket(m.rows),
            bucket(m.columns),
            DTYPES[dtype],
            int(aligned and self._copies()),
        )
        self.search, self.quantize = by_settings(self._search), by_settings(self._quantize)

    def _copies(self) -> bool:
        """Whether tiles may be copied, where x is aligned. A tile that is copied ends with its sample: so not where much of it
        would be empty, nor for groups of K, which know no blocks between samples."""
        m, blocks = self.m, max(64 // self.side, 1)
        whole = m.samples == 1 or (bool(self.across.scaled_by) and cdiv(self.per, blocks) * blocks < 1.5 * self.per)
        return whole and m.can_be_copied(self.dtype.itemsize) and capability(self.device) >= (9, 0)

    def _sized(
        self, settings: Config, blocks: int, columns: int, tiles: int
    ) -> tuple[int, int, tuple[int, ...], dict[str, Any]]:
        """(programs, tiles of rows, numbers, constants) of both kernels for so many tiles of blocks × columns a program."""
        m, a, b = self.m, self.along, self.across
        columns = max(columns, a.side)
        per = cdiv(self.per, blocks) * blocks if settings["copied"] else self.per  # whole tiles a sample
        row_tiles = cdiv(m.samples * per, blocks * tiles)
        numbers = m.samples, m.length, per, m.columns, m.stride, m.step, m.piece_stride, row_tiles
        meets = 1 if m.samples == 1 else 3 if blocks > per else 2
        constants = {
            "A": a.side, "AR": a.width, "R": b.width, "ALONG_RANK": a.kept, "ACROSS_RANK": b.kept,
            "M": blocks, "N": self.side, "C": columns, "MEETS": meets, "COPIED": bool(settings["copied"]),
            "enable_fp_fusion": False,  # every operation is rounded by itself, as the reference's are
        }  # fmt: skip
        return cdiv(m.columns, columns) * row_tiles * m.pieces, row_tiles, numbers, constants

    def _search(self, settings: Config) -> tuple[Launch, Launch, int]:
        """The launches for largest magnitudes and for scales, and the elements of the work that they share."""
        m, a, b = self.m, self.along, self.across
        blocks, tiles = max(settings["ROWS"] // self.side, 1), settings["TILES"]
        programs, row_tiles, numbers, constants = self._sized(settings, blocks, settings["C"], tiles)
        parts = [
            programs if way.scaled_by == "tensor" else seen
            for way, seen in ((a, cdiv(m.columns, constants["C"]) * m.pieces), (b, row_tiles))
        ]
        along_at = self.across_factors + _even(self.factors[1])
        across_at = along_at + _even(parts[0] * self.factors[0])
        sums_at = across_at + _even(parts[1] * self.factors[1])
        largest = Launch(
            largest_kernel, programs, (*numbers, along_at, across_at, sums_at), ALONG=a.scaled_by, ACROSS=b.scaled_by,
            SUMS=self.sums, TILES=tiles, num_warps=settings["num_warps"], num_stages=settings["num_stages"], **constants,
        )  # fmt: skip
        columns = m.columns if self.sums else 0
        (along_p, along_rows), (across_p, across_rows) = (
            (1024, 1) if way.scaled_by == "tensor" else (16, 64) for way in (a, b)
        )
        scales = Launch(
            scales_kernel,
            cdiv(self.factors[0], along_rows) + cdiv(self.factors[1], across_rows) + cdiv(columns, 64),
            (self.factors[0], parts[0], along_at, self.factors[1], parts[1], across_at, self.across_factors,
             columns, row_tiles, sums_at),
            ALONG_P=along_p, ALONG_ROWS=along_rows, ACROSS_P=across_p, ACROSS_ROWS=across_rows, P=16, COLUMNS=64,
            **self.scaling,
        )  # fmt: skip
        return largest, scales, sums_at + row_tiles * columns

    def _quantize(self, settings: Config) -> Launch:
        m, a, b = self.m, self.along, self.across
        blocks, columns = max(settings["ROWS"] // self.side, 1), settings["C"]
        if a.granularity == "block":
            columns = a.tile
        if b.granularity == "block":
            blocks, columns = b.tile // self.side, max(8192 // b.tile, 16)
        if b.granularity == "tile":
            blocks, columns = b.tile // self.side, b.group
        programs, _, numbers, constants = self._sized(settings, blocks, columns, 1)
        warps = settings["num_warps"]
        if {a.granularity, b.granularity} & {"block", "tile"}:  # the group makes the tile: warps to fit
            warps = min(max(blocks * self.side * constants["C"] // 2048, 2), 8)
        ks = self.along_piece * m.pieces, self.along_piece, self.across_sample * m.samples, self.across_sample
        return Launch(
            quantize_kernel, programs, (*numbers, *ks, self.across_factors), ALONG=a.granularity, ACROSS=b.granularity,
            ALONG_ROUNDING=a.rounding, ACROSS_ROUNDING=b.rounding, **self.scaling,
            FLAT=m.samples == 1 or (self.across_sample == self.per * b.kept and numbers[2] == self.per),
            num_warps=warps, maxnreg=settings["maxnreg"], **constants,
        )  # fmt: skip

    def __call__(self, x: Tensor, draw: Tensor | None) -> list[Tensor]:
        """Codes and scale of each operand that is made, then, if asked for, the sums of the columns (columns,) in x's dtype."""
        device = self.device
        made = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self.room]
        unused = x, x  # where a kernel gets a pointer that it will not follow
        along = made[:2] if self.along.granularity else unused
        across = made[-2:] if self.across.granularity else unused
        sums = torch.empty(self.m.columns, dtype=self.dtype, device=device) if self.sums else x
        bases = self.bases
        if draw is not None:
            bases = [
                way.drawn_basis(draw, x) if way.drawn else known
                for way, known in zip((self.along, self.across), self.bases, strict=True)
            ]
        work = x

        def search(settings: Config) -> None:
            nonlocal work
            largest, scales, size = self.search(settings)
            work = torch.empty(size, dtype=torch.float32, device=device)
            largest(self._seen(x, largest), *bases, work)
            scales(work, along[1], across[1], sums)

        def quantize(settings: Config) -> None:
            run = self.quantize(settings)
            run(self._seen(x, run), *bases, work, *along, *across)

        with on_device(x):
            if self.searches:
                launch(LARGEST, self.key, device, search)
            launch(QUANTIZE, self.key, device, quantize)
        return [*made, sums] if self.sums else made

    def _seen(self, x: Tensor, run: Launch) -> Tensor | TensorDescriptor:
        """x as a launch takes it."""
        tile = run.constants
        return self.m.tiles(x, tile["M"] * tile["N"], tile["C"]) if tile["COPIED"] else x


def _even(n: int) -> int:
    """The next multiple of 16, where Triton knows that what begins there is aligned."""
    return cdiv(n, 16) * 16


def _serves_operand(
    x: Tensor, block: int, rows: Sequence[int], signs: Sequence[int], prefix: int, tail: str, draw: Tensor | None,
    format: str, granularity: str, group: int, rounding: str, clip: Sequence[float],
) -> bool:  # fmt: skip
    rank = len(rows) if draw is None else draw.shape[0]
    _, samples, length = x.shape
    quantizer = format, granularity, group, rounding, clip
    if granularity == "tile" and not is_across(x):
        return False
    return x.dtype in DTYPES and x.numel() > 0 and _serves(block, rank, prefix, tail, *quantizer, length, samples)


@register_kernel("transform_quantize", backend="triton", supports=_serves_operand)
def transform_quantize(
    x: Tensor, block: int, rows: Sequence[int], signs: Sequence[int], prefix: int, tail: str, draw: Tensor | None,
    format: str, granularity: str, group: int, rounding: str, clip: Sequence[float],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if x.stride(2) != 1 and not is_across(x):
        x = x.contiguous()
    way = _way(block, rows, signs, draw, format, granularity, group, rounding)
    codes, scale = _operand(x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16 == 0, way)(x, draw)
    return codes, scale


@lru_cache(maxsize=4096)
def _operand(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    aligned: bool,
    way: tuple[Any, ...],
) -> _Job:
    (count, samples, length), (row, sample, step) = shape, strides
    if step == 1:
        return _Job(Matrix(1, count, length, samples, 0, row, sample), Way(*way), None, False, dtype, device, aligned)
    return _Job(Matrix(samples, length, count, 1, sample, step, 0), None, Way(*way), False, dtype, device, aligned)


def _serves_gradient(
    g: Tensor,
    i_block: int, i_rows: Sequence[int], i_signs: Sequence[int],
    i_format: str, i_granularity: str, i_group: int, i_rounding: str, i_clip: Sequence[float],
    w_block: int, w_rows: Sequence[int], w_signs: Sequence[int], w_prefix: int, w_tail: str, w_draw: Tensor | None,
    w_format: str, w_granularity: str, w_group: int, w_rounding: str, w_clip: Sequence[float],
    bias: bool,
) -> bool:  # fmt: skip
    """Where the outputs are not dense, each operand is made by itself, from the side that suits it."""
    samples, length, outputs = g.shape
    rank = len(w_rows) if w_draw is None else w_draw.shape[0]
    of_input = i_format, i_granularity, i_group, i_rounding, i_clip
    of_weight = w_format, w_granularity, w_group, w_rounding, w_clip
    return (
        g.dtype in DTYPES
        and g.numel() > 0
        and (g.stride(2) == 1 or outputs == 1)
        and w_granularity not in ("block", "tile")  # a program's tile is made for groups of one operand
        and i_granularity != "tile"
        and _serves(i_block, len(i_rows), 0, "pad", *of_input, outputs, 1)
        and _serves(w_block, rank, w_prefix, w_tail, *of_weight, length, samples)
    )


@register_kernel("grad_output_operands", backend="triton", supports=_serves_gradient)
def grad_output_operands(
    g: Tensor,
    i_block: int, i_rows: Sequence[int], i_signs: Sequence[int],
    i_format: str, i_granularity: str, i_group: int, i_rounding: str, i_clip: Sequence[float],
    w_block: int, w_rows: Sequence[int], w_signs: Sequence[int], w_prefix: int, w_tail: str, w_draw: Tensor | None,
    w_format: str, w_granularity: str, w_group: int, w_rounding: str, w_clip: Sequence[float],
    bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    along = _way(i_block, i_rows, i_signs, None, i_format, i_granularity, i_group, i_rounding)
    across = _way(w_block, w_rows, w_signs, w_draw, w_format, w_granularity, w_group, w_rounding)
    made = _gradient(g.shape, g.stride(), g.dtype, g.device, g.data_ptr() % 16 == 0, along, across, bias)(g, w_draw)
    i_codes, i_scale, w_codes, w_scale, sums = made if bias else (*made, g.new_empty(0))
    return i_codes, i_scale, w_codes, w_scale, sums


@lru_cache(maxsize=4096)
def _gradient(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device, aligned: bool,
    along: tuple[Any, ...], across: tuple[Any, ...], bias: bool,
) -> _Job:  # fmt: skip
    (samples, length, outputs), (sample, step, _) = shape, strides
    return _Job(
        Matrix(samples, length, outputs, 1, sample, step, 0), Way(*along), Way(*across), bias, dtype, device, aligned
    )


def _way(
    block: int, rows: Sequence[int], signs: Sequence[int], draw: Tensor | None,
    format: str, granularity: str, group: int, rounding: str,
) -> tuple[Any, ...]:  # fmt: skip
    """The fields of a `Way`, which costs more than they do."""
    rank = len(rows) if draw is None else draw.shape[0]
    return block, tuple(rows), tuple(signs), rank, draw is not None and block > 1, format, granularity, group, rounding


def _specimen(
    x: str, holder: str, along: str, across: str, rank: int, meets: int = 2, copied: bool = False
) -> list[Specimen]:
    matrices = {"along_matrix": f"*{x}", "across_matrix": f"*{x}", "work": "*fp32"}
    pointers = {"x": f"tensordesc<{x}[1, 64, 128]>" if copied else f"*{x}", **matrices}
    shared = dict(A=16, AR=16, R=rank, M=4, N=16, C=128, MEETS=meets, ALONG_RANK=16, ACROSS_RANK=rank, COPIED=copied)
    codes = {"along_codes": f"*{holder}", "across_codes": "*i8", "along_scale": "*fp32", "across_scale": "*fp32"}
    kinds = dict(ALONG_LIMIT=7, ACROSS_LIMIT=127, ALONG_GAIN=1.0, ACROSS_GAIN=0.7)
    roundings = dict(ALONG_ROUNDING="hashed", ACROSS_ROUNDING="nearest")
    found = {"ALONG": along if along != "block" else "", "ACROSS": across if across not in ("block", "tile") else ""}
    parts = dict(ALONG_P=16, ALONG_ROWS=64, ACROSS_P=1024, ACROSS_ROWS=1, P=16, COLUMNS=64)
    scales = {"work": "*fp32", "along_scale": "*fp32", "across_scale": "*fp32", "sums": f"*{x}"}
    return [
        specimen(
            quantize_kernel,
            {**pointers, **codes},
            ALONG=along,
            ACROSS=across,
            FLAT=rank == 8,
            **kinds,
            **roundings,
            **shared,
        ),
        specimen(largest_kernel, pointers, **found, SUMS=True, TILES=4, **shared),
        specimen(scales_kernel, scales, **kinds, **parts),
    ]


SPECIMENS = [
    *_specimen("bf16", "i8", "row", "row", 8),
    *_specimen("bf16", "i8", "row", "row", 8, copied=True),
    *_specimen("bf16", "i8", "row", "row", 8, meets=1, copied=True),
    *_specimen("fp16", "i8", "", "tensor", 16, meets=3),
    *_specimen("fp32", "i8", "block", "", 8),
    *_specimen("bf16", "i8", "", "tile", 16, meets=1),
]

"""transform_quantize and grad_output_operands: how the kernels of `operands` are launched."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hot.backends.ops import bits_of, code_dtype, scale_shape
from hot.backends.reference.transforms import basis
from hot.backends.table import register_kernel
from hot.backends.triton.launch import Launch, Specimen, by_settings, cdiv, on_device, power_of_2, specimen
from hot.backends.triton.operands import largest_kernel, quantize_kernel, scales_kernel
from hot.backends.triton.tuning import Config, Key, bucket, family, launch

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class _Matrix(NamedTuple):
    """How the kernels see a tensor: `samples` × `length` rows, `columns` dense, the whole of it `pieces` times."""

    samples: int
    length: int
    columns: int
    pieces: int
    stride: int  # of a sample
    step: int  # of a row
    piece_stride: int

    @property
    def rows(self) -> int:
        return self.samples * self.length


class _Way(NamedTuple):
    """What one operand's transform and quantizer are to the kernels: arguments of their ops, `rank` where rows are drawn."""

    block: int  # 1: nothing is transformed
    rows: tuple[int, ...]
    signs: tuple[int, ...]
    rank: int
    drawn: bool
    format: str
    granularity: str  # empty for an operand that is not made
    group: int
    rounding: str

    @property
    def side(self) -> int:
        """The side of the blocks that are cut."""
        return IDENTITY if self.block == 1 else self.block

    @property
    def kept(self) -> int:
        """How many coefficients a block makes."""
        return IDENTITY if self.block == 1 else self.rank

    @property
    def width(self) -> int:
        """That as a side of a product."""
        return max(power_of_2(self.kept), 8)

    @property
    def gain(self) -> float:
        """What the basis does not hold of the gain 1/√size."""
        size = self.rank if self.drawn else self.block
        return float(size**-0.5 / _held(size))

    def basis(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The matrix (rank, side) of a transform whose rows are known, ±1, or ±2^k where the gain is a power of two."""
        return _basis(self.block, self.rows, self.signs, dtype, device)

    def drawn_basis(self, draw: Tensor, x: Tensor) -> Tensor:
        """The same of the rows that were drawn."""
        return basis(self.block, self.rows, self.signs, draw, x.new_empty(0)) * _held(self.rank)

    @property
    def tile(self) -> int:
        """How many elements of the axis make one group of a block scale."""
        return self.group // self.kept * self.side

    @property
    def limit(self) -> int:
        """The largest code."""
        return int(2 ** (bits_of(self.format) - 1) - 1)

    @property
    def scaled_by(self) -> str:
        """The granularity, where the largest magnitude must be known before the first code."""
        return "" if self.granularity in ("block", "tile") else self.granularity

    def k(self, length: int) -> int:
        """The part of K that `length` elements make."""
        return length if self.block == 1 else cdiv(length, self.block) * self.rank

    def factors(self, rows: int) -> int:
        """How many factors `scales_kernel` makes for so many rows."""
        return {"": 0, "row": rows, "tensor": 1}[self.scaled_by]


def _held(size: int) -> float:
    """The gain 1/√size where that is a power of two, which a basis holds exactly, else 1."""
    return size**-0.5 if size == power_of_2(size) and size.bit_length() % 2 == 1 else 1.0


@lru_cache(maxsize=256)
def _basis(
    block: int, rows: tuple[int, ...], signs: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    if block == 1:
        return torch.eye(IDENTITY, dtype=dtype, device=device)
    return basis(block, rows, signs, None, torch.empty(0, dtype=dtype, device=device)).contiguous() * _held(block)


IDENTITY = 16
"""The side of the blocks that the kernels cut where nothing is transformed."""


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
    _, _, _, rows, columns, _ = key
    assert isinstance(rows, int) and isinstance(columns, int)
    return min(max(2 ** (rows + columns) // 64**2 // 512, 1), 8)


LARGEST = family(
    "operands_largest",
    lambda key: {"ROWS": 64, "C": 64, "TILES": _tiles(key), "num_warps": 2},
    lambda key: [
        {"ROWS": rows, "C": columns, "TILES": tiles, "num_warps": warps}
        for rows, columns, warps in ((64, 64, 2), (64, 64, 4), (32, 64, 2), (64, 128, 4))
        for tiles in sorted({_tiles(key), 4, 8, 16})
    ],
)
"""Shape class: the operands that are made, block sides, classes of the sizes, dtype."""
QUANTIZE = family(
    "operands_quantized",
    lambda key: {"ROWS": 64, "C": 64, "num_warps": 2, "maxnreg": 128},
    lambda key: [
        {"ROWS": rows, "C": columns, "num_warps": warps, "maxnreg": registers}
        for rows, columns, warps in ((64, 64, 2), (64, 128, 4), (32, 128, 2), (128, 64, 4))
        for registers in (128, 168)
    ],
)
"""Shape class: as of LARGEST."""


class _Job:
    """Operands of one size: what is allocated, and the launches by their settings."""

    def __init__(
        self, m: _Matrix, along: _Way | None, across: _Way | None, sums: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        some = along or across
        assert some is not None
        self.m, self.sums, self.device, self.dtype = m, sums, device, dtype
        self.along, self.across = (way or some._replace(granularity="", drawn=False) for way in (along, across))
        self.side = across.side if across else IDENTITY
        self.per = cdiv(m.length, self.side)  # blocks a sample
        self.along_piece, self.across_sample = self.along.k(m.columns), self.across.k(m.length)
        self.factors = self.along.factors(m.rows), self.across.factors(m.columns)
        self.across_factors = _even(self.factors[0])  # where those of across begin
        self.searches = sums or any(self.factors)
        self.room: list[tuple[tuple[int, ...], torch.dtype]] = []
        for way, rows, k in (
            (along, m.rows, self.along_piece * m.pieces),
            (across, m.columns, self.across_sample * m.samples),
        ):
            if way:
                self.room.append(((rows, k), code_dtype(way.format)))
                self.room.append((scale_shape(rows, k, way.granularity, way.group), torch.float32))
        self.bases = [way.basis(dtype, device) for way in (self.along, self.across)]
        kinds = "+".join(name for name, way in (("along", along), ("across", across)) if way)
        sides = self.along.side, self.across.side
        self.key: Key = (kinds, *sides, bucket(m.rows), bucket(m.columns), DTYPES[dtype])
        self.search, self.quantize = by_settings(self._search), by_settings(self._quantize)

    def _constants(self, settings: Config, blocks: int, columns: int) -> dict[str, Any]:
        a, b = self.along, self.across
        return {
            "A": a.side, "AR": a.width, "R": b.width, "ALONG_RANK": a.kept, "ACROSS_RANK": b.kept,
            "M": blocks, "N": self.side, "C": max(columns, a.side),
            "WRAPS": blocks > self.per, "num_warps": settings["num_warps"],
            "enable_fp_fusion": False,  # every operation is rounded by itself, as the reference's are
        }  # fmt: skip

    def _sized(self, constants: dict[str, Any], tiles: int) -> tuple[int, int, tuple[int, ...]]:
        """(programs, tiles of rows, the numbers that both kernels take) for so many tiles a program."""
        m = self.m
        row_tiles = cdiv(m.samples * self.per, constants["M"] * tiles)
        numbers = m.samples, m.length, self.per, m.columns, m.stride, m.step, m.piece_stride, row_tiles
        return cdiv(m.columns, constants["C"]) * row_tiles * m.pieces, row_tiles, numbers

    def _search(self, settings: Config) -> tuple[Launch, Launch, int]:
        """The launches for largest magnitudes and for scales, and the elements of the work that they share."""
        m, a, b = self.m, self.along, self.across
        constants = self._constants(settings, max(settings["ROWS"] // self.side, 1), settings["C"])
        programs, row_tiles, numbers = self._sized(constants, settings["TILES"])
        parts = [
            programs if way.scaled_by == "tensor" else tiles
            for way, tiles in ((a, cdiv(m.columns, constants["C"]) * m.pieces), (b, row_tiles))
        ]
        along_at = self.across_factors + _even(self.factors[1])
        across_at = along_at + _even(parts[0] * self.factors[0])
        sums_at = across_at + _even(parts[1] * self.factors[1])
        largest = Launch(
            largest_kernel, programs, (*numbers, along_at, across_at, sums_at), ALONG=a.scaled_by, ACROSS=b.scaled_by,
            SUMS=self.sums, TILES=settings["TILES"], **constants,
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
            ALONG_GAIN=a.gain, ALONG_LIMIT=a.limit, ALONG_P=along_p, ALONG_ROWS=along_rows,
            ACROSS_GAIN=b.gain, ACROSS_LIMIT=b.limit, ACROSS_P=across_p, ACROSS_ROWS=across_rows, P=16, COLUMNS=64,
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
        constants = self._constants(settings, blocks, columns)
        if {a.granularity, b.granularity} & {"block", "tile"}:  # the group makes the tile: warps to fit
            constants["num_warps"] = min(max(constants["M"] * self.side * constants["C"] // 2048, 2), 8)
        programs, _, numbers = self._sized(constants, 1)
        ks = self.along_piece * m.pieces, self.along_piece, self.across_sample * m.samples, self.across_sample
        return Launch(
            quantize_kernel, programs, (*numbers, *ks, self.across_factors), ALONG=a.granularity, ACROSS=b.granularity,
            ALONG_GAIN=a.gain, ACROSS_GAIN=b.gain, ALONG_LIMIT=a.limit, ACROSS_LIMIT=b.limit,
            ALONG_ROUNDING=a.rounding, ACROSS_ROUNDING=b.rounding,
            FLAT=m.samples == 1 or self.across_sample == self.per * b.kept, maxnreg=settings["maxnreg"], **constants,
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
                way.drawn_basis(draw, x) if way.drawn else way.basis(x.dtype, device)
                for way in (self.along, self.across)
            ]
        work = x

        def search(settings: Config) -> None:
            nonlocal work
            largest, scales, size = self.search(settings)
            work = torch.empty(size, dtype=torch.float32, device=device)
            largest(x, *bases, work)
            scales(work, along[1], across[1], sums)

        with on_device(x):
            if self.searches:
                launch(LARGEST, self.key, device, search)
            launch(
                QUANTIZE, self.key, device, lambda settings: self.quantize(settings)(x, *bases, work, *along, *across)
            )
        return [*made, sums] if self.sums else made


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
    if granularity == "tile" and not _is_across(x):
        return False
    return x.dtype in DTYPES and x.numel() > 0 and _serves(block, rank, prefix, tail, *quantizer, length, samples)


def _is_across(x: Tensor) -> bool:
    """Whether the rows of x (rows, samples, length) are its dense axis."""
    return x.stride(0) == 1 and x.stride(2) != 1


@register_kernel("transform_quantize", backend="triton", supports=_serves_operand)
def transform_quantize(
    x: Tensor, block: int, rows: Sequence[int], signs: Sequence[int], prefix: int, tail: str, draw: Tensor | None,
    format: str, granularity: str, group: int, rounding: str, clip: Sequence[float],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if x.stride(2) != 1 and not _is_across(x):
        x = x.contiguous()
    way = _way(block, rows, signs, draw, format, granularity, group, rounding)
    codes, scale = _operand(x.shape, x.stride(), x.dtype, x.device, way)(x, draw)
    return codes, scale


@lru_cache(maxsize=4096)
def _operand(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device, way: tuple[Any, ...]
) -> _Job:
    (count, samples, length), (row, sample, step) = shape, strides
    if step == 1:
        return _Job(_Matrix(1, count, length, samples, 0, row, sample), _Way(*way), None, False, dtype, device)
    return _Job(_Matrix(samples, length, count, 1, sample, step, 0), None, _Way(*way), False, dtype, device)


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
    made = _gradient(g.shape, g.stride(), g.dtype, g.device, along, across, bias)(g, w_draw)
    i_codes, i_scale, w_codes, w_scale, sums = made if bias else (*made, g.new_empty(0))
    return i_codes, i_scale, w_codes, w_scale, sums


@lru_cache(maxsize=4096)
def _gradient(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device,
    along: tuple[Any, ...], across: tuple[Any, ...], bias: bool,
) -> _Job:  # fmt: skip
    (samples, length, outputs), (sample, step, _) = shape, strides
    return _Job(_Matrix(samples, length, outputs, 1, sample, step, 0), _Way(*along), _Way(*across), bias, dtype, device)


def _way(
    block: int, rows: Sequence[int], signs: Sequence[int], draw: Tensor | None,
    format: str, granularity: str, group: int, rounding: str,
) -> tuple[Any, ...]:  # fmt: skip
    """The fields of a `_Way`, which costs more than they do."""
    rank = len(rows) if draw is None else draw.shape[0]
    return block, tuple(rows), tuple(signs), rank, draw is not None and block > 1, format, granularity, group, rounding


def _specimen(x: str, holder: str, along: str, across: str, rank: int) -> list[Specimen]:
    pointers = {"x": f"*{x}", "along_matrix": f"*{x}", "across_matrix": f"*{x}", "work": "*fp32"}
    shared = dict(A=16, AR=16, R=rank, M=4, N=16, C=128, WRAPS=False, ALONG_RANK=16, ACROSS_RANK=rank)
    codes = {"along_codes": f"*{holder}", "across_codes": "*i8", "along_scale": "*fp32", "across_scale": "*fp32"}
    kinds = dict(ALONG_LIMIT=7, ACROSS_LIMIT=127, ALONG_GAIN=1.0, ACROSS_GAIN=0.7)
    roundings = dict(ALONG_ROUNDING="hashed", ACROSS_ROUNDING="nearest")
    found = {"ALONG": along if along != "block" else "", "ACROSS": across if across not in ("block", "tile") else ""}
    scales = {"work": "*fp32", "along_scale": "*fp32", "across_scale": "*fp32", "sums": f"*{x}"}
    return [
        specimen(
            quantize_kernel, {**pointers, **codes}, ALONG=along, ACROSS=across, FLAT=rank == 8,
            **kinds, **roundings, **shared,
        ),
        specimen(largest_kernel, pointers, **found, SUMS=True, TILES=4, **shared),
        specimen(
            scales_kernel, scales, **kinds, ALONG_P=16, ALONG_ROWS=64, ACROSS_P=1024, ACROSS_ROWS=1, P=16, COLUMNS=64,
        ),
    ]  # fmt: skip


SPECIMENS = [
    *_specimen("bf16", "i8", "row", "row", 8),
    *_specimen("fp16", "i8", "", "tensor", 16),
    *_specimen("fp32", "i8", "block", "", 8),
    *_specimen("bf16", "i8", "", "tile", 16),
]

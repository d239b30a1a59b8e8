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
from hot.backends.triton.launch import Launch, Specimen, cdiv, on_device, power_of_2, specimen
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
    """What one operand's transform and quantizer are to the kernels."""

    block: int  # 1: nothing is transformed
    rank: int
    gain: float  # what the basis does not hold of it
    format: str
    granularity: str  # empty for an operand that is not made
    group: int
    rounding: str

    @property
    def side(self) -> int:
        """The side of the blocks that are cut."""
        return IDENTITY if self.block == 1 else self.block

    @property
    def width(self) -> int:
        """The rank as a side of a product."""
        return max(power_of_2(self.rank), 8)

    @property
    def tile(self) -> int:
        """How many elements of the axis make one group of a block scale."""
        return self.group // self.rank * self.side

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

    def tops(self, rows: int) -> int:
        """How many largest magnitudes there are."""
        return {"": 0, "row": rows, "tensor": 1}[self.scaled_by]


_bases: dict[tuple[object, ...], Tensor] = {}


def _basis(x: Tensor, block: int, rows: Sequence[int], signs: Sequence[int], draw: Tensor | None) -> Tensor:
    """The matrix (rank, side) of a transform, ±1, or ±2^k where the gain is a power of two; the identity for none."""
    key = block, tuple(rows), tuple(signs), x.dtype, x.device
    found = _bases.get(key) if draw is None else None
    if found is None:
        found = torch.eye(IDENTITY, dtype=x.dtype, device=x.device)
        if block > 1:
            size = block if draw is None else draw.shape[0]
            found = basis(block, rows, signs, draw, x.new_empty(0)) * (size**-0.5 if _is_exact(size) else 1.0)
        found = found.contiguous()
        if draw is None:
            _bases[key] = found
    return found


def _is_exact(size: int) -> bool:
    """Whether the gain 1/√size is a power of two: then the basis holds it."""
    return size == power_of_2(size) and size.bit_length() % 2 == 1


@lru_cache(maxsize=256)
def _way(block: int, rank: int, drawn: bool, format: str, granularity: str, group: int, rounding: str) -> _Way:
    if block == 1:
        return _Way(1, IDENTITY, 1.0, format, granularity, group, rounding)
    size = rank if drawn else block
    return _Way(block, rank, 1.0 if _is_exact(size) else size**-0.5, format, granularity, group, rounding)


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


LARGEST = family(
    "operands_largest",
    lambda key: {"ROWS": 64, "C": 64, "TILES": 8, "num_warps": 2},
    lambda key: [
        {"ROWS": rows, "C": columns, "TILES": tiles, "num_warps": warps}
        for rows, columns, warps in ((64, 64, 2), (64, 64, 4), (32, 64, 2), (64, 128, 4))
        for tiles in (4, 8, 16)
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

    def __init__(self, m: _Matrix, along: _Way | None, across: _Way | None, sums: bool, dtype: torch.dtype) -> None:
        some = along or across
        assert some is not None
        self.m, self.sums = m, sums
        self.along, self.across = (way or some._replace(granularity="") for way in (along, across))
        self.side = across.side if across else IDENTITY
        self.per = cdiv(m.length, self.side)  # blocks a sample
        self.along_piece, self.across_sample = self.along.k(m.columns), self.across.k(m.length)
        self.along_tops, self.tops = self.along.tops(m.rows), self.along.tops(m.rows) + self.across.tops(m.columns)
        self.room: list[tuple[tuple[int, int], torch.dtype]] = []
        for way, rows, k in (
            (along, m.rows, self.along_piece * m.pieces),
            (across, m.columns, self.across_sample * m.samples),
        ):
            if way:
                self.room.append(((rows, k), code_dtype(way.format)))
                self.room.append((scale_shape(rows, k, way.granularity, way.group), torch.float32))
        kinds = "+".join(name for name, way in (("along", along), ("across", across)) if way)
        sides = self.along.side, self.across.side
        self.key: Key = (kinds, *sides, bucket(m.rows), bucket(m.columns), DTYPES[dtype])
        self.scales = Launch(
            scales_kernel, cdiv(self.tops, 1024), (self.along_tops, self.tops),
            ALONG_LIMIT=self.along.limit, ACROSS_LIMIT=self.across.limit, ELEMENTS=1024,
        )  # fmt: skip
        self._launches: dict[tuple[str, int], tuple[Launch, int, Config]] = {}

    def launch(self, name: str, settings: Config) -> tuple[Launch, int]:
        """The launch of a kernel, and how many tiles of rows it has."""
        found = self._launches.get((name, id(settings)))
        if found is None:  # with the settings, so that their id stays theirs
            made = self._largest(settings) if name == "largest" else self._quantize(settings)
            found = self._launches[name, id(settings)] = *made, settings
        return found[:2]

    def _constants(self, settings: Config, blocks: int, columns: int) -> dict[str, Any]:
        a, b = self.along, self.across
        return {
            "ALONG_GAIN": a.gain, "ACROSS_GAIN": b.gain, "A": a.side, "AR": a.width, "R": b.width,
            "ALONG_RANK": a.rank, "ACROSS_RANK": b.rank, "M": blocks, "N": self.side, "C": max(columns, a.side),
            "WRAPS": blocks > self.per, "num_warps": settings["num_warps"],
            "enable_fp_fusion": False,  # every operation is rounded by itself, as the reference's are
        }  # fmt: skip

    def _sized(self, constants: dict[str, Any], tiles: int) -> tuple[int, int, tuple[int, ...]]:
        """(programs, tiles of rows, the numbers that both kernels take) for so many tiles a program."""
        m = self.m
        row_tiles = cdiv(m.samples * self.per, constants["M"] * tiles)
        numbers = m.samples, m.length, self.per, m.columns, m.stride, m.step, m.piece_stride, row_tiles
        return cdiv(m.columns, constants["C"]) * row_tiles * m.pieces, row_tiles, numbers

    def _largest(self, settings: Config) -> tuple[Launch, int]:
        constants = self._constants(settings, max(settings["ROWS"] // self.side, 1), settings["C"])
        programs, row_tiles, numbers = self._sized(constants, settings["TILES"])
        constants |= {"ALONG": self.along.scaled_by, "ACROSS": self.across.scaled_by, "SUMS": self.sums}
        return Launch(largest_kernel, programs, numbers, TILES=settings["TILES"], **constants), row_tiles

    def _quantize(self, settings: Config) -> tuple[Launch, int]:
        a, b, m = self.along, self.across, self.m
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
        programs, row_tiles, numbers = self._sized(constants, 1)
        numbers += self.along_piece * m.pieces, self.along_piece, self.across_sample * m.samples, self.across_sample
        made = Launch(
            quantize_kernel, programs, numbers, ALONG=a.granularity, ACROSS=b.granularity,
            ALONG_LIMIT=a.limit, ACROSS_LIMIT=b.limit, ALONG_ROUNDING=a.rounding, ACROSS_ROUNDING=b.rounding,
            FLAT=m.samples == 1 or self.across_sample == self.per * b.rank, maxnreg=settings["maxnreg"], **constants,
        )  # fmt: skip
        return made, row_tiles

    def __call__(self, x: Tensor, along_basis: Tensor, across_basis: Tensor) -> tuple[Tensor, ...]:
        """Codes and scale of each operand that is made, then, if asked for, the sums of the columns (columns,), float32."""
        device, tops, sums = x.device, x, x  # where a kernel gets a pointer that it will not follow: x
        made = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self.room]
        along, across = (
            (made[:2] if self.along.granularity else (x, x)),
            (made[-2:] if self.across.granularity else (x, x)),
        )
        if self.tops:  # as bits, then the factors
            tops = torch.zeros(2 * self.tops, dtype=torch.int32, device=device)
        factors = tops[self.tops :].view(torch.float32) if self.tops else x

        def largest(settings: Config) -> None:
            nonlocal sums
            run, row_tiles = self.launch("largest", settings)
            if self.sums:
                sums = torch.empty(row_tiles, self.m.columns, device=device)
            run(x, along_basis, across_basis, tops, tops[self.along_tops :], sums)

        def quantize(settings: Config) -> None:
            run, _ = self.launch("quantize", settings)
            run(x, along_basis, across_basis, factors, factors[self.along_tops :], *along, *across)

        with on_device(x):
            if self.sums or self.tops:
                launch(LARGEST, self.key, device, largest)
            if self.tops:
                self.scales(tops, factors, along[1], across[1])
            launch(QUANTIZE, self.key, device, quantize)
        return *made, *([sums.sum(0)] if self.sums else [])


_job = lru_cache(maxsize=4096)(_Job)


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
    rank = len(rows) if draw is None else draw.shape[0]
    way = _way(block, rank, draw is not None, format, granularity, group, rounding)
    count, samples, length = x.shape
    if _is_across(x):
        seen = _Matrix(samples, length, count, 1, x.stride(1), x.stride(2), 0)
        job = _job(seen, None, way, False, x.dtype)
    else:
        x = x if x.stride(2) == 1 else x.contiguous()
        job = _job(_Matrix(1, count, length, samples, 0, x.stride(0), x.stride(1)), way, None, False, x.dtype)
    matrix = _basis(x, block, rows, signs, draw)
    codes, scale = job(x, matrix, matrix)
    return codes, scale


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
    along = _way(i_block, len(i_rows), False, i_format, i_granularity, i_group, i_rounding)
    rank = len(w_rows) if w_draw is None else w_draw.shape[0]
    across = _way(w_block, rank, w_draw is not None, w_format, w_granularity, w_group, w_rounding)
    samples, length, outputs = g.shape
    job = _job(_Matrix(samples, length, outputs, 1, g.stride(0), g.stride(1), 0), along, across, bias, g.dtype)
    bases = _basis(g, i_block, i_rows, i_signs, None), _basis(g, w_block, w_rows, w_signs, w_draw)
    i_codes, i_scale, w_codes, w_scale, *sums = job(g, *bases)
    return i_codes, i_scale, w_codes, w_scale, sums[0].to(g.dtype) if bias else g.new_empty(0)


def _specimen(x: str, holder: str, along: str, across: str, rank: int) -> list[Specimen]:
    pointers = {"x": f"*{x}", "along_matrix": f"*{x}", "across_matrix": f"*{x}"}
    tops = {"along_top": "*i32", "across_top": "*i32", "sums": "*fp32"}
    factors = {"along_factor": "*fp32", "across_factor": "*fp32"}
    shared = dict(ALONG_GAIN=1.0, ACROSS_GAIN=1.0, A=16, AR=16, R=rank, M=4, N=16, C=128, WRAPS=False)
    shared |= dict(ALONG_RANK=16, ACROSS_RANK=rank)
    codes = {"along_codes": f"*{holder}", "across_codes": "*i8", "along_scale": "*fp32", "across_scale": "*fp32"}
    kinds = dict(ALONG_LIMIT=7, ACROSS_LIMIT=127, ALONG_ROUNDING="hashed", ACROSS_ROUNDING="nearest")
    ranges = {"ALONG": along if along != "block" else "", "ACROSS": across if across not in ("block", "tile") else ""}
    return [
        specimen(
            quantize_kernel,
            {**pointers, **factors, **codes},
            ALONG=along,
            ACROSS=across,
            FLAT=rank == 8,
            **kinds,
            **shared,
        ),
        specimen(largest_kernel, {**pointers, **tops}, **ranges, SUMS=True, TILES=4, **shared),
    ]


SPECIMENS = [
    *_specimen("bf16", "i8", "row", "row", 8),
    *_specimen("fp16", "i8", "", "tensor", 16),
    *_specimen("fp32", "i8", "block", "", 8),
    *_specimen("bf16", "i8", "", "tile", 16),
    specimen(
        scales_kernel,
        {"tops": "*i32", "factors": "*fp32", "along_scale": "*fp32", "across_scale": "*fp32"},
        ALONG_LIMIT=7,
        ACROSS_LIMIT=127,
        ELEMENTS=1024,
    ),
]

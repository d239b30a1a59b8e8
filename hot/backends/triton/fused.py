"""transform_quantize and grad_output_operands: how the kernels of `operands` are launched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hot.backends.ops import bits_of, code_dtype, scale_shape
from hot.backends.reference.transforms import basis
from hot.backends.table import register_kernel
from hot.backends.triton.launch import Specimen, cdiv, on_device, power_of_2, specimen, start
from hot.backends.triton.operands import largest_kernel, quantize_kernel, scales_kernel
from hot.backends.triton.tuning import Config, Key, bucket, family, launch

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class _Matrix(NamedTuple):
    """A tensor as the kernels see it: `samples` × `length` rows, `columns` dense, the whole of it `pieces` times."""

    x: Tensor
    samples: int
    length: int
    columns: int
    pieces: int
    stride: int  # of a sample
    step: int  # of a row
    piece_stride: int


class _Way(NamedTuple):
    """What one operand's transform and quantizer are to the kernels. granularity: empty where that operand is not made."""

    matrix: (
        Tensor  # (rank, side): ±1, or ±2^k where the gain is a power of two; the identity where nothing is transformed
    )
    gain: float  # the gain, where the matrix does not hold it
    block: int
    format: str
    granularity: str
    group: int
    rounding: str

    @property
    def rank(self) -> int:
        return self.matrix.shape[0]

    @property
    def side(self) -> int:
        return self.matrix.shape[1]

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
        return "" if self.granularity == "block" else self.granularity

    def k(self, length: int) -> int:
        """The part of K that `length` elements make."""
        return length if self.block == 1 else cdiv(length, self.block) * self.rank

    def tops(self, rows: int) -> int:
        """How many largest magnitudes there are."""
        return {"": 0, "row": rows, "tensor": 1}[self.scaled_by]

    def room(self, rows: int, k: int, device: torch.device) -> list[Tensor]:
        """Codes (rows, k) and their scale, to be written; two empty tensors for an operand that is not made."""
        shape = scale_shape(rows, k, self.granularity, self.group) if self.granularity else (0, 0)
        size = (rows, k) if self.granularity else (0, 0)
        codes = torch.empty(size, dtype=code_dtype(self.format), device=device)
        return [codes, torch.empty(shape, dtype=torch.float32, device=device)]


_matrices: dict[tuple[object, ...], tuple[Tensor, float]] = {}


def _way(
    x: Tensor, block: int, rows: Sequence[int], signs: Sequence[int], draw: Tensor | None,
    format: str, granularity: str, group: int, rounding: str,
) -> _Way:  # fmt: skip
    key = block, tuple(rows), tuple(signs), x.dtype, x.device
    made = _matrices.get(key) if draw is None else None
    if made is None:
        made = _matrix(x, block, rows, signs, draw)
        if draw is None:
            _matrices[key] = made
    return _Way(*made, block, format, granularity, group, rounding)


def _matrix(
    x: Tensor, block: int, rows: Sequence[int], signs: Sequence[int], draw: Tensor | None
) -> tuple[Tensor, float]:
    """The matrix of a way and the gain that it does not hold."""
    if block == 1:
        return torch.eye(IDENTITY, dtype=x.dtype, device=x.device), 1.0
    size = block if draw is None else draw.shape[0]
    gain = size**-0.5
    whole = basis(block, rows, signs, draw, x.new_empty(0)).contiguous()
    return (whole * gain, 1.0) if size.bit_length() % 2 else (whole, gain)  # a power of four: the gain is exact


IDENTITY = 16
"""The side of the blocks that the kernels cut where nothing is transformed."""


def _serves(
    block: int, rank: int, prefix: int, tail: str, format: str, granularity: str, group: int, rounding: str,
    clip: Sequence[float], length: int, samples: int,
) -> bool:  # fmt: skip
    """Whether the kernels can make this operand, whose K is `samples` times what `length` elements make."""
    if block not in (1, 16, 32, 64, 128) or prefix or clip or not format.startswith("int"):
        return False
    if tail == "keep" and block > 1 and length % block:
        return False
    rank = IDENTITY if block == 1 else rank
    k = length if block == 1 else cdiv(length, block) * rank
    if rounding == "hashed" and (rank % 2 or (samples > 1 and k % 2)):
        return False  # two neighbours along K share a hash, and a tile must hold both
    if granularity == "block":
        side = IDENTITY if block == 1 else block
        tile = group // rank * side
        return (
            rank == power_of_2(rank) >= 8
            and group % rank == 0
            and 16 <= tile <= 256
            and (tile == power_of_2(tile) and (samples == 1 or k % group == 0))
        )
    return granularity in ("row", "tensor") and rounding in ("nearest", "hashed", "pseudo_stochastic")


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


def _run(m: _Matrix, along: _Way | None, across: _Way | None, sums: bool) -> tuple[Tensor, ...]:
    """(codes, scale) along, (codes, scale) across, sums of the columns (columns,) float32; empty where not asked for."""
    some = along or across
    assert some is not None
    a, b = (way or some._replace(granularity="") for way in (along, across))
    rows, side = m.samples * m.length, (across.side if across else IDENTITY)
    per = cdiv(m.length, side)  # blocks a sample
    a_piece, b_sample = a.k(m.columns), b.k(m.length)
    device = m.x.device
    out = a.room(rows, a_piece * m.pieces, device) + b.room(m.columns, b_sample * m.samples, device)
    a_count, b_count = a.tops(rows), b.tops(m.columns)
    count = a_count + b_count
    tops = torch.zeros(count, dtype=torch.int32, device=device)
    factors = torch.empty(count, dtype=torch.float32, device=device)
    partial = torch.empty(0, m.columns, device=device)
    sizes = m.samples, m.length, per, m.columns, m.stride, m.step, m.piece_stride
    key: Key = (
        "+".join(name for name, way in (("along", along), ("across", across)) if way),
        a.side, b.side, bucket(rows), bucket(m.columns), DTYPES[m.x.dtype],
    )  # fmt: skip

    def constants(config: Config, blocks: int, columns: int) -> dict[str, Any]:
        return {
            "ALONG_GAIN": a.gain, "ACROSS_GAIN": b.gain, "A": a.side, "AR": a.width, "R": b.width,
            "ALONG_RANK": a.rank, "ACROSS_RANK": b.rank, "M": blocks, "N": side, "C": max(columns, a.side),
            "WRAPS": blocks > per, "num_warps": config["num_warps"],
            "enable_fp_fusion": False,  # every operation is rounded by itself, as the reference's are
        }  # fmt: skip

    def largest(config: Config) -> None:
        nonlocal partial
        kept = constants(config, max(config["ROWS"] // side, 1), config["C"])
        row_tiles = cdiv(m.samples * per, kept["M"] * config["TILES"])
        programs = cdiv(m.columns, kept["C"]) * row_tiles * m.pieces
        partial = torch.empty(row_tiles if sums else 0, m.columns, device=device)
        start(
            largest_kernel, programs, m.x, a.matrix, b.matrix, tops, tops[a_count:], partial, *sizes, row_tiles,
            ALONG=a.scaled_by, ACROSS=b.scaled_by, SUMS=sums, TILES=config["TILES"], **kept,
        )  # fmt: skip

    def quantize(config: Config) -> None:
        blocks, columns = max(config["ROWS"] // side, 1), config["C"]
        if a.granularity == "block":
            columns = a.tile
        if b.granularity == "block":
            blocks, columns = b.tile // side, max(8192 // b.tile, 16)
        kept = constants(config, blocks, columns)
        row_tiles = cdiv(m.samples * per, blocks)
        programs = cdiv(m.columns, kept["C"]) * row_tiles * m.pieces
        start(
            quantize_kernel, programs, m.x, a.matrix, b.matrix, factors, factors[a_count:], *out, *sizes, row_tiles,
            a_piece * m.pieces, a_piece, b_sample * m.samples, b_sample,
            ALONG=a.granularity, ACROSS=b.granularity, ALONG_LIMIT=a.limit, ACROSS_LIMIT=b.limit,
            ALONG_ROUNDING=a.rounding, ACROSS_ROUNDING=b.rounding, FLAT=m.samples == 1 or b_sample == per * b.rank,
            maxnreg=config["maxnreg"], **kept,
        )  # fmt: skip

    with on_device(m.x):
        if sums or count:
            launch(LARGEST, key, device, largest)
        if count:
            start(
                scales_kernel, cdiv(count, 1024), tops, factors, out[1], out[3], a_count, count,
                ALONG_LIMIT=a.limit, ACROSS_LIMIT=b.limit, ELEMENTS=1024,
            )  # fmt: skip
        launch(QUANTIZE, key, device, quantize)
    return *out, partial.sum(0) if sums else partial


def _serves_operand(
    x: Tensor, block: int, rows: Sequence[int], signs: Sequence[int], prefix: int, tail: str, draw: Tensor | None,
    format: str, granularity: str, group: int, rounding: str, clip: Sequence[float],
) -> bool:  # fmt: skip
    rank = len(rows) if draw is None else draw.shape[0]
    _, samples, length = x.shape
    quantizer = format, granularity, group, rounding, clip
    return x.dtype in DTYPES and x.numel() > 0 and _serves(block, rank, prefix, tail, *quantizer, length, samples)


@register_kernel("transform_quantize", backend="triton", supports=_serves_operand)
def transform_quantize(
    x: Tensor, block: int, rows: Sequence[int], signs: Sequence[int], prefix: int, tail: str, draw: Tensor | None,
    format: str, granularity: str, group: int, rounding: str, clip: Sequence[float],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    way = _way(x, block, rows, signs, draw, format, granularity, group, rounding)
    count, samples, length = x.shape
    if x.stride(0) == 1 and x.stride(2) != 1:
        across = _Matrix(x, samples, length, count, 1, x.stride(1), x.stride(2), 0)
        _, _, codes, scale, _ = _run(across, None, way, False)
    else:
        x = x if x.stride(2) == 1 else x.contiguous()
        along = _Matrix(x, 1, count, length, samples, 0, x.stride(0), x.stride(1))
        codes, scale, *_ = _run(along, way, None, False)
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
        and w_granularity != "block"  # a tile is made for one size of groups
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
    along = _way(g, i_block, i_rows, i_signs, None, i_format, i_granularity, i_group, i_rounding)
    across = _way(g, w_block, w_rows, w_signs, w_draw, w_format, w_granularity, w_group, w_rounding)
    samples, length, outputs = g.shape
    matrix = _Matrix(g, samples, length, outputs, 1, g.stride(0), g.stride(1), 0)
    i_codes, i_scale, w_codes, w_scale, sums = _run(matrix, along, across, bias)
    return i_codes, i_scale, w_codes, w_scale, sums.to(g.dtype) if bias else g.new_empty(0)


def _specimen(x: str, holder: str, along: str, across: str, rank: int) -> list[Specimen]:
    pointers = {"x": f"*{x}", "along_matrix": f"*{x}", "across_matrix": f"*{x}"}
    tops = {"along_top": "*i32", "across_top": "*i32", "sums": "*fp32"}
    factors = {"along_factor": "*fp32", "across_factor": "*fp32"}
    shared = dict(ALONG_GAIN=1.0, ACROSS_GAIN=1.0, A=16, AR=16, R=rank, M=4, N=16, C=128, WRAPS=False)
    shared |= dict(ALONG_RANK=16, ACROSS_RANK=rank)
    codes = {"along_codes": f"*{holder}", "across_codes": "*i8", "along_scale": "*fp32", "across_scale": "*fp32"}
    kinds = dict(ALONG_LIMIT=7, ACROSS_LIMIT=127, ALONG_ROUNDING="hashed", ACROSS_ROUNDING="nearest")
    ranges = {"ALONG": along if along != "block" else "", "ACROSS": across if across != "block" else ""}
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
    specimen(
        scales_kernel,
        {"tops": "*i32", "factors": "*fp32", "along_scale": "*fp32", "across_scale": "*fp32"},
        ALONG_LIMIT=7,
        ACROSS_LIMIT=127,
        ELEMENTS=1024,
    ),
]

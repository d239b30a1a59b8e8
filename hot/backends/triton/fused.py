"""transform_quantize and grad_output_operands: from a tensor to operands of products, by tensor cores.

Both look at a matrix with one dense axis. Its other axis is `samples` times `length`, cut into blocks that straddle no two
samples. An operand is then made in one of two ways, or, of a gradient, in both from one read:

    along    K is the dense axis: codes lie as the matrix does     (grad_input's gradient)
    across   K is the blocked axis: codes lie transposed           (grad_weight's gradient and input, grad_input's weight)

A transform is a product with a small matrix of ±1, which is exact in bfloat16 and float16 with float32 sums. One scale a row
or tensor needs the largest magnitude first: `largest_kernel` reads for it, `scales_kernel` makes scales of it, and
`quantize_kernel` reads again and writes codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hot.backends.ops import bits_of, code_dtype, scale_shape
from hot.backends.reference.transforms import basis
from hot.backends.table import register_kernel
from hot.backends.triton.launch import Specimen, on_device, specimen
from hot.backends.triton.rounding import float_bits, mantissa_noise, pair_noise, scale_of
from hot.backends.triton.tuning import Config, Key, bucket, family, launch

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _program(columns, row_tiles, C: tl.constexpr):
    """(first column, tile of rows, piece) of this program; neighbours along the columns run together."""
    program = tl.program_id(0)
    column_tiles = tl.cdiv(columns, C)
    rest = program // column_tiles
    return program % column_tiles * C, rest % row_tiles, rest // row_tiles


@triton.jit
def _place(first, per, length, samples, j, N: tl.constexpr, WRAPS: tl.constexpr):
    """(sample, first element in it, elements left of it) of block `first` + j, where a sample has `per` blocks of N."""
    sample = first // per
    block = first - sample * per + j
    if WRAPS:  # a tile may reach over several samples
        sample = sample + block // per
        start = (block % per) * N
    else:
        over = (block >= per).to(tl.int32)
        sample = sample + over
        start = (block - over * per) * N
    return sample, start, tl.where(sample < samples, length - start, 0)


@triton.jit
def _load(
    x, first, column, samples, length, per, columns, stride, step,
    M: tl.constexpr, N: tl.constexpr, C: tl.constexpr, WRAPS: tl.constexpr,
):  # fmt: skip
    """A tile (M blocks, N, C columns) of the matrix from block `first` and `column` on; zeros outside."""
    i = tl.arange(0, N)
    c = tl.arange(0, C)
    sample, start, left = _place(first, per, length, samples, tl.arange(0, M), N, WRAPS)
    block = x + column + (sample.to(tl.int64) * stride + start.to(tl.int64) * step)
    inside = (i[None, :, None] < left[:, None, None]) & (c < columns - column)[None, None, :]
    return tl.load(block[:, None, None] + (i * step)[None, :, None] + c[None, None, :], mask=inside, other=0.0)


@triton.jit
def _dot(x, basis):
    """x basis with float32 sums: exact products for ±1 and ±2^k. float32 goes through float32 arithmetic, not TF32."""
    return tl.dot(x, basis, input_precision="ieee")


@triton.jit
def _basis(matrix, RANK: tl.constexpr, N: tl.constexpr, R: tl.constexpr):
    """The transposed basis (N, R) of a matrix (RANK, N), zeros beyond its rank."""
    r = tl.arange(0, R)
    return tl.load(matrix + r[None, :] * N + tl.arange(0, N)[:, None], mask=(r < RANK)[None, :], other=0.0)


@triton.jit
def _along(x, basis, GAIN: tl.constexpr):
    """Coefficients (C / N, rows, R) of the blocks of N columns of a tile (…, C).

    Rows of the product run along the matrix's rows: a thread then holds many columns of few rows, and a row's scale is worked
    out by few threads.
    """
    C: tl.constexpr = x.shape[2]
    ROWS: tl.constexpr = x.shape[0] * x.shape[1]
    N: tl.constexpr = basis.shape[0]
    blocks = tl.reshape(tl.permute(tl.reshape(x, (ROWS, C // N, N)), (1, 0, 2)), (C // N * ROWS, N))
    y = tl.dot(blocks, basis, input_precision="ieee")
    return tl.reshape(y, (C // N, ROWS, basis.shape[1])) * GAIN


@triton.jit
def _across(x, basis, GAIN: tl.constexpr):
    """Coefficients (M, C, R) of the blocks of N rows of a tile (M, N, C)."""
    M: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[2]
    y = tl.dot(tl.reshape(tl.permute(x, (0, 2, 1)), (M * C, x.shape[1])), basis, input_precision="ieee")
    return tl.reshape(y, (M, C, basis.shape[1])) * GAIN


@triton.jit
def _largest(y):
    """The bits of the largest magnitude of every row of coefficients (m, rows, R): as integers they order like floats."""
    return float_bits(tl.reduce(tl.reduce(tl.abs(y), 0, _larger), 1, _larger))


@triton.jit
def _codes(y, factor, pairs, row_pairs, ROUNDING: tl.constexpr, HOLDER: tl.constexpr):
    """Codes of y (m, rows, R): whole numbers in float32 for a float8 HOLDER, else int32. factor (rows,): as of `scale_of`.

    For the noise, pairs (m, R / 2): ⌊k / 2⌋ of each two neighbours along K; row_pairs (rows,): row·⌈K/2⌉.
    """
    # v = y · (1 / scale). Adding 1.5·2²³ to v·2¹⁵ rounds it to a whole number and leaves that in the low bits of the float;
    # the noise is added to these, and what stands above bit 15 is the code. |v| ≤ LIMIT (1 + 2⁻²³), which rounds to LIMIT·2¹⁵,
    # so nothing is clamped.
    finite = factor > 0
    if ROUNDING == "nearest":
        t = (y * factor[None, :, None] + 12582912.0) - 12582912.0
        t = tl.where(finite[None, :, None], t, 0.0)
        codes = t.to(HOLDER) if tl.float8e4nv == HOLDER else t.to(tl.int32).to(HOLDER)
    else:
        t = tl.fma(y * factor[None, :, None], 32768.0, 12582912.0).to(tl.int32, bitcast=True)
        if ROUNDING == "hashed":
            half: tl.constexpr = y.shape[2] // 2
            first, second = tl.split(tl.reshape(float_bits(y), (y.shape[0], y.shape[1], half, 2)))
            one, two = pair_noise(first, second, row_pairs[None, :, None] + pairs[:, None, :])
            t += tl.reshape(tl.join(one, two), y.shape)
        else:
            t += mantissa_noise(float_bits(y))
        if tl.float8e4nv == HOLDER:  # without what is below bit 15 it is the float 1.5·2²³ + code·2¹⁵
            kept = tl.where(finite, -32768, 0)[None, :, None]
            offset = tl.where(finite, -384.0, 0.0)[None, :, None]
            codes = tl.fma((t & kept).to(tl.float32, bitcast=True), 2.0**-15, offset)
        else:
            codes = ((t - 0x4B400000) >> 15) & tl.where(finite, -1, 0)[None, :, None]
    return codes


@triton.jit
def scales_kernel(tops, scales, factors, count, LIMIT: tl.constexpr, ELEMENTS: tl.constexpr):
    """Scales and what elements are multiplied by, from tops: once a row, not once a row and tile."""
    i = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    scale, factor = scale_of(tl.load(tops + i, mask=i < count, other=0), LIMIT)
    tl.store(scales + i, scale, mask=i < count)
    tl.store(factors + i, factor, mask=i < count)


@triton.jit
def largest_kernel(
    x, along_matrix, across_matrix, along_top, across_top, sums,
    samples, length, per, columns, stride, step, piece_stride, row_tiles,
    ALONG: tl.constexpr, ACROSS: tl.constexpr, SUMS: tl.constexpr, ALONG_GAIN: tl.constexpr, ACROSS_GAIN: tl.constexpr,
    A: tl.constexpr, AR: tl.constexpr, R: tl.constexpr, ALONG_RANK: tl.constexpr, ACROSS_RANK: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, C: tl.constexpr, TILES: tl.constexpr, WRAPS: tl.constexpr,
):  # fmt: skip
    """The largest magnitudes of coefficients, as bits, into zeroed tops; the sums over TILES tiles of rows of each column.

    ALONG, ACROSS: ``row`` or ``tensor`` where that operand needs a top, else empty.
    """
    column, group, piece = _program(columns, row_tiles, C)
    c = column + tl.arange(0, C)
    x += piece.to(tl.int64) * piece_stride
    along = _basis(along_matrix, ALONG_RANK, A, AR)
    across = _basis(across_matrix, ACROSS_RANK, N, R)
    seen = tl.zeros((M, C, R), tl.float32)
    total = tl.zeros((C, 16), tl.float32)
    for tile in range(TILES):
        first = (group * TILES + tile) * M
        t = _load(x, first, column, samples, length, per, columns, stride, step, M, N, C, WRAPS)
        if ACROSS != "":
            seen = _larger(seen, tl.abs(_across(t, across, ACROSS_GAIN)))
        if ALONG != "":
            top = _largest(_along(t, along, ALONG_GAIN))
            if ALONG == "tensor":
                tl.atomic_max(along_top, tl.max(top, 0), sem="relaxed")
            else:
                r = tl.arange(0, M * N)
                sample, start, left = _place(first, per, length, samples, r // N, N, WRAPS)
                tl.atomic_max(along_top + sample * length + start + r % N, top, mask=r % N < left, sem="relaxed")
        if SUMS:
            ones = tl.full((M * N, 16), 1.0, t.dtype)
            total = tl.dot(tl.trans(tl.reshape(t, (M * N, C))), ones, total, input_precision="ieee")
    if ACROSS != "":
        top = _largest(seen)
        if ACROSS == "tensor":
            tl.atomic_max(across_top, tl.max(top, 0), sem="relaxed")
        else:
            tl.atomic_max(across_top + c, top, mask=c < columns, sem="relaxed")
    if SUMS:
        tl.store(sums + group.to(tl.int64) * columns + c, tl.max(total, 1), mask=c < columns)


@triton.jit
def quantize_kernel(
    x, along_matrix, across_matrix, along_factor, across_factor, along_codes, along_scale, across_codes, across_scale,
    samples, length, per, columns, stride, step, piece_stride, row_tiles,
    along_k, along_piece, across_k, across_sample,
    ALONG: tl.constexpr, ACROSS: tl.constexpr, ALONG_GAIN: tl.constexpr, ACROSS_GAIN: tl.constexpr,
    ALONG_LIMIT: tl.constexpr, ACROSS_LIMIT: tl.constexpr, ALONG_ROUNDING: tl.constexpr, ACROSS_ROUNDING: tl.constexpr,
    A: tl.constexpr, AR: tl.constexpr, R: tl.constexpr, ALONG_RANK: tl.constexpr, ACROSS_RANK: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, C: tl.constexpr, FLAT: tl.constexpr, WRAPS: tl.constexpr,
):  # fmt: skip
    """Codes of one tile, M blocks of N rows × C columns.

    ALONG, ACROSS: granularity of that operand, empty for none; ``block`` has one group a tile, whose scale is made here.
    …_k: K; along_piece and across_sample: the part of K that one piece of the columns, or one sample, makes. FLAT: every block
    makes a whole rank of it, so that K needs no samples.
    """
    column, tile, piece = _program(columns, row_tiles, C)
    first = tile * M
    x += piece.to(tl.int64) * piece_stride
    t = _load(x, first, column, samples, length, per, columns, stride, step, M, N, C, WRAPS)
    if ALONG != "":
        r = tl.arange(0, M * N)
        sample, start, left = _place(first, per, length, samples, r // N, N, WRAPS)
        row = (sample * length + start + r % N).to(tl.int64)
        inside = r % N < left
        y = _along(t, _basis(along_matrix, ALONG_RANK, A, AR), ALONG_GAIN)
        if ALONG == "block":
            scale, factor = scale_of(_largest(y), ALONG_LIMIT)
        elif ALONG == "row":
            factor = tl.load(along_factor + row, mask=inside, other=1.0)
        else:
            factor = tl.load(along_factor + tl.zeros_like(row))
        start = column // A * ALONG_RANK
        k = piece * along_piece + start
        pairs = (k // 2 + tl.arange(0, C // A) * (ALONG_RANK // 2))[:, None] + tl.arange(0, AR // 2)[None, :]
        row_pairs = (row * ((along_k + 1) // 2)).to(tl.int32)
        codes = _codes(y, factor, pairs, row_pairs, ALONG_ROUNDING, along_codes.dtype.element_ty)
        if ALONG == "block":
            groups = tl.cdiv(along_k, C // A * AR)
            tl.store(along_scale + row * groups + k // (C // A * AR), scale, mask=inside)
        j = tl.arange(0, C // A * AR)
        at = start + (j if ALONG_RANK == AR else j // AR * ALONG_RANK + j % AR)
        inner = (at < along_piece) & (j % AR < ALONG_RANK)
        codes = tl.reshape(tl.permute(codes, (1, 0, 2)), (M * N, C // A * AR)).to(along_codes.dtype.element_ty)
        place = along_codes + (row * along_k + piece * along_piece)[:, None] + at[None, :]
        tl.store(place, codes, mask=inside[:, None] & inner[None, :])
    if ACROSS != "":
        c = column + tl.arange(0, C)
        inside = c < columns
        y = _across(t, _basis(across_matrix, ACROSS_RANK, N, R), ACROSS_GAIN)
        if ACROSS == "block":
            scale, factor = scale_of(_largest(y), ACROSS_LIMIT)
        elif ACROSS == "row":
            factor = tl.load(across_factor + c, mask=inside, other=1.0)
        else:
            factor = tl.load(across_factor + tl.zeros_like(c))
        if FLAT:
            k = (first + tl.arange(0, M)) * ACROSS_RANK
        else:
            sample, start, left = _place(first, per, length, samples, tl.arange(0, M), N, WRAPS)
            k = sample * across_sample + start // N * ACROSS_RANK
        row_pairs = (c.to(tl.int64) * ((across_k + 1) // 2)).to(tl.int32)
        pairs = (k // 2)[:, None] + tl.arange(0, R // 2)[None, :]
        codes = _codes(y, factor, pairs, row_pairs, ACROSS_ROUNDING, across_codes.dtype.element_ty)
        if ACROSS == "block":
            groups = tl.cdiv(across_k, M * R)
            tl.store(across_scale + c.to(tl.int64) * groups + tile, scale, mask=inside)
        j = tl.arange(0, M * R)
        if FLAT:
            at = first * ACROSS_RANK + (j if ACROSS_RANK == R else j // R * ACROSS_RANK + j % R)
            inner = (at < across_k) & (j % R < ACROSS_RANK)
        else:
            sample, start, left = _place(first, per, length, samples, j // R, N, WRAPS)
            in_sample = start // N * ACROSS_RANK + j % R
            at = sample * across_sample + in_sample
            inner = (j % R < ACROSS_RANK) & (left > 0) & (in_sample < across_sample)
        codes = tl.reshape(tl.permute(codes, (1, 0, 2)), (C, M * R)).to(across_codes.dtype.element_ty)
        place = across_codes + c.to(tl.int64)[:, None] * across_k + at[None, :]
        tl.store(place, codes, mask=inside[:, None] & inner[None, :])


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
    """What one operand's transform and quantizer are to the kernels."""

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
        return max(triton.next_power_of_2(self.rank), 8)

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
        return length if self.block == 1 else triton.cdiv(length, self.block) * self.rank

    def tops(self, rows: int) -> int:
        return {"": 0, "row": rows, "tensor": 1}[self.scaled_by]

    def room(self, rows: int, k: int) -> tuple[Tensor, Tensor]:
        """Codes (rows, k) and their scale, to be written."""
        shape, device = scale_shape(rows, k, self.granularity, self.group), self.matrix.device
        codes = torch.empty(rows, k, dtype=code_dtype(self.format), device=device)
        return codes, torch.empty(shape, dtype=torch.float32, device=device)

    def constants(self, name: str) -> dict[str, object]:
        """The kernels' constants of this way of the name."""
        return {
            f"{name}_GAIN": self.gain,
            f"{name}_LIMIT": self.limit,
            f"{name}_ROUNDING": self.rounding,
        }


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
    k = length if block == 1 else triton.cdiv(length, block) * rank
    if rounding == "hashed" and (rank % 2 or (samples > 1 and k % 2)):
        return False  # two neighbours along K share a hash, and a tile must hold both
    if granularity == "block":
        side = IDENTITY if block == 1 else block
        tile = group // rank * side
        return (
            rank == triton.next_power_of_2(rank) >= 8
            and group % rank == 0
            and 16 <= tile <= 256
            and (tile == triton.next_power_of_2(tile) and (samples == 1 or k % group == 0))
        )
    return granularity in ("row", "tensor") and rounding in ("nearest", "hashed", "pseudo_stochastic")


_TILES = {
    "along": {"ROWS": 32, "C": 128, "num_warps": 2, "maxnreg": 128},
    "across": {"ROWS": 64, "C": 128, "num_warps": 4, "maxnreg": 128},
    "along+across": {"ROWS": 64, "C": 128, "num_warps": 4, "maxnreg": 128},
}
LARGEST = family(
    "largest of operands",
    lambda key: {"ROWS": 64, "C": 64, "TILES": 8, "num_warps": 4, "num_stages": 2},
    lambda key: [
        {"ROWS": rows, "C": columns, "TILES": tiles, "num_warps": 4, "num_stages": 2}
        for rows in (32, 64) for columns in (64, 128) for tiles in (4, 8, 16)
    ],
)  # fmt: skip
"""Shape class: the operands that are made, block sides, classes of the sizes, dtype."""
QUANTIZE = family(
    "quantize operands",
    lambda key: _TILES[str(key[0])],
    lambda key: [
        {"ROWS": rows, "C": columns, "num_warps": warps, "maxnreg": registers}
        for rows, columns, warps in ((32, 128, 2), (64, 64, 2), (64, 128, 4), (32, 128, 4), (128, 64, 4), (32, 256, 4))
        for registers in (128, 168, 255)
    ],
)
"""Shape class: as of LARGEST."""


def _run(m: _Matrix, along: _Way | None, across: _Way | None, sums: bool) -> list[Tensor]:
    """[codes, scale of along], [codes, scale of across], [sums of the columns (columns,) float32]: those that are asked for."""
    rows = m.samples * m.length
    along_k = along.k(m.columns) * m.pieces if along else 0
    across_k = across.k(m.length) * m.samples if across else 0
    along_out = along.room(rows, along_k) if along else ()
    across_out = across.room(m.columns, across_k) if across else ()
    some = m.x  # where a kernel takes a pointer that it will not follow
    a, b = along or across, across or along
    assert a is not None and b is not None
    counts = along.tops(rows) if along else 0, across.tops(m.columns) if across else 0
    every = torch.zeros(sum(counts), dtype=torch.int32, device=m.x.device)
    tops, factors = every.split(counts), torch.empty_like(every, dtype=torch.float32).split(counts)
    side = across.side if across else IDENTITY
    per = triton.cdiv(m.length, side)
    kinds = "+".join([*(["along"] if along else []), *(["across"] if across else [])])
    key: Key = (kinds, a.side, b.side, bucket(rows), bucket(m.columns), DTYPES[m.x.dtype])
    found: list[Tensor] = []

    def common(config: Config, tiles: int) -> dict[str, object]:
        blocks = max(config["ROWS"] // side, 1)
        return {
            "A": a.side, "AR": a.width, "R": b.width, "ALONG_RANK": a.rank, "ACROSS_RANK": b.rank,
            "M": blocks, "N": side, "C": max(config["C"], a.side), "WRAPS": blocks > per, "num_warps": config["num_warps"],
            "enable_fp_fusion": False,  # every operation is rounded by itself, as the reference's are
        }  # fmt: skip

    def grid(constants: dict[str, object], tiles: int) -> tuple[int, int]:
        """(programs, tiles of rows)."""
        row_tiles = triton.cdiv(m.samples * per, int(constants["M"]) * tiles)  # type: ignore[call-overload]
        return triton.cdiv(m.columns, int(constants["C"])) * row_tiles * m.pieces, row_tiles  # type: ignore[call-overload]

    sizes = m.samples, m.length, per, m.columns, m.stride, m.step, m.piece_stride

    def largest(config: Config) -> None:
        constants = common(config, config["TILES"])
        programs, row_tiles = grid(constants, config["TILES"])
        partial = torch.empty(row_tiles if sums else 0, m.columns, dtype=torch.float32, device=m.x.device)
        largest_kernel[(programs,)](
            m.x, a.matrix, b.matrix, *tops, partial, *sizes, row_tiles,
            ALONG=along.scaled_by if along else "", ACROSS=across.scaled_by if across else "", SUMS=sums,
            ALONG_GAIN=a.gain, ACROSS_GAIN=b.gain, TILES=config["TILES"], num_stages=config["num_stages"], **constants,
        )  # fmt: skip
        found[:] = [partial]

    def quantize(config: Config) -> None:
        constants = common(config, 1)
        if along and along.granularity == "block":
            constants["C"] = along.group // along.rank * along.side
        if across and across.granularity == "block":
            constants |= {"M": across.group // across.rank}
            constants |= {"C": max(8192 // (int(constants["M"]) * side), 16), "WRAPS": constants["M"] > per}  # type: ignore[call-overload]
        programs, row_tiles = grid(constants, 1)
        quantize_kernel[(programs,)](
            m.x, a.matrix, b.matrix, *factors, *(along_out or (some, some)), *(across_out or (some, some)),
            *sizes, row_tiles, along_k, along_k // m.pieces, across_k, across_k // m.samples,
            ALONG=along.granularity if along else "", ACROSS=across.granularity if across else "",
            FLAT=m.samples == 1 or across_k == per * b.rank * m.samples,
            **a.constants("ALONG"), **b.constants("ACROSS"), **constants, maxnreg=config["maxnreg"],
        )  # fmt: skip

    with on_device(m.x):
        if sums or any(counts):
            launch(LARGEST, key, m.x.device, largest)
        for way, out, count, top, factor in zip(
            (along, across), (along_out, across_out), counts, tops, factors, strict=True
        ):
            if way and count:
                programs = triton.cdiv(count, 1024)
                scales_kernel[(programs,)](top, out[-1], factor, count, LIMIT=way.limit, ELEMENTS=1024)
        launch(QUANTIZE, key, m.x.device, quantize)
    return [*along_out, *across_out, *(partial.sum(0) for partial in found if sums)]


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
        codes, scale = _run(across, None, way, False)
    else:
        x = x if x.stride(2) == 1 else x.contiguous()
        along = _Matrix(x, 1, count, length, samples, 0, x.stride(0), x.stride(1))
        codes, scale = _run(along, way, None, False)
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
    i_codes, i_scale, w_codes, w_scale, *sums = _run(matrix, along, across, bias)
    return i_codes, i_scale, w_codes, w_scale, sums[0].to(g.dtype) if bias else g.new_empty(0)


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
    specimen(scales_kernel, {"tops": "*i32", "scales": "*fp32", "factors": "*fp32"}, LIMIT=127, ELEMENTS=1024),
]

"""The ops, each declared once: name, signature, fake as the body, and the line of torch that it equals.

An **operand** of a product is a matrix (rows, K): `rows` its own axis, K the contracted axis, K contiguous. Before its
transform it is (rows, samples, length): K is the samples one after the other, and no transform block straddles two of them.
Float results are float32, or float64 where the input is float64; scales are float32 always.

Arguments shared by several ops
    block, rows, signs, prefix, tail, draw    a block transform, see `project`
    format, granularity, group, rounding, clip    a quantizer, see `quantize`
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hot.backends.table import Ops, declare_fused_op, declare_op


def compute_dtype(x: Tensor) -> torch.dtype:
    """What transforms and scales are computed in: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def projected_length(length: int, block: int, rank: int, prefix: int, tail: str) -> int:
    """The length that `project` makes of an axis: prefix kept, blocks to rank each, the ragged tail padded or kept."""
    body = max(length - prefix, 0)
    full, ragged = body // block, body % block
    kept = ragged if tail == "keep" else (rank if ragged else 0)
    return min(prefix, length) + full * rank + kept


def bits_of(format: str) -> int:
    """The code width of an integer format: ``int4`` → 4, ``log4.e4m3`` → 4; 8 for the float8 formats."""
    return 8 if format in FLOAT8 else int(format[3])


FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
MANTISSA = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}
"""Bits of a float8's mantissa."""


def code_dtype(format: str) -> torch.dtype:
    """The dtype of the codes: int8 holds every integer format, one code a byte; ``int4.e4m3`` holds them as float8."""
    return FLOAT8.get(format.rpartition(".")[2], torch.int8)


def largest_code(format: str) -> float:
    """The code of the largest magnitude: 127 of ``int8``, 64 of ``log4``, 448 of ``e4m3``; whatever holds the codes."""
    if format in FLOAT8:
        return torch.finfo(FLOAT8[format]).max
    levels = 2 ** (bits_of(format) - 1) - 1
    return 2.0 ** (levels - 1) if format.startswith("log") else float(levels)


def in_float8(format: str) -> str | None:
    """The format that holds the same integer codes as e4m3 floats, or None: its four significant bits are exact for codes
    of up to 5 bits and for powers of two."""
    exact = format not in FLOAT8 and (format.startswith("log") or bits_of(format) <= 5)
    return f"{format}.e4m3" if exact and "." not in format else None


INT32_TERMS = 2**31 // 128**2 // 16 * 16 - 16
"""So many products of two int8 codes always fit into int32."""


def factors_out(scale: Tensor, group: int) -> bool:
    """Whether a scale is constant along the contracted axis: one for all, or one a row."""
    return group == 0 and scale.shape[1] == 1


def is_tiled(codes: Tensor, scale: Tensor, group: int) -> bool:
    """Whether an entry of a scale covers several rows of its K-block."""
    return group > 0 and scale.shape[0] < codes.shape[0]


def scale_shape(rows: int, k: int, granularity: str, group: int) -> tuple[int, int]:
    """The shape of a scale for an operand (rows, k): (1, 1), (rows, 1), (1, k), (rows, ⌈k / group⌉), or for tiles
    (⌈rows / group⌉, ⌈k / group⌉)."""
    across, down = -(-k // max(group, 1)), -(-rows // max(group, 1))
    return {"tensor": (1, 1), "row": (rows, 1), "token": (1, k), "block": (rows, across), "tile": (down, across)}[
        granularity
    ]


@declare_op
def hadamard(x: Tensor, block: int) -> Tensor:
    """Orthonormal Walsh–Hadamard transform of every block of the last axis, natural order; its own inverse.

    x (…, L) float, L a multiple of block; block a power of two. Returns (…, L) float32 (float64 for float64).

    Equals: (x.unflatten(-1, (-1, block)) @ hadamard_matrix(block) / block**0.5).flatten(-2)
    """
    return x.new_empty(x.shape, dtype=compute_dtype(x))


@declare_op
def project(
    x: Tensor,
    block: int,
    rows: Sequence[int],
    signs: Sequence[int],
    prefix: int,
    tail: str,
    draw: Tensor | None,
) -> Tensor:
    """The chosen Hadamard coefficients of every block of the last axis: (…, L) float → (…, L') float32 (or float64).

    rows: natural indices of the kept rows of H. signs: ±1 for each position of a block, multiplied in first; empty: none.
    prefix: so many leading elements are copied, not transformed. tail: a ragged last block is zero-padded (``"pad"``) or
    copied (``"keep"``). draw (rank,) int64: positions in `rows` drawn for this call; the gain is then 1/√rank instead of
    1/√block, so that E[expand(project(x))] = x over uniform draws without replacement. L' is `projected_length`.

    Equals: (x.unflatten(-1, (-1, block)) * signs @ hadamard_matrix(block)[rows].T / block**0.5).flatten(-2)
    """
    rank = len(rows) if draw is None else draw.shape[0]
    length = projected_length(x.shape[-1], block, rank, prefix, tail)
    return x.new_empty((*x.shape[:-1], length), dtype=compute_dtype(x))


@declare_op
def expand(
    c: Tensor,
    length: int,
    block: int,
    rows: Sequence[int],
    signs: Sequence[int],
    prefix: int,
    tail: str,
    draw: Tensor | None,
) -> Tensor:
    """The transpose of `project`: coefficients (…, L') float back to (…, length) float32 (or float64).

    Equals: (c.unflatten(-1, (-1, rank)) @ hadamard_matrix(block)[rows] / block**0.5 * signs).flatten(-2)[..., :length]
    """
    return c.new_empty((*c.shape[:-1], length), dtype=compute_dtype(c))


@declare_op
def quantize(
    x: Tensor, format: str, granularity: str, group: int, rounding: str, clip: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Codes and scale of an operand: x (rows, K) float → codes (rows, K), scale float32 (`scale_shape`).

    format: ``int2`` … ``int8`` (symmetric, ±(2^(b−1) − 1), int8), ``log2`` … ``log4`` (0 and ±2^k for k < 2^(b−1) − 1,
    int8), ``e4m3``, ``e5m2`` (float8); ``int2.e4m3`` … ``int5.e4m3`` and ``log2.e4m3`` … are the same integers, held as
    float8 for tensor cores that have no 4-bit product. granularity: one scale per ``tensor``, ``row``, ``token`` (column),
    ``block`` (row and `group` columns) or ``tile`` (`group` rows and columns). The largest magnitude of a group maps to the
    largest code; with clip = (c₁, c₂) the range is c₁·√E[x²] − c₂·E|x| of the group instead, where that lies inside
    (0, max |x|).
    v = x · (1 / scale), both divisions IEEE float32 (float64 for float64), so that codes are equal bit for bit.
    rounding: ``nearest`` (ties to even; the log formats away from zero); else ⌊v + u⌋ with the noise u ∈ (0, 1) of
    `rounding_noise`, for integers with v on a grid of 2⁻¹⁵, so that fixed-point arithmetic gives the same codes.
    A group that holds NaN or ±Inf gets a NaN scale, and zeros for codes if these are integers.

    Equals: scale = x.abs().amax(1, keepdim=True) / qmax; codes = (x * (1 / scale)).round().to(torch.int8)
    """
    codes = x.new_empty(x.shape, dtype=code_dtype(format))
    return codes, x.new_empty(scale_shape(x.shape[0], x.shape[1], granularity, group), dtype=torch.float32)


@declare_op
def dequantize(codes: Tensor, scale: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """Codes (rows, K) times their scale, in dtype (float64, or computed in float32 and cast).

    group: K-block of a block scale, side of a tile, else 0.

    Equals: (codes.float() * scale.repeat_interleave(group, 1)).to(dtype)
    """
    return codes.new_empty(codes.shape, dtype=dtype)


@declare_op
def pack4(codes: Tensor) -> Tensor:
    """Two 4-bit codes a byte: int8 (rows, K) in −8…7 → uint8 (rows, ⌈K/2⌉); the even column in the low half.

    Equals: (codes[:, 0::2] & 15 | (codes[:, 1::2] & 15) << 4).view(torch.uint8)
    """
    return codes.new_empty((codes.shape[0], -(-codes.shape[1] // 2)), dtype=torch.uint8)


@declare_op
def unpack4(packed: Tensor, length: int) -> Tensor:
    """The inverse of `pack4`: uint8 (rows, ⌈length/2⌉) → int8 (rows, length).

    Equals: torch.stack([(p << 4) >> 4, p >> 4], -1).flatten(1)[:, :length] with p = packed.view(torch.int8)
    """
    return packed.new_empty((packed.shape[0], length), dtype=torch.int8)


@declare_op
def matmul(
    a: Tensor, a_scale: Tensor, a_group: int, b: Tensor, b_scale: Tensor, b_group: int, dtype: torch.dtype
) -> Tensor:
    """The product of two quantized operands: (M, K) codes, (N, K) codes → (M, N) in dtype.

    Codes of one dtype with scales per tensor or row are multiplied, then scaled: integers exactly, whatever holds them, float8
    numbers as tensor cores add them. int8 codes with scales of blocks or tiles may be multiplied exactly too, each run
    of K along which both scales are constant by itself, then scaled and added up: the reference does so on CPUs, for runs of 64
    and more, through torch._int_mm where that is exact. Every other pair as dequantized floats. float32 accumulation (float64
    where dtype is).
    a_group, b_group: K-block of a block scale, side of a tile, else 0.

    Equals: (dequantize(a, a_scale) @ dequantize(b, b_scale).T).to(dtype)
    """
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


def _quantize_pack4(
    ops: Ops, x: Tensor, format: str, granularity: str, group: int, rounding: str, clip: Sequence[float]
) -> tuple[Tensor, Tensor]:
    codes, scale = ops.quantize(x, format, granularity, group, rounding, clip)
    return ops.pack4(codes), scale


@declare_fused_op(_quantize_pack4)
def quantize_pack4(
    x: Tensor, format: str, granularity: str, group: int, rounding: str, clip: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Codes of up to four bits, two a byte, and their scale: x (rows, K) float → uint8 (rows, ⌈K/2⌉), scale as of `quantize`.

    Equals: codes, scale = quantize(x, format, granularity, group, rounding, clip); (pack4(codes), scale)
    """
    packed = x.new_empty((x.shape[0], -(-x.shape[1] // 2)), dtype=torch.uint8)
    return packed, x.new_empty(scale_shape(x.shape[0], x.shape[1], granularity, group), dtype=torch.float32)


def _transform_quantize(
    ops: Ops,
    x: Tensor,
    block: int,
    rows: Sequence[int],
    signs: Sequence[int],
    prefix: int,
    tail: str,
    draw: Tensor | None,
    format: str,
    granularity: str,
    group: int,
    rounding: str,
    clip: Sequence[float],
) -> tuple[Tensor, Tensor]:
    projected = ops.project(x, block, rows, signs, prefix, tail, draw) if block > 1 else x.to(compute_dtype(x))
    return ops.quantize(projected.flatten(1), format, granularity, group, rounding, clip)


@declare_fused_op(_transform_quantize)
def transform_quantize(
    x: Tensor,
    block: int,
    rows: Sequence[int],
    signs: Sequence[int],
    prefix: int,
    tail: str,
    draw: Tensor | None,
    format: str,
    granularity: str,
    group: int,
    rounding: str,
    clip: Sequence[float],
) -> tuple[Tensor, Tensor]:
    """An operand ready for its product in one go: x (rows, samples, length), any strides → codes (rows, K), scale.

    K = samples · `projected_length`, contiguous. block = 1: no transform.

    Equals: quantize(project(x, block, rows, signs, prefix, tail, draw).flatten(1), format, granularity, group, rounding, clip)
    """
    rank = len(rows) if draw is None else draw.shape[0]
    k = x.shape[1] * projected_length(x.shape[2], block, rank, prefix, tail)
    codes = x.new_empty((x.shape[0], k), dtype=code_dtype(format))
    return codes, x.new_empty(scale_shape(x.shape[0], k, granularity, group), dtype=torch.float32)


def _grad_output_operands(
    ops: Ops,
    g: Tensor,
    i_block: int,
    i_rows: Sequence[int],
    i_signs: Sequence[int],
    i_format: str,
    i_granularity: str,
    i_group: int,
    i_rounding: str,
    i_clip: Sequence[float],
    w_block: int,
    w_rows: Sequence[int],
    w_signs: Sequence[int],
    w_prefix: int,
    w_tail: str,
    w_draw: Tensor | None,
    w_format: str,
    w_granularity: str,
    w_group: int,
    w_rounding: str,
    w_clip: Sequence[float],
    bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows = g.reshape(-1, 1, g.shape[2])
    i_codes, i_scale = ops.transform_quantize(
        rows, i_block, i_rows, i_signs, 0, "pad", None, i_format, i_granularity, i_group, i_rounding, i_clip
    )
    w_codes, w_scale = ops.transform_quantize(
        g.permute(2, 0, 1), w_block, w_rows, w_signs, w_prefix, w_tail, w_draw,
        w_format, w_granularity, w_group, w_rounding, w_clip,
    )  # fmt: skip
    return i_codes, i_scale, w_codes, w_scale, g.sum((0, 1)) if bias else g.new_empty(0)


@declare_fused_op(_grad_output_operands)
def grad_output_operands(
    g: Tensor,
    i_block: int,
    i_rows: Sequence[int],
    i_signs: Sequence[int],
    i_format: str,
    i_granularity: str,
    i_group: int,
    i_rounding: str,
    i_clip: Sequence[float],
    w_block: int,
    w_rows: Sequence[int],
    w_signs: Sequence[int],
    w_prefix: int,
    w_tail: str,
    w_draw: Tensor | None,
    w_format: str,
    w_granularity: str,
    w_group: int,
    w_rounding: str,
    w_clip: Sequence[float],
    bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """One read of a gradient for all that backward needs of it: g (samples, tokens, O), any strides.

    Returns codes and scale of grad_input's operand (samples·tokens, O'), those of grad_weight's (O, K), and with `bias` the
    bias gradient (O,) in g's dtype, else an empty tensor. ``i_…`` describe the first operand, ``w_…`` the second, as in
    `transform_quantize`.

    Equals: (*transform_quantize(g.reshape(-1, 1, O), …i), *transform_quantize(g.permute(2, 0, 1), …w), g.sum((0, 1)))
    """
    samples, tokens, outputs = g.shape
    t, o = samples * tokens, projected_length(outputs, i_block, len(i_rows), 0, "pad")
    rank = len(w_rows) if w_draw is None else w_draw.shape[0]
    k = samples * projected_length(tokens, w_block, rank, w_prefix, w_tail)
    return (
        g.new_empty((t, o), dtype=code_dtype(i_format)),
        g.new_empty(scale_shape(t, o, i_granularity, i_group), dtype=torch.float32),
        g.new_empty((outputs, k), dtype=code_dtype(w_format)),
        g.new_empty(scale_shape(outputs, k, w_granularity, w_group), dtype=torch.float32),
        g.new_empty((outputs if bias else 0,)),
    )

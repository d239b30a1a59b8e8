"""quantize, dequantize, pack4, unpack4: codes and scales, in plain torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hot.backends.ops import FLOAT8, code_dtype, compute_dtype, largest_code, scale_shape
from hot.backends.table import REFERENCE, register_kernel


def rounding_noise(x: Tensor, rounding: str, place: Tensor) -> Tensor:
    """The noise u ∈ (0, 1) that ⌊v + u⌋ rounds with, one for each element of x (rows, K), float32, mean ½.

    ``hashed``: (2·n + 1) / 2¹⁶, where n are the upper 15 bits of h for the first of two neighbours along K and those of h·C₃
    for the second: h = first·C₁ + second·C₂ + place, of their float32 bits, mod 2³², with primes of xxHash32; an odd K ends
    with a zero. `place`, by which the noise of equal numbers differs, is the product of an `index_hash` of the row and one of
    the pair's column (int32; overwritten): what mixes well is done once for many elements, and the rest is multiplications.
    ``pseudo_stochastic``: (2·m + 1) / 2¹² with m the 11 low bits of the mantissa (NITI, M. Wang et al. 2020).
    ``stochastic``: 15 bits of torch's generator of the device, which follows torch.manual_seed.
    """
    if rounding == "stochastic":
        return torch.rand_like(x, dtype=torch.float32).mul_(2**15).floor_().mul_(2.0**-15).add_(2.0**-16)
    bits = x.to(torch.float32).view(torch.int32)
    if rounding == "pseudo_stochastic":
        return (bits & 0x7FF).to(torch.float32).mul_(2.0**-11).add_(2.0**-12)
    h, second = place, bits[:, 1::2]
    h += bits[:, 0::2] * _i32(0x9E3779B1)  # int32 wraps around: arithmetic mod 2^32
    h[:, : second.shape[1]] += second * _i32(0x85EBCA77)
    noise = torch.empty_like(bits)
    noise[:, 0::2] = _shift(h, 17)
    h *= _i32(0xC2B2AE3D)
    noise[:, 1::2] = _shift(h, 17)[:, : second.shape[1]]
    return noise.to(torch.float32).mul_(2.0**-15).add_(2.0**-16)


def _i32(constant: int) -> int:
    """A 32-bit constant as the signed number with the same bits."""
    return constant - 2**32 if constant >= 2**31 else constant


def _shift(h: Tensor, by: int) -> Tensor:
    """Logical shift right of int32."""
    return (h >> by).bitwise_and_((1 << (32 - by)) - 1)


def _group_reduce(x: Tensor, granularity: str, group: int, kind: str) -> Tensor:
    """The largest magnitude (``max``) or the mean of each scale group of x, in the shape of its scale."""
    if x.shape[1] == 0 or x.shape[0] == 0:
        return x.new_zeros(scale_shape(x.shape[0], x.shape[1], granularity, group))
    dims = {"tensor": (0, 1), "row": (1,), "token": (0,)}
    if granularity in ("block", "tile"):
        sides = group if granularity == "tile" else 1, group
        padded = F.pad(x, (0, -x.shape[1] % sides[1], 0, -x.shape[0] % sides[0]))
        padded = padded.unflatten(1, (-1, sides[1])).unflatten(0, (-1, sides[0]))
        if kind == "max":
            return _largest_magnitude(padded, (1, 3), keepdim=False)
        down, across = (_counts(size, side, x) for size, side in zip(x.shape, sides, strict=True))
        return padded.sum((1, 3)) / (down[:, None] * across)
    if kind == "max":
        return _largest_magnitude(x, dims[granularity], keepdim=True)
    return x.mean(dims[granularity], keepdim=True)


def _counts(size: int, side: int, like: Tensor) -> Tensor:
    """How many elements each run of `side` has on an axis of that size; the last may be short."""
    count = like.new_full((-(-size // side),), side)
    count[-1] -= len(count) * side - size
    return count


def _largest_magnitude(x: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """x.abs().amax(dims), NaN included, without writing |x|."""
    return torch.maximum(x.amax(dims, keepdim), x.amin(dims, keepdim).neg())


def _spread(scale: Tensor, shape: tuple[int, int], group: int) -> Tensor:
    """A scale of blocks or tiles with an entry for every element of the shape; the others broadcast as they are."""
    if not group:
        return scale
    rows, k = shape
    wide = scale.repeat_interleave(group, 1)[:, :k]
    return wide if wide.shape[0] == rows else wide.repeat_interleave(group, 0)[:rows]


def _range(x: Tensor, granularity: str, group: int, clip: Sequence[float]) -> Tensor:
    """The magnitude that maps to the largest code: max |x| of the group, or SAWB's clip (Choi et al. 2019) inside it."""
    top = _group_reduce(x, granularity, group, "max")
    if not clip:
        return top
    share = x / _spread(top, (x.shape[0], x.shape[1]), group)  # no square over- or underflows
    mean, square = (_group_reduce(m, granularity, group, "mean") for m in (share.abs(), share.square()))
    clipped = top * (clip[0] * square.sqrt() - clip[1] * mean)
    return torch.where((clipped > 0) & (clipped < top), clipped, top)


@register_kernel("quantize", backend=REFERENCE)
def quantize(
    x: Tensor, format: str, granularity: str, group: int, rounding: str, clip: Sequence[float]
) -> tuple[Tensor, Tensor]:
    x = x.to(compute_dtype(x))
    limit = largest_code(format)
    top = _range(x, granularity, group, clip)
    scale = top / torch.full_like(top, limit)  # CUDA turns a division by a number into a product with its reciprocal
    scale = scale.clamp_min(torch.finfo(torch.float32).tiny)  # 1 / scale is finite, and zeros give zeros
    scale = scale.to(torch.float32)
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    inverse = _spread(scale.reciprocal(), (x.shape[0], x.shape[1]), group).to(x.dtype)
    codes = torch.empty(x.shape, dtype=code_dtype(format), device=x.device)
    for rows, columns in _tiles(x):
        tile = x[rows, columns]
        place = _places(tile, rows.start, columns.start) if rounding == "hashed" else x.new_empty(0)
        own = inverse[rows if inverse.shape[0] > 1 else slice(None), columns if inverse.shape[1] > 1 else slice(None)]
        codes[rows, columns] = _codes(tile, own, format, rounding, limit, place)
    return codes, scale


def _tiles(x: Tensor) -> list[tuple[slice, slice]]:
    """The tiles to work in: on the CPU strips of about 2¹⁸ elements, which stay in its cache from pass to pass."""
    rows, k = x.shape
    if torch.compiler.is_compiling() or x.is_cuda or x.numel() <= 2**19:
        return [(slice(0, rows), slice(0, k))]
    if _columns_outermost(x):
        step = max(2**17 // rows, 1) * 2  # even: two neighbours share a hash
        return [(slice(0, rows), slice(at, min(at + step, k))) for at in range(0, k, step)]
    step = max(2**18 // k, 1)
    return [(slice(at, min(at + step, rows)), slice(0, k)) for at in range(0, rows, step)]


def _columns_outermost(x: Tensor) -> bool:
    return x.stride(0) < x.stride(1)


def _places(tile: Tensor, row: int, column: int) -> Tensor:
    """The place of every pair of neighbours along K, for `rounding_noise`, laid out as the tile is."""
    rows = index_hash(row, tile.shape[0], 0x27D4EB2F, tile.device)
    columns = index_hash(column // 2, -(-tile.shape[1] // 2), 0x165667B1, tile.device)
    return (columns[:, None] * rows).T if _columns_outermost(tile) else rows[:, None] * columns


def index_hash(first: int, count: int, salt: int, device: torch.device) -> Tensor:
    """A hash of each of `count` numbers from `first` on, odd, int32: h = (i ^ salt)·C₁, then (h ^ h >> 15)·C₂ | 1."""
    h = torch.arange(first, first + count, device=device).to(torch.int32) ^ _i32(salt)
    h *= _i32(0x9E3779B1)
    h ^= _shift(h, 15)
    h *= _i32(0x85EBCA77)
    return h.bitwise_or_(1)


def _codes(x: Tensor, inverse: Tensor, format: str, rounding: str, limit: float, place: Tensor) -> Tensor:
    """The codes of x, given the reciprocal of its scale."""
    v = (x * inverse).clamp_(-limit, limit)
    u = None if rounding == "nearest" else rounding_noise(x, rounding, place)
    if format in FLOAT8:
        return _round_float8(v, u, FLOAT8[format])
    v = v.nan_to_num_(nan=0.0)
    if format.startswith("log"):
        return _round_log(v, u).to(code_dtype(format))
    codes = v.round_() if u is None else v.mul_(2**15).round_().mul_(2.0**-15).add_(u).floor_()
    return codes.clamp_(-limit, limit).to(code_dtype(format))


def _round_log(v: Tensor, u: Tensor | None) -> Tensor:
    """v to 0 or ±2^k, k ≥ 0, unbiased where u is (LUQ, Chmiel et al. 2021): between two levels, up with the linear share."""
    magnitude = v.abs()
    level = torch.exp2(magnitude.clamp_min(1).log2().floor())
    level = torch.where(magnitude < 1, 0.0, level)
    step = level.clamp_min(1)  # the distance to the next level, which is also the level itself from 1 on
    share = (magnitude - level) / step
    up = share >= 0.5 if u is None else share + u >= 1
    return (level + step * up).copysign(v)


def _round_float8(v: Tensor, u: Tensor | None, dtype: torch.dtype) -> Tensor:
    """v to a float8 grid: torch's cast rounds to nearest even; noise rounds on the quantum of v's own binade."""
    if u is not None:
        info = torch.finfo(dtype)
        _, exponent = torch.frexp(v)  # |v| = m · 2^exponent with ½ ≤ m < 1
        _, least = math.frexp(info.smallest_normal)
        quantum = torch.exp2(exponent.clamp_min(least).to(v.dtype) - 1) * info.eps
        v = ((v / quantum + u).floor() * quantum).clamp(info.min, info.max)
    return v.to(torch.float32).to(dtype)


@register_kernel("dequantize", backend=REFERENCE)
def dequantize(codes: Tensor, scale: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    return (codes.to(compute) * _spread(scale, (codes.shape[0], codes.shape[1]), group)).to(dtype)


@register_kernel("pack4", backend=REFERENCE)
def pack4(codes: Tensor) -> Tensor:
    nibbles = F.pad(codes, (0, codes.shape[1] % 2)).view(torch.uint8) & 15
    return nibbles[:, 0::2] | nibbles[:, 1::2] << 4


@register_kernel("unpack4", backend=REFERENCE)
def unpack4(packed: Tensor, length: int) -> Tensor:
    signed = packed.view(torch.int8)
    return torch.stack([(signed << 4) >> 4, signed >> 4], -1).flatten(1)[:, :length]

"""Noise, scales and codes as @triton.jit helpers, bit for bit those of the reference (reference/quantization.py).

v is x · (1 / scale), float32 or float64. Noise is 15 bits h of u = (2·h + 1) / 2¹⁶, so that ⌊v + u⌋ is a shift:
with n = round(v·2¹⁵), ⌊n/2¹⁵ + (2·h + 1)/2¹⁶⌋ = (n + h) >> 15. Code bytes are built from the bits of the float: no chip needs
to know float8, and none is asked for undefined conversions of NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

TINY = tl.constexpr(2.0**-126)  # the least scale: 1 / TINY is finite, and a group of zeros gives zeros


@triton.jit
def float_bits(x):
    """The bits of x as float32, int32."""
    return x.to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def pair_noise(first_bits, second_bits, place):
    """15 bits of noise for each of two neighbours along K, int32, from one 32-bit hash.

    first_bits, second_bits: their `float_bits`, the second 0 beyond an odd K. place: `row_hash` · `column_hash`.
    """
    # multiplications and additions alone, for of shifts and logic a GPU has least; the upper bits are well mixed
    h = (
        first_bits.to(tl.uint32, bitcast=True) * 0x9E3779B1
        + second_bits.to(tl.uint32, bitcast=True) * 0x85EBCA77
        + place
    )
    return (h >> 17).to(tl.int32), ((h * 0xC2B2AE3D) >> 17).to(tl.int32)


@triton.jit
def row_hash(row):
    """A hash of the index of a row, of which the low 32 bits count, uint32."""
    return _mixed(row.to(tl.uint32) ^ 0x27D4EB2F)


@triton.jit
def column_hash(pair):
    """A hash of ⌊column/2⌋ of two neighbours along K, of which the low 32 bits count, uint32."""
    return _mixed(pair.to(tl.uint32) ^ 0x165667B1)


@triton.jit
def _mixed(h):
    h *= 0x9E3779B1
    h ^= h >> 15
    return (h * 0x85EBCA77) | 1


@triton.jit
def mantissa_noise(bits):
    """h of pseudo_stochastic for `to_codes`, from `float_bits`: u = (2·m + 1) / 2¹² with m the 11 low bits is h = 16·m + 8."""
    return ((bits & 0x7FF) << 4) + 8


@triton.jit
def largest_bits(x, axis):
    """max |x| along an axis, as the bits of a float32 (float64 for float64): as integers they order like floats, NaN on top."""
    if x.dtype == tl.float64:
        return tl.max(x.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF, axis)
    else:
        return tl.max(float_bits(x) & 0x7FFFFFFF, axis)


@triton.jit
def scale_of(top_bits, LIMIT: tl.constexpr):
    """The scale of a group, float32, and what its elements are multiplied by, from its `largest_bits`.

    A group that holds NaN or ±Inf has the scale NaN and the factor 0: its codes are to be set to 0, for v is NaN at some.
    """
    # scale = max(top / limit, TINY); factor = 1 / scale: both IEEE divisions
    if top_bits.dtype == tl.int64:
        scale = tl.maximum(top_bits.to(tl.float64, bitcast=True) / LIMIT, TINY).to(tl.float32)
        finite = (top_bits < 0x7FF0000000000000) & (float_bits(scale) < 0x7F800000)
    else:
        limit = tl.full(top_bits.shape, LIMIT, tl.float32)
        scale = tl.maximum(tl.div_rn(top_bits.to(tl.float32, bitcast=True), limit), TINY)
        finite = top_bits < 0x7F800000
    scale = tl.where(finite, scale, 1.0)
    factor = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    return tl.where(finite, scale, float("nan")), tl.where(finite, factor, 0.0)


@triton.jit
def to_codes(v, h, LIMIT: tl.constexpr):
    """⌊v + u⌋ clamped to ±LIMIT (at most 127), int32; v on a grid of 2⁻¹⁵. h: noise of `pair_noise`. NaN gives any code."""
    v = tl.minimum(tl.maximum(v, -LIMIT), LIMIT)
    return (_rounded(v * 32768.0) + h) >> 15


@triton.jit
def nearest_codes(v, LIMIT: tl.constexpr):
    """v rounded to nearest, ties to even, clamped to ±LIMIT (at most 127), int32. NaN gives any code."""
    return _rounded(tl.minimum(tl.maximum(v, -LIMIT), LIMIT))


@triton.jit
def _rounded(v):
    """|v| ≤ 2²² to the nearest integer, ties to even, int32: adding 1.5·2²³ leaves it in the low bits."""
    if v.dtype == tl.float64:
        return ((v + 6755399441055744.0).to(tl.int64, bitcast=True) - 0x4338000000000000).to(tl.int32)
    else:
        return (v + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def fraction(h):
    """The noise u = (2·h + 1) / 2¹⁶ of `pair_noise`, float32, for `log_codes` and `float8_values`."""
    return h.to(tl.float32) * (2.0**-15) + 2.0**-16


@triton.jit
def mantissa_fraction(bits):
    """The noise u of pseudo_stochastic, float32, from `float_bits`."""
    return (bits & 0x7FF).to(tl.float32) * (2.0**-11) + 2.0**-12


@triton.jit
def _binade(v):
    """2^⌊log₂ |v|⌋, 0 for what is not normal: v without its mantissa."""
    if v.dtype == tl.float64:
        return (v.to(tl.int64, bitcast=True) & 0x7FF0000000000000).to(tl.float64, bitcast=True)
    else:
        return (v.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _reciprocal(power):
    """1 / 2^k for 2^k in the middle of float32's range, exact."""
    bits = 0x7F000000 - power.to(tl.float32).to(tl.int32, bitcast=True)
    return bits.to(tl.float32, bitcast=True).to(power.dtype)


@triton.jit
def log_codes(v, u, LIMIT: tl.constexpr, NOISY: tl.constexpr):
    """v to 0 or ±2^k, k ≥ 0, int32: to the upper of its two levels where share + u ≥ 1, or share ≥ ½ without noise."""
    # |v| = level + share·step; below 1 the level is 0 and the step 1, from 1 on both are 2^⌊log₂ |v|⌋
    size = tl.minimum(tl.abs(v), LIMIT)
    level = _binade(size)
    level = tl.where(size < 1.0, 0.0, level)
    step = tl.maximum(level, 1.0)
    share = (size - level) * _reciprocal(step)
    up = share + u >= 1.0 if NOISY else share >= 0.5
    code = (level + tl.where(up, step, 0.0)).to(tl.int32)
    return tl.where(v < 0.0, -code, code)


@triton.jit
def float8_values(v, u, LIMIT: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """v rounded by noise on the float8 grid, in v's dtype: ⌊v / quantum + u⌋ · quantum, with the quantum of v's own binade."""
    v = tl.minimum(tl.maximum(v, -LIMIT), LIMIT)
    quantum = tl.maximum(_binade(v), 2.0 ** (1 - BIAS)) * 2.0**-MANTISSA
    v = tl.floor(v * _reciprocal(quantum) + u) * quantum
    return tl.minimum(tl.maximum(v, -LIMIT), LIMIT)


@triton.jit
def float8_bits(v, LIMIT: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """The byte of the float8 nearest to v, ties to even, uint8; |v| clamped to LIMIT, the largest float8. NaN gives any byte.

    (MANTISSA, BIAS): (3, 7) for e4m3, (2, 15) for e5m2.
    """
    SHIFT: tl.constexpr = 23 - MANTISSA
    bits = float_bits(tl.minimum(tl.maximum(v, -LIMIT), LIMIT))
    size = bits & 0x7FFFFFFF
    # normal: round the mantissa where it is cut, a carry runs into the exponent; below: the quantum is fixed, so add 2²³ of it
    normal = ((size + ((1 << (SHIFT - 1)) - 1) + ((size >> SHIFT) & 1)) >> SHIFT) - ((127 - BIAS) << MANTISSA)
    small = float_bits(size.to(tl.float32, bitcast=True) + 2.0 ** (24 - BIAS - MANTISSA)) & 0xFF
    byte = tl.where(size < ((128 - BIAS) << 23), small, normal)
    return (byte | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def float8_floats(byte, MANTISSA: tl.constexpr):
    """The float8 of a byte (uint8) as float32, NaN and ±Inf included. MANTISSA: 3 for e4m3, 2 for e5m2."""
    half = byte.to(tl.int16)
    if MANTISSA == 2:  # e5m2 is the upper byte of a float16
        return (half << 8).to(tl.float16, bitcast=True).to(tl.float32)
    else:  # the exponent of float16 is one bit wider and its bias 15, not 7
        half = ((half & 0x80) << 8) | ((half & 0x7F) << 7)
        value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where((byte & 0x7F) == 0x7F, float("nan"), value)

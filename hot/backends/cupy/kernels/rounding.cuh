// Noise, scales and codes, bit for bit those of the reference (reference/quantization.py).
//
// v is x · (1 / scale), float or double. Noise is 15 bits h of u = (2·h + 1) / 2¹⁶, so that ⌊v + u⌋ is a shift: with
// n = round(v·2¹⁵), ⌊n/2¹⁵ + (2·h + 1)/2¹⁶⌋ = (n + h) >> 15. Code bytes are built from the bits of the float: no chip needs to
// know float8. Compiled without contraction and without flushing: every operation is rounded by itself, denormals are kept.
#pragma once

enum Rounding { NEAREST, HASHED, PSEUDO_STOCHASTIC, STOCHASTIC };  // as policies call them, but for the case

constexpr float TINY = 0x1p-126f;  // the least scale: 1 / TINY is finite, and a group of zeros gives zeros

// The bits of x as a float.
__device__ inline unsigned float_bits(float x) { return __float_as_uint(x); }
__device__ inline unsigned float_bits(double x) { return __float_as_uint(__double2float_rn(x)); }

// The bits of |x|: as integers they order like floats, NaN on top, so that a maximum of them loses no NaN.
__device__ inline unsigned magnitude_bits(float x) { return __float_as_uint(x) & 0x7FFFFFFFu; }
__device__ inline unsigned long long magnitude_bits(double x) {
    return static_cast<unsigned long long>(__double_as_longlong(x)) & 0x7FFFFFFFFFFFFFFFull;
}

// 15 bits of noise for each of two neighbours along K, from one 32-bit hash of their `float_bits`, the second 0 beyond an odd
// K, and of their place, row_hash · column_hash: multiplications and additions alone, for of shifts and logic a GPU has least.
__device__ inline uint2 pair_noise(unsigned first_bits, unsigned second_bits, unsigned place) {
    const unsigned h = first_bits * 0x9E3779B1u + (second_bits * 0x85EBCA77u + place);
    return make_uint2(h >> 17, h * 0xC2B2AE3Du >> 17);
}

__device__ inline unsigned mixed(unsigned h) {
    h *= 0x9E3779B1u;
    return (h ^ h >> 15) * 0x85EBCA77u | 1u;
}

// Hashes of the index of a row and of ⌊column/2⌋ of two neighbours along K, of which the low 32 bits count.
__device__ inline unsigned row_hash(long long row) { return mixed(static_cast<unsigned>(row) ^ 0x27D4EB2Fu); }
__device__ inline unsigned column_hash(long long pair) { return mixed(static_cast<unsigned>(pair) ^ 0x165667B1u); }

// h of pseudo_stochastic for `to_codes`, from `float_bits`: u = (2·m + 1) / 2¹² with m the 11 low bits is h = 16·m + 8.
__device__ inline unsigned mantissa_noise(unsigned bits) { return ((bits & 0x7FFu) << 4) + 8u; }

// h of stochastic from a number of torch's generator in [0, 1).
__device__ inline unsigned drawn_noise(float random) { return static_cast<unsigned>(random * 32768.0f); }

// The noise u = (2·h + 1) / 2¹⁶ as a float, for `log_codes` and `float8_values`. It is exact.
__device__ inline float fraction(unsigned h) { return static_cast<float>(h) * 0x1p-15f + 0x1p-16f; }

// The noise u of pseudo_stochastic as a float, from `float_bits`.
__device__ inline float fraction_of_mantissa(unsigned bits) {
    return static_cast<float>(bits & 0x7FFu) * 0x1p-11f + 0x1p-12f;
}

// The scale of a group and what its elements are multiplied by, from the largest `magnitude_bits` in it: scale =
// max(top / limit, TINY), factor = 1 / scale, both IEEE divisions. A group that holds NaN or ±Inf has the scale NaN and the
// factor 0: its codes are to be set to 0, for v is NaN at some.
__device__ inline void scale_of(unsigned top_bits, float limit, float& scale, float& factor) {
    const bool finite = top_bits < 0x7F800000u;
    const float least = fmaxf(__fdiv_rn(__uint_as_float(top_bits), limit), TINY);
    scale = finite ? least : __uint_as_float(0x7FC00000u);
    factor = finite ? __fdiv_rn(1.0f, least) : 0.0f;
}
__device__ inline void scale_of(unsigned long long top_bits, double limit, float& scale, float& factor) {
    const double top = __longlong_as_double(static_cast<long long>(top_bits));
    const float least = __double2float_rn(fmax(__ddiv_rn(top, limit), static_cast<double>(TINY)));
    const bool finite = top_bits < 0x7FF0000000000000ull && __float_as_uint(least) < 0x7F800000u;
    scale = finite ? least : __uint_as_float(0x7FC00000u);
    factor = finite ? __fdiv_rn(1.0f, least) : 0.0f;
}

// v within ±limit. A NaN gives one of the two.
__device__ inline float clamped(float v, float limit) { return fminf(fmaxf(v, -limit), limit); }
__device__ inline double clamped(double v, double limit) { return fmin(fmax(v, -limit), limit); }

// |v| ≤ 2²² to the nearest integer, ties to even: adding 1.5·2²³ leaves it in the low bits (1.5·2⁵² in a double).
__device__ inline int rounded(float v) { return __float_as_int(v + 12582912.0f) - 0x4B400000; }
__device__ inline int rounded(double v) {
    return static_cast<int>(__double_as_longlong(v + 6755399441055744.0) - 0x4338000000000000ll);
}

// v to the nearest integer, ties to even, within ±limit (at most 127). NaN gives any code.
template <class V>
__device__ inline int nearest_codes(V v, V limit) {
    return rounded(clamped(v, limit));
}

// ⌊v + u⌋ within ±limit (at most 127), v on a grid of 2⁻¹⁵, with the noise h of u. NaN gives any code.
template <class V>
__device__ inline int to_codes(V v, unsigned h, V limit) {
    return (rounded(clamped(v, limit) * V(32768)) + static_cast<int>(h)) >> 15;
}

// 2^⌊log₂ |v|⌋, 0 for what is not normal: v without sign and mantissa.
__device__ inline float binade(float v) { return __uint_as_float(__float_as_uint(v) & 0x7F800000u); }
__device__ inline double binade(double v) {
    return __longlong_as_double(__double_as_longlong(v) & 0x7FF0000000000000ll);
}

// 1 / 2^k for 2^k in the middle of a float's range, exact.
__device__ inline float reciprocal(float power) { return __uint_as_float(0x7F000000u - __float_as_uint(power)); }
__device__ inline double reciprocal(double power) { return reciprocal(static_cast<float>(power)); }

// v to 0 or ±2^k, k ≥ 0, as an integer: to the upper of its two levels where share + u ≥ 1, or share ≥ ½ without noise.
// |v| = level + share·step; below 1 the level is 0 and the step 1, from 1 on both are 2^⌊log₂ |v|⌋.
template <bool NOISY, class V>
__device__ inline int log_codes(V v, float u, V limit) {
    const V size = clamped(v < V(0) ? -v : v, limit);
    const V level = size < V(1) ? V(0) : binade(size);
    const V step = size < V(1) ? V(1) : level;
    const V share = (size - level) * reciprocal(step);
    const bool up = NOISY ? share + V(u) >= V(1) : share >= V(0.5);
    const int code = static_cast<int>(up ? level + step : level);
    return v < V(0) ? -code : code;
}

// Float8 formats as (MANTISSA, BIAS): (3, 7) is e4m3, (2, 15) is e5m2. A power of two as a float, where it is normal:
__device__ constexpr float power_of_two(int exponent) {
    float power = 1.0f;
    for (; exponent > 0; --exponent) power *= 2.0f;
    for (; exponent < 0; ++exponent) power *= 0.5f;
    return power;
}

// v rounded by noise on the float8 grid: ⌊v / quantum + u⌋ · quantum within ±limit, with the quantum of v's own binade.
template <int MANTISSA, int BIAS, class V>
__device__ inline V float8_values(V v, float u, V limit) {
    constexpr V LEAST = power_of_two(1 - BIAS), EPSILON = power_of_two(-MANTISSA);
    v = clamped(v, limit);
    const V own = binade(v);
    const V quantum = (own < LEAST ? LEAST : own) * EPSILON;
    return clamped(floor(v * reciprocal(quantum) + V(u)) * quantum, limit);
}

// The byte of the float8 nearest to v, ties to even, |v| within limit, the largest float8. NaN gives any byte.
template <int MANTISSA, int BIAS, class V>
__device__ inline unsigned float8_bits(V v, V limit) {
    constexpr int SHIFT = 23 - MANTISSA;
    const unsigned bits = float_bits(clamped(v, limit)), size = bits & 0x7FFFFFFFu;
    // normal: round the mantissa where it is cut, a carry runs into the exponent; below: the quantum is fixed, so add 2²³ of it
    const unsigned normal = ((size + ((1u << (SHIFT - 1)) - 1u) + ((size >> SHIFT) & 1u)) >> SHIFT) - ((127u - BIAS) << MANTISSA);
    const unsigned small = float_bits(__uint_as_float(size) + power_of_two(24 - BIAS - MANTISSA)) & 0xFFu;
    return (size < ((128u - BIAS) << 23) ? small : normal) | ((bits >> 24) & 0x80u);
}

// The float8 of a byte as a float, NaN and ±Inf included.
template <int MANTISSA, int BIAS>
__device__ inline float float8_floats(unsigned byte) {
    // the bits where a float has them, times the difference of the biases, which also makes small ones of subnormal ones
    const unsigned size = byte & 0x7Fu;
    const float value = __uint_as_float(size << (23 - MANTISSA)) * power_of_two(127 - BIAS);
    const bool nan = MANTISSA == 3 ? size == 0x7Fu : size > 0x7Cu, infinite = MANTISSA == 2 && size == 0x7Cu;
    const unsigned bits = nan ? 0x7FC00000u : infinite ? 0x7F800000u : __float_as_uint(value);
    return __uint_as_float(bits | ((byte & 0x80u) << 24));
}

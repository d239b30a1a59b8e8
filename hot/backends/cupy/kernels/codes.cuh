// Codes of a format: `encode` makes the byte of one element, for every rounding.
#pragma once

#include "rounding.cuh"

enum Kind { INTEGER, LOGARITHMIC, FLOAT8 };

__device__ constexpr int bias_of(int mantissa) { return mantissa == 3 ? 7 : 15; }  // of e4m3 and e5m2

// The code of v = x · factor. bits: of x as a float; h: its noise, for HASHED and STOCHASTIC. MANTISSA: bits of the float8 that
// holds the codes, 0 for int8.
template <Kind KIND, int MANTISSA, Rounding ROUNDING, class V>
__device__ inline unsigned encode(V v, unsigned bits, unsigned h, V limit) {
    constexpr bool NOISY = ROUNDING != NEAREST;
    constexpr int M = MANTISSA ? MANTISSA : 3, BIAS = bias_of(M);
    const float u = ROUNDING == PSEUDO_STOCHASTIC ? fraction_of_mantissa(bits) : fraction(h);
    if (KIND == FLOAT8) return float8_bits<M, BIAS>(NOISY ? float8_values<M, BIAS>(v, u, limit) : v, limit);
    int code;
    if (KIND == LOGARITHMIC) {
        code = log_codes<NOISY>(v, u, limit);
    } else if (NOISY) {
        code = to_codes(v, ROUNDING == PSEUDO_STOCHASTIC ? mantissa_noise(bits) : h, limit);
    } else {
        code = nearest_codes(v, limit);
    }
    return MANTISSA ? float8_bits<M, BIAS>(static_cast<float>(code), 448.0f) : static_cast<unsigned>(code) & 0xFFu;
}

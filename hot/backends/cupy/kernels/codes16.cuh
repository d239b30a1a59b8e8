// Integer codes of two neighbours along K, in as few instructions as a bound by their number asks for.
#pragma once

#include "rounding.cuh"

enum Holder { INT8, E4M3 };

// The codes of y₀ and y₁ in the two low bytes. factor: 1 / scale; row, column: hashes of indices.
//
// v = y · factor. Adding MAGIC rounds v·2¹⁵ to an integer in the low bits of a float, n; the noise is added there. Adding BIG and
// rounding down leaves ⌊(n + noise) / 2¹⁵⌋ in the low bits, which is the code: BIG is such that its own low byte is 0 then. |v| is
// at most limit (1 + 2⁻²³), which rounds to limit·2¹⁵, so nothing is clamped; for what is not finite any codes come out.
template <int ROUNDING, int HOLDER>
__device__ inline unsigned two_codes(float y0, float y1, float factor, unsigned row, unsigned column) {
    constexpr float MAGIC = 12582912.0f;                   // 1.5·2²³, with an integer up to 2²² in the low bits
    constexpr float BIG = (MAGIC + 128.0f) * 32768.0f;     // likewise, in units of 2¹⁵
    constexpr float ABOVE = MAGIC + 128.0f + MAGIC / 32768.0f;  // (BIG + MAGIC) / 2¹⁵, an integer whose low byte is 0
    float a, b;
    if (ROUNDING == NEAREST) {
        a = y0 * factor + MAGIC, b = y1 * factor + MAGIC;
    } else {
        const unsigned first = __float_as_uint(y0), second = __float_as_uint(y1);
        const uint2 noise = ROUNDING == HASHED ? pair_noise(first, second, row * column)
                                               : make_uint2(mantissa_noise(first), mantissa_noise(second));
        a = __uint_as_float(__float_as_uint(fmaf(y0 * factor, 32768.0f, MAGIC)) + noise.x);
        b = __uint_as_float(__float_as_uint(fmaf(y1 * factor, 32768.0f, MAGIC)) + noise.y);
        a = __fadd_rd(a, BIG), b = __fadd_rd(b, BIG);
    }
    if (HOLDER == INT8) return __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x0040);
    if (ROUNDING == NEAREST) a -= MAGIC, b -= MAGIC;
    else a = fmaf(a, 0x1p-15f, -ABOVE), b = fmaf(b, 0x1p-15f, -ABOVE);
    unsigned short codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(b), "f"(a));
    return codes;
}

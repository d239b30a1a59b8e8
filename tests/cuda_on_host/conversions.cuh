// kernels/conversions.cuh by bits, where there are no instructions of a GPU.
#pragma once

inline float half_to_float(unsigned short half) {
    const unsigned size = half & 0x7FFFu, sign = (half & 0x8000u) << 16;
    const float value = __uint_as_float(size << 13) * 0x1p112f;  // the difference of the biases
    return __uint_as_float((size >= 0x7C00u ? 0x7F800000u | size << 13 : __float_as_uint(value)) | sign);
}

// Bits without the lowest ones, to nearest, ties to even.
inline unsigned cut(unsigned bits, int lowest) {
    return (bits + ((1u << (lowest - 1)) - 1) + (bits >> lowest & 1u)) >> lowest;
}

inline unsigned short float_to_half(float x) {
    if (x != x) return 0x7FFF;
    const unsigned bits = __float_as_uint(x), size = bits & 0x7FFFFFFFu;
    // below the least normal number the quantum is fixed, so add 2²³ of it
    const bool small = size < 0x38800000u;
    const unsigned half = small ? __float_as_uint(__uint_as_float(size) + 0.5f) - 0x3F000000u : cut(size, 13) - (112u << 10);
    return (half > 0x7C00u ? 0x7C00u : half) | (bits >> 16 & 0x8000u);
}

inline unsigned short float_to_bf16(float x) { return x != x ? 0x7FFF : cut(__float_as_uint(x), 16); }

// 16-bit floats from and to float, by single instructions: to nearest, ties to even.
#pragma once

__device__ inline float half_to_float(unsigned short half) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(half));
    return y;
}

__device__ inline unsigned short float_to_half(float x) {
    unsigned short half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
    return half;
}

__device__ inline unsigned short float_to_bf16(float x) {
    unsigned short bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

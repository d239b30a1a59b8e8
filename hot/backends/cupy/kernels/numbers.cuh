// The numbers that tensors hold, without CUDA's headers: NVRTC alone has none of them.
#pragma once

#include "conversions.cuh"

struct bf16 {
    unsigned short bits;
};
struct fp16 {
    unsigned short bits;
};

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(double x) { return __double2float_rn(x); }
__device__ inline float to_float(bf16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }
__device__ inline float to_float(fp16 x) { return half_to_float(x.bits); }

// What transforms and scales are computed in: double for double, else float.
template <class T>
struct Computed {
    using type = float;
};
template <>
struct Computed<double> {
    using type = double;
};
template <class T>
using computed = typename Computed<T>::type;

// x in what is computed with, exactly.
template <class T>
__device__ inline computed<T> widen(T x) {
    return to_float(x);
}
template <>
__device__ inline double widen<double>(double x) {
    return x;
}

// A float (or a double) as a T, to nearest, ties to even.
template <class T, class V>
__device__ inline T narrow(V x) {
    return static_cast<T>(x);
}
template <>
__device__ inline bf16 narrow<bf16, float>(float x) {
    return {float_to_bf16(x)};
}
template <>
__device__ inline fp16 narrow<fp16, float>(float x) {
    return {float_to_half(x)};
}

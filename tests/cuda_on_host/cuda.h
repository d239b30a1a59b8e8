// CUDA C++ on the CPU, as much as the kernels use of it: a block's threads are coroutines of threads.cpp that run in turns, each
// until it waits for the others.
#pragma once

#define __device__
#define __global__
#define __shared__
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)

struct uint2 {
    unsigned x, y;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
struct dim3 {
    unsigned x, y, z;
};
extern dim3 threadIdx, blockIdx, blockDim, gridDim;
extern unsigned char room[];  // shared memory

template <class To, class From>
inline To bits_as(From x) {
    static_assert(sizeof(To) == sizeof(From), "");
    To y;
    __builtin_memcpy(&y, &x, sizeof(y));
    return y;
}
inline unsigned __float_as_uint(float x) { return bits_as<unsigned>(x); }
inline int __float_as_int(float x) { return bits_as<int>(x); }
inline float __uint_as_float(unsigned x) { return bits_as<float>(x); }
inline long long __double_as_longlong(double x) { return bits_as<long long>(x); }
inline double __longlong_as_double(long long x) { return bits_as<double>(x); }
inline float __double2float_rn(double x) { return static_cast<float>(x); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
inline float floor(float x) { return __builtin_floorf(x); }
inline double floor(double x) { return __builtin_floor(x); }
inline float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
inline float fminf(float a, float b) { return __builtin_fminf(a, b); }
inline double fmax(double a, double b) { return __builtin_fmax(a, b); }
inline double fmin(double a, double b) { return __builtin_fmin(a, b); }

void __syncthreads();
void __syncwarp();
void exchange(void* value, unsigned long size, int apart);  // with the lane whose number differs by that bit

template <class T>
inline T __shfl_xor_sync(unsigned, T value, int apart) {
    exchange(&value, sizeof(value), apart);
    return value;
}

template <class T>
inline T atomicMax(T* at, T value) {
    const T old = *at;
    if (value > old) *at = value;
    return old;
}

// Runs every thread of every block: what went wrong, or "".
const char* run(void (*body)(), unsigned grid, unsigned block);

template <class P>
const char* launch(void (*kernel)(P), const void* bytes, unsigned grid, unsigned block) {
    static P parameters;
    static void (*launched)(P);
    __builtin_memcpy(&parameters, bytes, sizeof(P));
    launched = kernel;
    return run([] { launched(parameters); }, grid, block);
}

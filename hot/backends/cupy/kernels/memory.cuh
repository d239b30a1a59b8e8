// Neighbours in memory, 16 bytes at once where that may be.
#pragma once

#include "numbers.cuh"

template <class T, int V>
struct alignas(V * sizeof(T)) Pack {
    T at[V];
};

// So many numbers that are computed with fill 16 bytes: neighbours that one thread holds.
template <class T>
constexpr int CHUNK = 16 / sizeof(computed<T>);

// y = V elements of x, `step` apart, zeros from `count` on. dense: they are neighbours, and the address fits one access.
template <int V, class T>
__device__ inline void load_chunk(T* y, const T* x, long long step, long long count, bool dense) {
    if (dense && count >= V) {
        const Pack<T, V> pack = *reinterpret_cast<const Pack<T, V>*>(x);
#pragma unroll
        for (int v = 0; v < V; ++v) y[v] = pack.at[v];
    } else {
#pragma unroll
        for (int v = 0; v < V; ++v) y[v] = v < count ? x[v * step] : T();
    }
}

// The same, in what is computed with.
template <int V, class T>
__device__ inline void load_widened(computed<T>* y, const T* x, long long step, long long count, bool dense) {
    T raw[V];
    load_chunk<V>(raw, x, step, count, dense);
#pragma unroll
    for (int v = 0; v < V; ++v) y[v] = widen(raw[v]);
}

// V neighbours to memory, the first `count` of them. dense: the address fits one access.
template <int V, class T>
__device__ inline void store_chunk(T* out, const T* y, long long count, bool dense) {
    if (dense && count >= V) {
        Pack<T, V> pack;
#pragma unroll
        for (int v = 0; v < V; ++v) pack.at[v] = y[v];
        *reinterpret_cast<Pack<T, V>*>(out) = pack;
    } else {
#pragma unroll
        for (int v = 0; v < V; ++v) {
            if (v < count) out[v] = y[v];
        }
    }
}

__device__ inline long long ceil_div(long long a, long long b) { return (a + b - 1) / b; }
__device__ inline long long least(long long a, long long b) { return a < b ? a : b; }

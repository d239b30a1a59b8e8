// out = codes · scale, in double where out is, else in float; a thread makes 16 bytes of out.

#include "codes.cuh"
#include "memory.cuh"

struct Dequantize {
    const unsigned char* codes;  // (rows, K)
    const float* scale;          // entry (row / down, column / wide), or (row, 0) where wide is 0
    void* out;                   // (rows, K), dense
    long long rows, k, codes_row, codes_column;
    long long down, wide, scale_row, scale_column;
    int dense_codes, dense_out;  // chunks may be moved at once
    int single;                  // a chunk has one scale
};

// MANTISSA: bits of the float8 that holds the codes, 0 for int8.
template <class T, int MANTISSA>
__global__ void __launch_bounds__(256) dequantize_kernel(Dequantize p) {
    using C = computed<T>;
    constexpr int V = 16 / sizeof(T), M = MANTISSA ? MANTISSA : 3;
    const long long chunks = ceil_div(p.k, V), units = p.rows * chunks, step = gridDim.x * 256ll;
    for (long long unit = blockIdx.x * 256ll + threadIdx.x; unit < units; unit += step) {
        const long long row = unit / chunks, column = unit % chunks * V, count = p.k - column;
        unsigned char byte[V];
        load_chunk<V>(byte, p.codes + row * p.codes_row + column * p.codes_column, p.codes_column, count, p.dense_codes);
        const float* scale = p.scale + (p.down > 1 ? row / p.down : row) * p.scale_row;
        float own = scale[p.wide ? column / p.wide * p.scale_column : 0];
        T y[V];
#pragma unroll
        for (int v = 0; v < V; ++v) {
            if (v > 0 && v < count && !p.single) own = scale[(column + v) / p.wide * p.scale_column];
            const float code = MANTISSA ? float8_floats<M, bias_of(M)>(byte[v]) : static_cast<signed char>(byte[v]);
            y[v] = narrow<T>(static_cast<C>(code) * static_cast<C>(own));
        }
        store_chunk<V>(static_cast<T*>(p.out) + row * p.k + column, y, count, p.dense_out);
    }
}

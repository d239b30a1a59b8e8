// out = sums · row scale · column scale, of the exact sums of a product of integers: a thread makes 16 bytes of out.

#include "memory.cuh"

struct Rescale {
    const int* sums;  // (rows, columns), dense rows `pitch` apart
    void* out;        // (rows, columns), dense
    const float* row_scale;
    const float* column_scale;
    long long rows, columns, pitch;
    int row_step, column_step;  // from entry to entry of a scale: 0 where there is one for all
    int dense;                  // chunks may be moved at once
};

template <class T>
__global__ void __launch_bounds__(256) rescale_kernel(Rescale p) {
    constexpr int V = 16 / sizeof(T);
    const long long chunks = ceil_div(p.columns, V), units = p.rows * chunks;
    for (long long unit = blockIdx.x * 256ll + threadIdx.x; unit < units; unit += gridDim.x * 256ll) {
        const long long row = unit / chunks, column = unit % chunks * V, count = p.columns - column;
        const float own = p.row_scale[row * p.row_step];
        int sum[V];
        load_chunk<V>(sum, p.sums + row * p.pitch + column, 1, count, p.dense);
        T y[V];
#pragma unroll
        for (int v = 0; v < V; ++v) {
            const float other = v < count ? p.column_scale[(column + v) * p.column_step] : 0.0f;
            y[v] = narrow<T>(static_cast<float>(sum[v]) * own * other);
        }
        store_chunk<V>(static_cast<T*>(p.out) + row * p.columns + column, y, count, p.dense);
    }
}

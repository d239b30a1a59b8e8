// Operands of products, the first reading: largest magnitudes and scales, and sums. See operands.cuh.
#pragma once

#include "operands.cuh"

// Whether this program is the last of `count` that add to a counter; then it sees all that the others wrote before.
__device__ bool is_last(unsigned* counter, unsigned count) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(counter, 1u) == count - 1;
        __threadfence();
    }
    __syncthreads();
    return last;
}

// The scale of a row from its largest magnitude, in whose place 1 / scale is put.
__device__ __noinline__ void settle(unsigned* top, float* scale, float limit) {
    float factor;
    scale_of(__ldcg(top), limit, *scale, factor);
    *top = __float_as_uint(factor);
}

// Largest |y| of rows and columns, and, with SUMS, sums of columns, of the strips that a warp looks at. FOUND: where they go.
template <class T, int ALONG, int ACROSS, int R, bool SUMS, int FOUND>
struct Largest {
    uint4 along;
    uint2 across[R / 8];
    float top[BLOCKS][2] = {}, sum[BLOCKS][2] = {}, whole = 0.0f;

    __device__ Largest(const Operands& p, const Lane& lane) {
        if (ALONG != NONE) along = along_basis<T>(p.along_basis, lane);
        if (ACROSS != NONE) across_basis<T, R>(across, p.across_basis, lane);
    }

    __device__ void look(const Operands& p, const Strip& x, const Rows& rows, int panel, const Lane& lane) {
        const unsigned corner = x.corner(lane);
        float row[4] = {};
#pragma unroll
        for (int j = 0; j < BLOCKS; j++) {
            if (ALONG != NONE) larger_of_rows<T>(row, along, block(corner, j));
            float d[4];
            uint4 t;
            if (ACROSS != NONE || SUMS) t = transposed(corner, j);
            if (ACROSS != NONE) {
#pragma unroll
                for (int h = 0; h < R / 8; h++) {
                    multiply<T>(d, t, across[h]);
                    top[j][0] = larger(larger(top[j][0], d[0]), d[1]), top[j][1] = larger(larger(top[j][1], d[2]), d[3]);
                }
            }
            if (SUMS) {  // every q gets the same
                multiply<T>(d, t, make_uint2(ONES<T>, ONES<T>));
                sum[j][0] += d[0], sum[j][1] += d[2];
            }
        }
        if (ALONG != NONE) {
            const float highest = of_all_lanes(row, lane);
            if (ALONG == ROW && lane.g < 4 && row_of(lane) < rows.left) {
                const int row = rows.first + row_of(lane);
                if (FOUND == BEFORE) atomicMax(p.along_top + row, __float_as_uint(highest));
                else p.along_top[(long long)row * p.panels + panel] = __float_as_uint(highest);
            }
            if (ALONG == TENSOR) whole = larger(whole, highest);
        }
    }

    // What all warps of the program found, to memory.
    __device__ void publish(const Operands& p, int panel, int group, float (*wide)[COLUMNS], const Lane& lane) {
        const int thread = threadIdx.x % COLUMNS, column = panel * COLUMNS + thread;
        const bool writes = threadIdx.x < COLUMNS && column < p.columns;
        if (ALONG == TENSOR) {
            for (int by = 1; by < 32; by *= 2) whole = larger(whole, __shfl_xor_sync(~0u, whole, by));
            if (lane.own == 0) atomicMax(p.along_top, __float_as_uint(whole));
        }
        if (ACROSS != NONE) {
#pragma unroll
            for (int j = 0; j < BLOCKS; j++) {
                for (int by = 1; by < 4; by *= 2) {
                    top[j][0] = larger(top[j][0], __shfl_xor_sync(~0u, top[j][0], by));
                    top[j][1] = larger(top[j][1], __shfl_xor_sync(~0u, top[j][1], by));
                }
                if (lane.q < 2) wide[lane.warp][SIDE * j + lane.g + 8 * lane.q] = lane.q ? top[j][1] : top[j][0];
            }
            __syncthreads();
            float all = 0.0f;
            for (int w = 0; w < WARPS; w++) all = larger(all, wide[w][thread]);
            if (writes && FOUND == BEFORE) atomicMax(p.across_top + (ACROSS == TENSOR ? 0 : column), __float_as_uint(all));
            if (writes && FOUND == HERE) p.across_top[(long long)group * p.columns + column] = __float_as_uint(all);
            __syncthreads();
        }
        if (SUMS) {
#pragma unroll
            for (int j = 0; j < BLOCKS; j++)
                if (lane.q < 2) wide[lane.warp][SIDE * j + lane.g + 8 * lane.q] = lane.q ? sum[j][1] : sum[j][0];
            __syncthreads();
            float all = 0.0f;
            for (int w = 0; w < WARPS; w++) all += wide[w][thread];
            if (writes) p.sums[(long long)group * p.columns + column] = all;
        }
    }
};

// The bias of a panel from `count` sums of each column, in their order: half of them, in a thread, and both halves, to memory.
__device__ inline float half_of_bias(const Operands& p, int panel, int count) {
    const int column = panel * COLUMNS + threadIdx.x % COLUMNS;
    float half = 0.0f;
#pragma unroll 8
    for (int i = threadIdx.x / COLUMNS; i < count && column < p.columns; i += THREADS / COLUMNS)
        half += __ldcg(p.sums + (long long)i * p.columns + column);
    return half;
}
template <class T>
__device__ void put_bias(const Operands& p, int panel, float half, float (*wide)[COLUMNS]) {
    const int thread = threadIdx.x % COLUMNS, column = panel * COLUMNS + thread, part = threadIdx.x / COLUMNS;
    __syncthreads();
    wide[part][thread] = half;
    __syncthreads();
    if (part == 0 && column < p.columns) static_cast<T*>(p.bias)[column] = narrow<T>(half + wide[1][thread]);
}

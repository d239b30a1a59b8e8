// project: out = gain · (H (signs · x))[rows] of every block of N columns;  expand: out = gain · signs · H (x at rows, else 0)
//
// A warp holds S columns of one row, whole blocks: lane l has the V neighbours from l·V on of every 32·V. H_2n = [[H_n, H_n],
// [H_n, −H_n]], so each of the low bits of a column takes a pair (a, b) to (a + b, a − b): those of V and of the whole chunks
// lie in one lane's registers, the five between them are the lane's own bits. The side in natural order is moved 16 bytes a
// lane; the side of chosen coefficients goes through shared memory, and so does what is read across (INNERMOST: neighbouring
// rows are nearer in memory than neighbouring columns, so lanes read along rows).

#include "memory.cuh"

struct Transform {
    const void* x;
    void* out;
    const int* position;       // of each natural coefficient among the chosen, −1: not chosen
    const signed char* signs;  // of a block's columns; null: none
    long long number;          // rows: row r at (r % fast)·stride + (r / fast)·far, columns `step` apart; of out, dense
    long long fast, stride, far, step, out_stride, out_far;
    long long first, last;  // columns in natural order that have blocks; coefficients, too, stand from `first` on
    long long blocks;
    double gain;
    int rank;                       // coefficients of a block on the other side: N where nothing is MAPPED
    int dense_input, dense_output;  // chunks may be moved at once
};

// Columns of a warp's piece of a row, rows of a program, warps of it, and the pitch of rows in shared memory.
template <int N>
constexpr int SPAN = N > 256 ? N : 256;
template <int N, bool INNERMOST>
constexpr int ROWS = SPAN<N> > 1024 || INNERMOST ? 8192 / SPAN<N> : 8;
template <int N, bool INNERMOST>
constexpr int WARPS = ROWS<N, INNERMOST> < 8 ? ROWS<N, INNERMOST> : 8;
template <int N>
constexpr int PITCH = SPAN<N> + 4;

__device__ inline float plus(float a, float sign, float b) { return __fmaf_rn(sign, b, a); }
__device__ inline double plus(double a, double sign, double b) { return __fma_rn(sign, b, a); }

// H y, without its gain.
template <int N, int V, int E, class C>
__device__ inline void butterflies(C (&y)[E], int lane) {
#pragma unroll
    for (int bit = 1; bit < N; bit *= 2) {
        if (bit >= V && bit < 32 * V) {  // a lane's bit
            const C sign = lane & (bit / V) ? C(-1) : C(1);
#pragma unroll
            for (int i = 0; i < E; ++i) y[i] = plus(__shfl_xor_sync(0xFFFFFFFFu, y[i], bit / V), sign, y[i]);
        } else {
            const int apart = bit < V ? bit : bit / 32;
#pragma unroll
            for (int i = 0; i < E; ++i) {
                if (i & apart) continue;
                const C a = y[i], b = y[i | apart];
                y[i] = a + b;
                y[i | apart] = a - b;
            }
        }
    }
}

__device__ inline long long row_offset(long long row, long long fast, long long stride, long long far) {
    return row < fast ? row * stride : row % fast * stride + row / fast * far;
}

// The columns of one side of piece `at` of a row: where they begin after `first`, and how many there are.
template <int N, bool NATURAL>
__device__ inline void side(const Transform& p, long long at, long long& begin, int& count) {
    constexpr int BLOCKS = SPAN<N> / N;
    if (NATURAL) {
        begin = at * SPAN<N>;
        count = static_cast<int>(least(SPAN<N>, p.last - p.first - begin));
    } else {
        begin = at * BLOCKS * p.rank;
        count = static_cast<int>(least(BLOCKS, p.blocks - at * BLOCKS)) * p.rank;
    }
}

// Where the coefficient at a column of a piece stands among the chosen ones of the piece, negative if it is none of them.
template <int N>
__device__ inline int place(const Transform& p, int column) {
    const int chosen = p.position[column % N];
    return chosen < 0 ? chosen : column / N * p.rank + chosen;
}

// Piece `at` of a row, by one warp. stage: room for it, which holds what is read where that is done by the whole program.
template <class T, int N, bool EXPAND, bool MAPPED, bool INNERMOST>
__device__ inline void transform(const Transform& p, long long row, long long at, computed<T>* stage, int lane) {
    using C = computed<T>;
    constexpr int V = CHUNK<T>, E = SPAN<N> / 32;
    long long from, to;
    int count, out_count;
    side<N, !EXPAND>(p, at, from, count);
    side<N, EXPAND>(p, at, to, out_count);
    const T* x = static_cast<const T*>(p.x) + row_offset(row, p.fast, p.stride, p.far) + (p.first + from) * p.step;
    C* out = static_cast<C*>(p.out) + row_offset(row, p.fast, p.out_stride, p.out_far) + p.first + to;

    if (EXPAND && MAPPED && !INNERMOST) {
        for (int k = lane; k < count; k += 32) stage[k] = widen(x[k * p.step]);
        __syncwarp();
    }
    C y[E];
#pragma unroll
    for (int i = 0; i < E; i += V) {
        const int e = i * 32 + lane * V;
        if (INNERMOST || (EXPAND && MAPPED)) {
#pragma unroll
            for (int v = 0; v < V; ++v) {
                const int k = EXPAND && MAPPED ? place<N>(p, e + v) : e + v;
                y[i + v] = k >= 0 && k < count ? stage[k] : C(0);
            }
        } else {
            load_widened<V>(y + i, x + e * p.step, p.step, count - e, p.dense_input);
        }
        if (!EXPAND && p.signs) {
#pragma unroll
            for (int v = 0; v < V; ++v) y[i + v] *= static_cast<C>(p.signs[(e + v) % N]);
        }
    }
    butterflies<N, V>(y, lane);
    if (!EXPAND && MAPPED) __syncwarp();  // all have read what is in the stage
#pragma unroll
    for (int i = 0; i < E; i += V) {
        const int e = i * 32 + lane * V;
#pragma unroll
        for (int v = 0; v < V; ++v) {
            y[i + v] *= static_cast<C>(p.gain);
            if (EXPAND && p.signs) y[i + v] *= static_cast<C>(p.signs[(e + v) % N]);
            if (!EXPAND && MAPPED) {
                const int k = place<N>(p, e + v);
                if (k >= 0) stage[k] = y[i + v];
            }
        }
        if (EXPAND || !MAPPED) store_chunk<V>(out + e, y + i, out_count - e, p.dense_output);
    }
    if (!EXPAND && MAPPED) {
        __syncwarp();
        for (int k = lane; k < out_count; k += 32) out[k] = stage[k];
    }
}

template <class T, int N, bool EXPAND, bool MAPPED, bool INNERMOST>
__global__ void __launch_bounds__(32 * WARPS<N, INNERMOST>) transform_kernel(Transform p) {
    extern __shared__ __align__(16) unsigned char room[];
    using C = computed<T>;
    constexpr int R = ROWS<N, INNERMOST>, THREADS = 32 * WARPS<N, INNERMOST>;
    C* stage = reinterpret_cast<C*>(room);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (INNERMOST) {  // R rows of one piece
        const long long row_tiles = ceil_div(p.number, R), at = blockIdx.x / row_tiles;
        const long long first_row = blockIdx.x % row_tiles * R;
        long long from;
        int count;
        side<N, !EXPAND>(p, at, from, count);
        const int r = threadIdx.x % R;
        if (first_row + r < p.number) {
            const T* x = static_cast<const T*>(p.x) + row_offset(first_row + r, p.fast, p.stride, p.far);
            for (int k = threadIdx.x / R; k < count; k += THREADS / R) {
                stage[r * PITCH<N> + k] = widen(x[(p.first + from + k) * p.step]);
            }
        }
        __syncthreads();
        for (int i = warp; i < R && first_row + i < p.number; i += WARPS<N, INNERMOST>) {
            transform<T, N, EXPAND, MAPPED, INNERMOST>(p, first_row + i, at, stage + i * PITCH<N>, lane);
        }
    } else {  // a piece a warp, neighbours as memory has them
        const long long pieces = ceil_div(p.blocks, SPAN<N> / N);
        const long long unit = static_cast<long long>(blockIdx.x) * R + warp;
        if (unit >= p.number * pieces) return;
        transform<T, N, EXPAND, MAPPED, INNERMOST>(p, unit / pieces, unit % pieces, stage + warp * PITCH<N>, lane);
    }
}

// scale = max |x| / limit of every group; codes = round(x · (1 / scale))
//
// A matrix (rows, K) is cut into runs of `span` columns: the whole of K, or the K-blocks of a block scale. A team of W threads
// takes one row of W · E columns of a run and keeps it in registers: thread t has the V neighbours from t·V on of every W·V.
// Where that is the whole run, the team finds its scale too (OWN); else the largest magnitudes are known from largest_kernel
// (KNOWN, or TOKEN: one a column). What is read across (INNERMOST: neighbouring rows are nearer in memory than neighbouring
// columns) goes through shared memory, so that lanes read along rows and write along columns.

#include "codes.cuh"
#include "memory.cuh"

enum Scales { OWN, KNOWN, TOKEN };

struct Quantize {
    const void* x;
    unsigned char* codes;  // (rows, K), dense
    float* scale;
    const float* random;  // (rows, K), for STOCHASTIC
    void* top;            // the largest magnitudes as bits, of the shape of scale: 32 of them, 64 for double
    long long rows, k, row_step, column_step;
    long long span;    // columns of a run
    long long runs;    // of a row
    long long strips;  // pieces of a run
    long long down;    // rows that share a scale
    double limit;      // the largest code
    int tile;          // rows that a program takes of a piece, where these are INNERMOST
    int dense_input, dense_output;  // chunks may be moved at once
};

template <class C>
using Bits = decltype(magnitude_bits(C()));

// The largest of a team's numbers, for all of its threads; a team is a part of a warp or the whole program. room: one a warp.
template <int W, class B>
__device__ inline B largest_of(B top, B* room) {
#pragma unroll
    for (int apart = W < 32 ? W / 2 : 16; apart > 0; apart /= 2) {
        const B other = __shfl_xor_sync(0xFFFFFFFFu, top, apart);
        top = other > top ? other : top;
    }
    if (W > 32) {
        __syncthreads();  // the last call's numbers have been read
        if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = top;
        __syncthreads();
        for (int warp = 0; warp < W / 32; ++warp) top = room[warp] > top ? room[warp] : top;
    }
    return top;
}

// The first column of strip `at` of a row.
template <Scales SCALES>
__device__ inline long long left_of(const Quantize& p, long long at, int columns) {
    return SCALES == OWN ? at * p.span : at / p.strips * p.span + at % p.strips * columns;
}

// Strip `at` of a row, by one team. x: its first column, neighbours `step` apart. An invalid row reads and writes nothing.
template <class T, Kind KIND, int MANTISSA, Rounding ROUNDING, Scales SCALES, int W, int E>
__device__ inline void quantize(
    const Quantize& p, long long row, long long at, const T* x, long long step, bool dense, bool valid, Bits<computed<T>>* room
) {
    using C = computed<T>;
    constexpr int V = CHUNK<T>;
    const int t = threadIdx.x % W;
    const long long run = SCALES == OWN ? at : at / p.strips, left = left_of<SCALES>(p, at, W * E);
    const long long count = valid ? least(p.k, (run + 1) * p.span) - left : 0;

    C y[E];
#pragma unroll
    for (int i = 0; i < E; i += V) {
        const int e = i * W + t * V;
        load_widened<V>(y + i, x + e * step, step, count - e, dense);
    }
    float scale, factor = 0.0f;
    const long long group = (SCALES == OWN ? row : row / p.down) * p.runs + run;
    if (SCALES != TOKEN) {
        Bits<C> top = 0;
        if (SCALES == OWN) {
#pragma unroll
            for (int i = 0; i < E; ++i) top = magnitude_bits(y[i]) > top ? magnitude_bits(y[i]) : top;
            top = largest_of<W>(top, room);
        } else if (valid) {
            top = static_cast<const Bits<C>*>(p.top)[group];
        }
        scale_of(top, static_cast<C>(p.limit), scale, factor);
        if (valid && t == 0 && left == run * p.span && (SCALES == OWN || row % p.down == 0)) p.scale[group] = scale;
    }
    const unsigned row_place = row_hash(row);
#pragma unroll
    for (int i = 0; i < E; i += V) {
        const int e = i * W + t * V;
        const long long column = left + e, target = row * p.k + column;
        unsigned char code[V];
#pragma unroll
        for (int v = 0; v < V; v += 2) {
            uint2 h = make_uint2(0, 0);
            if (ROUNDING == HASHED) {
                const unsigned place = row_place * column_hash((column + v) / 2);
                h = pair_noise(float_bits(y[i + v]), float_bits(y[i + v + 1]), place);
            }
#pragma unroll
            for (int w = v; w < v + 2; ++w) {
                if (SCALES == TOKEN && e + w < count) {
                    scale_of(static_cast<const Bits<C>*>(p.top)[column + w], static_cast<C>(p.limit), scale, factor);
                    if (row == 0) p.scale[column + w] = scale;
                }
                unsigned noise = w == v ? h.x : h.y;
                if (ROUNDING == STOCHASTIC) noise = e + w < count ? drawn_noise(p.random[target + w]) : 0;
                const unsigned byte = encode<KIND, MANTISSA, ROUNDING>(
                    y[i + w] * static_cast<C>(factor), float_bits(y[i + w]), noise, static_cast<C>(p.limit)
                );
                code[w] = factor > 0.0f ? byte : 0;  // of a group that is not finite, nothing
            }
        }
        store_chunk<V>(p.codes + target, code, count - e, p.dense_output);
    }
}

template <class T, Kind KIND, int MANTISSA, Rounding ROUNDING, Scales SCALES, int W, int E, bool INNERMOST>
__global__ void __launch_bounds__(W > 256 ? W : 256) quantize_kernel(Quantize p) {
    extern __shared__ __align__(16) unsigned char room[];
    constexpr int THREADS = W > 256 ? W : 256, TEAMS = THREADS / W, COLUMNS = W * E;
    constexpr int PITCH = COLUMNS + (sizeof(T) < 4 ? 4 / sizeof(T) : 1);  // neighbouring rows in other banks
    auto* tops = reinterpret_cast<Bits<computed<T>>*>(room);              // of warps
    const T* x = static_cast<const T*>(p.x);
    const int team = threadIdx.x / W;
    const long long pieces = p.runs * p.strips;
    if (INNERMOST) {  // a tile of rows of one strip
        T* stage = reinterpret_cast<T*>(room + 32 * sizeof(*tops));
        const long long row_tiles = ceil_div(p.rows, p.tile), at = blockIdx.x / row_tiles;
        const long long first = blockIdx.x % row_tiles * p.tile, left = left_of<SCALES>(p, at, COLUMNS);
        const int r = threadIdx.x % p.tile;
        if (first + r < p.rows) {
            for (int c = threadIdx.x / p.tile; c < COLUMNS && left + c < p.k; c += THREADS / p.tile) {
                stage[r * PITCH + c] = x[(first + r) * p.row_step + (left + c) * p.column_step];
            }
        }
        __syncthreads();
        for (int i = team; i < p.tile; i += TEAMS) {
            quantize<T, KIND, MANTISSA, ROUNDING, SCALES, W, E>(
                p, first + i, at, stage + i * PITCH, 1, false, first + i < p.rows, tops
            );
        }
    } else {  // a strip a team, neighbours as memory has them
        const long long unit = static_cast<long long>(blockIdx.x) * TEAMS + team, row = unit / pieces, at = unit % pieces;
        const long long left = left_of<SCALES>(p, at, COLUMNS);
        quantize<T, KIND, MANTISSA, ROUNDING, SCALES, W, E>(
            p, row, at, x + row * p.row_step + left * p.column_step, p.column_step, p.dense_input, row < p.rows, tops
        );
    }
}

// max |x| of every group as bits, merged into `top` (zeros at first) by atomic maxima, whose order does not matter. A warp goes
// over pieces of E · 32 columns of a run; INNERMOST: of E columns of 32 rows.
template <class T, int E, bool INNERMOST>
__global__ void __launch_bounds__(256) largest_kernel(Quantize p) {
    using C = computed<T>;
    constexpr int V = CHUNK<T>, COLUMNS = INNERMOST ? E : 32 * E, R = INNERMOST ? 32 : 1;
    auto* tops = static_cast<Bits<C>*>(p.top);
    const T* x = static_cast<const T*>(p.x);
    const int lane = threadIdx.x % 32;
    const long long pieces = p.runs * p.strips, units = ceil_div(p.rows, R) * pieces;
    const bool single = p.down >= p.rows && p.runs == 1;
    Bits<C> top = 0;
    for (long long unit = blockIdx.x * 8ll + threadIdx.x / 32; unit < units; unit += gridDim.x * 8ll) {
        // neighbours as memory has them
        const long long at = INNERMOST ? unit / ceil_div(p.rows, R) : unit % pieces;
        const long long row = INNERMOST ? unit % ceil_div(p.rows, R) * R + lane : unit / pieces;
        const long long run = at / p.strips, left = run * p.span + at % p.strips * COLUMNS;
        const long long count = row < p.rows ? least(COLUMNS, least(p.k, (run + 1) * p.span) - left) : 0;
        const T* from = x + row * p.row_step + left * p.column_step;
        C y[E];
#pragma unroll
        for (int i = 0; i < E; i += V) {
            const int e = INNERMOST ? i : i * 32 + lane * V;
            load_widened<V>(y + i, from + e * p.column_step, p.column_step, count - e, !INNERMOST && p.dense_input);
        }
#pragma unroll
        for (int i = 0; i < E; ++i) top = magnitude_bits(y[i]) > top ? magnitude_bits(y[i]) : top;
        if (single) continue;
        if (!INNERMOST) top = largest_of<32>(top, tops);
        Bits<C>* to = tops + row / p.down * p.runs + run;
        if ((INNERMOST || lane == 0) && row < p.rows && top > *to) atomicMax(to, top);
        top = 0;
    }
    if (single) {
        top = largest_of<32>(top, tops);
        if (lane == 0 && top > *tops) atomicMax(tops, top);
    }
}

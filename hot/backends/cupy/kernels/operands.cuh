// Operands of products by tensor cores: transform, largest magnitudes, scales, codes, for 16-bit floats.
//
// The kernels look at a matrix with dense columns. Its rows are cut into blocks of 16 that straddle no two samples. An operand
// is made of it in one of two ways, or, of a gradient, in both from one read:
//
//     along    K is the columns: every 16 columns of a row are transformed; codes lie as the matrix does
//     across   K is the rows: every 16 rows of a column are transformed into R coefficients; codes lie transposed
//
// y = basis · block is a product with a 16 × 16 (along) or R × 16 (across) matrix of ±1 times a power of two, exact in 16-bit
// floats with float32 sums. A scale a row or tensor needs the largest |y| first: largest_kernel reads for it, quantize_kernel
// reads again; both_kernel keeps a matrix that shared memory holds. Scales of 128 columns (along) or of a tile of
// 128 × 128 (across) are made where the tile is.
//
// A warp works on strips of 16 rows × 128 columns, each copied to shared memory while the ones before are worked on.
#pragma once

#include "fragments.cuh"
#include "rounding.cuh"

constexpr int WARPS = 8;  // strips in a tile
constexpr int THREADS = 32 * WARPS;

enum Scales { NONE, ROW, TENSOR, GROUP };  // GROUP: 128 columns along, a tile of 128 × 128 across
enum Found { BEFORE, HERE };  // largest magnitudes: by a launch before, one of each scale; by this one, one of each program

struct Operands {
    const void* x;
    const void* along_basis;   // (16, 16)
    const void* across_basis;  // (R, 16)
    unsigned* along_top;  // BEFORE: zeroed; the largest |y| of every row, as bits, which order like floats; then 1 / scale
    unsigned* across_top; // HERE: the largest of (rows, panels), and of (groups of tiles, columns)
    unsigned char* along_codes;  // (rows, K)
    float* along_scale;
    unsigned char* across_codes;  // (columns, K)
    float* across_scale;
    float* sums;        // (groups of tiles, columns)
    void* bias;         // (columns): of all rows
    unsigned* counters;  // zeroed: programs done of every panel, then of every group of tiles
    long long stride;   // of a sample
    long long step;     // of a row
    int length;         // rows of a sample
    int per;            // blocks of rows of a sample
    int blocks;         // of rows, in all
    int columns;
    int tiles;   // of rows
    int panels;  // of columns
    int count;   // tiles that a program takes, a group
    float along_limit, across_limit;
};

// The strips of a warp, tile by tile of a program's group: one is copied while the one before is worked on.
template <class T>
struct Strips {
    static constexpr int BYTES = 2 * WARPS * SIDE * PITCH;  // from the beginning of `memory`
    const Operands& p;
    const Lane& lane;
    const int column, end;
    const T* const from;  // of this lane in a strip at 0
    Rows rows, ahead;  // of the strip that is worked on, and of the next to be copied
    int tile, next;

    __device__ Strips(const Operands& p, const Lane& lane)
        : p(p), lane(lane), column(blockIdx.x % p.panels * COLUMNS), end(min((group() + 1) * p.count, p.tiles)),
          from(static_cast<const T*>(p.x) + lane.own / 16 * p.step + column + lane.own % 16 * 8),
          rows(p, group() * p.count * WARPS + lane.warp), ahead(rows), tile(group() * p.count), next(tile) {
        begin();
    }
    __device__ int panel() const { return blockIdx.x % p.panels; }
    __device__ int group() const { return blockIdx.x / p.panels; }
    __device__ int groups() const { return gridDim.x / p.panels; }

    // The strip to work on; the copy of another begins.
    __device__ Strip get() {
        begin();
        wait_for_all_but<1>();
        __syncwarp();
        return at(tile);
    }
    __device__ void advance() {
        __syncwarp();
        rows.advance(p, WARPS), tile++;
    }

  private:
    __device__ Strip at(int tile) const { return {(tile % 2 * WARPS + lane.warp) * unsigned(SIDE * PITCH)}; }
    __device__ void begin() {
        if (next < end) at(next).copy(p, from + ahead.offset, p.columns - column - lane.own % 16 * 8, ahead.left, lane);
        end_of_copies();
        ahead.advance(p, WARPS), next++;
    }
};

// The largest |y| along of rows 2q, 2q + 1, 2q + 8, 2q + 9 so far, and of one block more.
template <class T>
__device__ void larger_of_rows(float (&row)[4], uint4 basis, uint4 block) {
    float d[4];
    multiply<T>(d, basis, make_uint2(block.x, block.y));
    row[0] = larger(larger(row[0], d[0]), d[2]), row[1] = larger(larger(row[1], d[1]), d[3]);
    multiply<T>(d, basis, make_uint2(block.z, block.w));
    row[2] = larger(larger(row[2], d[0]), d[2]), row[3] = larger(larger(row[3], d[1]), d[3]);
}

// Lane (g, q) with g < 4 gets the largest of row_of(lane) that any lane found.
__device__ inline int row_of(const Lane& lane) { return 2 * lane.q + lane.g % 2 + lane.g / 2 * 8; }
__device__ inline float of_all_lanes(float (&row)[4], const Lane& lane) {
#pragma unroll
    for (int by = 4; by < 32; by *= 2)
#pragma unroll
        for (int r = 0; r < 4; r++) row[r] = larger(row[r], __shfl_xor_sync(~0u, row[r], by));
    return lane.g / 2 ? (lane.g % 2 ? row[3] : row[2]) : (lane.g % 2 ? row[1] : row[0]);
}

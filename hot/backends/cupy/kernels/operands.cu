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
// reads again. Scales of 128 columns (along) or of a tile of 128 × 128 (across) are made where the tile is.
//
// A warp works on strips of 16 rows × 128 columns, each copied to shared memory while the ones before are worked on.
#pragma once

#include "codes16.cuh"
#include "fragments.cuh"

constexpr int WARPS = 8;  // strips in a tile
constexpr int THREADS = 32 * WARPS;

enum Scales { NONE, ROW, TENSOR, GROUP };  // GROUP: 128 columns along, a tile of 128 × 128 across

struct Operands {
    const void* x;
    const void* along_basis;   // (16, 16)
    const void* across_basis;  // (R, 16)
    unsigned* along_top;       // zeroed; the largest |y| of every row, as bits, which order like floats; then 1 / scale
    unsigned* across_top;
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

// The strips of a warp, tile by tile: STAGES − 1 are on their way while one is worked on.
template <class T, int STAGES>
struct Strips {
    static constexpr int BYTES = STAGES * WARPS * SIDE * PITCH;  // from the beginning of `memory`
    const Operands& p;
    const Lane& lane;
    const int column, end;
    const T* const from;  // of this lane in a strip at 0
    Rows rows, ahead;  // of the strip that is worked on, and of the last that is on its way
    int tile, next;

    __device__ Strips(const Operands& p, const Lane& lane)
        : p(p), lane(lane), column(blockIdx.x % p.panels * COLUMNS), end(min((group() + 1) * p.count, p.tiles)),
          from(static_cast<const T*>(p.x) + lane.own / 16 * p.step + column + lane.own % 16 * 8), rows(p, group() * p.count * WARPS + lane.warp), ahead(rows), tile(group() * p.count), next(tile) {
#pragma unroll
        for (int i = 0; i < STAGES - 1; i++) {
            if (i) ahead.advance(p, WARPS), next++;
            begin();
        }
    }
    __device__ int panel() const { return blockIdx.x % p.panels; }
    __device__ int group() const { return blockIdx.x / p.panels; }
    __device__ int groups() const { return gridDim.x / p.panels; }

    // The strip to work on; the copy of another begins.
    __device__ Strip get() {
        ahead.advance(p, WARPS), next++;
        begin();
        wait_for_all_but<STAGES - 1>();
        __syncwarp();
        return at(tile);
    }
    __device__ void advance() {
        __syncwarp();
        rows.advance(p, WARPS), tile++;
    }

  private:
    __device__ Strip at(int tile) const { return {(tile % STAGES * WARPS + lane.warp) * unsigned(SIDE * PITCH)}; }
    __device__ void begin() {
        if (next < end) at(next).copy(p, from + ahead.offset, p.columns - column - lane.own % 16 * 8, ahead.left, lane);
        end_of_copies();
    }
};

// ---- largest magnitudes

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

// Largest |y| of rows and columns, and, with SUMS, sums of columns. Whoever is the last to look at a column or a row makes its
// scale, and the bias from the sums of every group, in their order.
template <class T, int ALONG, int ACROSS, int R, bool SUMS>
__global__ void __launch_bounds__(THREADS, 2) largest_kernel(const Operands p) {
    constexpr int STAGES = 3;
    auto& wide = *reinterpret_cast<float(*)[WARPS][COLUMNS]>(memory + Strips<T, STAGES>::BYTES);
    const Lane lane;
    Strips<T, STAGES> strips(p, lane);
    const uint4 along = along_basis<T>(p.along_basis, lane);
    uint2 across[R / 8];
    across_basis<T, R>(across, p.across_basis, lane);
    float top[BLOCKS][2] = {}, sum[BLOCKS][2] = {}, whole = 0.0f;
    for (; strips.tile < strips.end; strips.advance()) {
        const unsigned corner = strips.get().corner(lane);
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
            if (ALONG == ROW && lane.g < 4 && row_of(lane) < strips.rows.left)
                atomicMax(p.along_top + strips.rows.first + row_of(lane), __float_as_uint(highest));
            if (ALONG == TENSOR) whole = larger(whole, highest);
        }
    }

    const int thread = threadIdx.x, column = strips.column + thread % COLUMNS, part = thread / COLUMNS;
    const bool writes = part == 0 && column < p.columns;
    if (ALONG == TENSOR) {
        for (int by = 1; by < 32; by *= 2) whole = larger(whole, __shfl_xor_sync(~0u, whole, by));
        if (lane.own == 0) atomicMax(p.along_top, __float_as_uint(whole));
    }
    if (ACROSS != NONE) {
#pragma unroll
        for (int j = 0; j < BLOCKS; j++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                for (int by = 1; by < 4; by *= 2) top[j][c] = larger(top[j][c], __shfl_xor_sync(~0u, top[j][c], by));
                if (lane.q == c) wide[lane.warp][SIDE * j + lane.g + 8 * c] = top[j][c];
            }
        __syncthreads();
        float all = 0.0f;
        for (int w = 0; w < WARPS; w++) all = larger(all, wide[w][thread % COLUMNS]);
        if (writes) atomicMax(p.across_top + (ACROSS == TENSOR ? 0 : column), __float_as_uint(all));
        __syncthreads();
    }
    if (SUMS) {
#pragma unroll
        for (int j = 0; j < BLOCKS; j++)
#pragma unroll
            for (int c = 0; c < 2; c++)
                if (lane.q == c) wide[lane.warp][SIDE * j + lane.g + 8 * c] = sum[j][c];
        __syncthreads();
        float all = 0.0f;
        for (int w = 0; w < WARPS; w++) all += wide[w][thread % COLUMNS];
        if (writes) p.sums[(long long)strips.group() * p.columns + column] = all;
    }

    if ((ACROSS == ROW || SUMS) && is_last(p.counters + strips.panel(), strips.groups())) {
        if (ACROSS == ROW && writes) settle(p.across_top + column, p.across_scale + column, p.across_limit);
        if (SUMS) {
            float all = 0.0f;
            for (int i = part; i < strips.groups() && column < p.columns; i += THREADS / COLUMNS)
                all += __ldcg(p.sums + (long long)i * p.columns + column);
            wide[part][thread % COLUMNS] = all;
            __syncthreads();
            if (writes) static_cast<T*>(p.bias)[column] = narrow<T>(all + wide[1][thread]);
        }
    }
    if (ALONG == ROW && is_last(p.counters + p.panels + strips.group(), p.panels)) {
        for (int i = thread; i < p.count * WARPS * SIDE; i += THREADS) {
            const Rows rows(p, strips.group() * p.count * WARPS + i / SIDE);
            const int row = rows.first + i % SIDE;
            if (i % SIDE < rows.left) settle(p.along_top + row, p.along_scale + row, p.along_limit);
        }
    }
}

// ---- codes

// Where two codes along go, in the place of a strip: of block j and row 2q, 2q + 1, 2q + 8 or 2q + 9 (r = 0 … 3).
struct Places {
    unsigned even, odd;
    __device__ Places(const Strip& x, const Lane& lane)
        : even(x.piece(2 * lane.q, 0) + 2 * lane.g), odd(x.piece(2 * lane.q + 1, 0) + 2 * lane.g) {}
    __device__ unsigned short& at(int j, int r) const {
        return *reinterpret_cast<unsigned short*>(memory + ((r % 2 ? odd : even) ^ 16 * j) + r / 2 * 8 * PITCH);
    }
};

// What a program needs besides its strips.
template <int ACROSS, int R>
struct Shared {
    static constexpr int BYTES = WARPS * R;  // of the codes of a column
    unsigned char across[ACROSS == NONE ? 16 : COLUMNS * BYTES];
    uint2 columns[COLUMNS];       // of the across operand: 1 / scale, and the hash of its row
    unsigned pairs[COLUMNS / 2];  // of the along operand: hashes of its columns
    float tops[WARPS];

    // Where a code across is: pieces of 16 bytes are turned as in a Strip.
    __device__ unsigned char* codes(int column, int byte) {
        constexpr int MASK = BYTES / 16 - 1;
        const int turn = R == 8 ? column / 2 & MASK : column & MASK;
        return across + column * BYTES + 16 * (byte / 16 ^ turn) + byte % 16;
    }
};

// Codes, and the scales of groups.
template <class T, int ALONG, int ACROSS, int R, int ALONG_ROUNDING, int ACROSS_ROUNDING, int ALONG_HOLDER, int ACROSS_HOLDER>
__global__ void __launch_bounds__(THREADS, R == 8 ? 3 : 2) quantize_kernel(const Operands p) {
    constexpr int STAGES = 2, PER_LANE = R / 4;  // coefficients of a block that a lane holds across, neighbours along K
    auto& shared = *reinterpret_cast<Shared<ACROSS, R>*>(memory + Strips<T, STAGES>::BYTES);
    const int thread = threadIdx.x;
    const Lane lane;
    Strips<T, STAGES> strips(p, lane);
    const int column = strips.column, along_k = (p.columns + SIDE - 1) / SIDE * SIDE, across_k = p.blocks * R;
    const uint4 along = along_basis<T>(p.along_basis, lane);
    uint2 across[R / 8];
    across_basis<T, R>(across, p.across_basis, lane);

    bool finite = true;  // across, all columns of the panel
    if (thread < COLUMNS) {
        float factor = 1.0f, scale;
        if (ACROSS == ROW && column + thread < p.columns) factor = __uint_as_float(p.across_top[column + thread]);
        if (ACROSS == TENSOR) {
            scale_of(*p.across_top, p.across_limit, scale, factor);
            if (blockIdx.x == 0) *p.across_scale = scale;
        }
        finite = factor > 0.0f;
        shared.columns[thread] = make_uint2(__float_as_uint(factor), row_hash(column + thread));
        if (thread < COLUMNS / 2) shared.pairs[thread] = column_hash(column / 2 + thread);
    }
    finite = __syncthreads_and(finite);
    float whole = 1.0f;
    if (ALONG == TENSOR) {
        float scale;
        scale_of(*p.along_top, p.along_limit, scale, whole);
        if (blockIdx.x == 0 && thread == 0) *p.along_scale = scale;
    }

    for (; strips.tile < strips.end; strips.advance()) {
        const Rows& rows = strips.rows;
        float factor[4] = {whole, whole, whole, whole};  // along, of rows 2q, 2q + 1, 2q + 8, 2q + 9
        unsigned hash[4] = {};
        if (ALONG != NONE && ALONG_ROUNDING == HASHED) {
            const unsigned known = row_hash(rows.first + lane.own % SIDE);
#pragma unroll
            for (int r = 0; r < 4; r++) hash[r] = __shfl_sync(~0u, known, 2 * lane.q + r % 2 + r / 2 * 8);
        }
        if (ALONG == ROW) {
            const float known = lane.own < min(rows.left, SIDE) ? __uint_as_float(__ldg(p.along_top + rows.first + lane.own)) : 1.0f;
#pragma unroll
            for (int r = 0; r < 4; r++) factor[r] = __shfl_sync(~0u, known, 2 * lane.q + r % 2 + r / 2 * 8);
        }
        unsigned pair[PER_LANE / 2];
#pragma unroll
        for (int i = 0; i < PER_LANE / 2; i++)
            pair[i] = ACROSS_ROUNDING == HASHED ? column_hash((rows.block * (long long)R + PER_LANE * lane.q) / 2 + i) : 0;
        const Strip x = strips.get();
        const unsigned corner = x.corner(lane);
        const Places places(x, lane);
        if (ALONG == GROUP) {
            float row[4] = {}, scale;
#pragma unroll
            for (int j = 0; j < BLOCKS; j++) larger_of_rows<T>(row, along, block(corner, j));
            scale_of(__float_as_uint(of_all_lanes(row, lane)), p.along_limit, scale, whole);
            if (lane.g < 4 && row_of(lane) < rows.left)
                p.along_scale[(long long)(rows.first + row_of(lane)) * p.panels + strips.panel()] = scale;
#pragma unroll
            for (int r = 0; r < 4; r++) factor[r] = __shfl_sync(~0u, whole, 4 * r + lane.q);
        }
        if (ACROSS == GROUP) {
            float top = 0.0f, scale, own;
#pragma unroll
            for (int j = 0; j < BLOCKS; j++) {
                const uint4 t = transposed(corner, j);
#pragma unroll
                for (int h = 0; h < R / 8; h++) {
                    float d[4];
                    multiply<T>(d, t, across[h]);
#pragma unroll
                    for (int i = 0; i < 4; i++) top = larger(top, d[i]);
                }
            }
            for (int by = 1; by < 32; by *= 2) top = larger(top, __shfl_xor_sync(~0u, top, by));
            if (lane.own == 0) shared.tops[lane.warp] = top;
            __syncthreads();
            for (int w = 0; w < WARPS; w++) top = larger(top, shared.tops[w]);
            scale_of(__float_as_uint(top), p.across_limit, scale, own);
            if (thread == 0) p.across_scale[(long long)strips.panel() * p.tiles + strips.tile] = scale;
            if (thread < COLUMNS) shared.columns[thread].x = __float_as_uint(own);
            finite = own > 0.0f;
        }
        if (ACROSS != NONE) __syncthreads();  // the codes of the tile before are gone

#pragma unroll
        for (int j = 0; j < BLOCKS; j++) {
            uint4 t;
            if (ACROSS != NONE) t = transposed(corner, j);
            if (ALONG != NONE) {
                const uint4 b = block(corner, j);
                const unsigned own = ALONG_ROUNDING == HASHED ? shared.pairs[SIDE / 2 * j + lane.g] : 0;
                float d[2][4];
                multiply<T>(d[0], along, make_uint2(b.x, b.y));
                multiply<T>(d[1], along, make_uint2(b.z, b.w));
#pragma unroll
                for (int r = 0; r < 4; r++) {
                    const float* y = d[r / 2] + r % 2;
                    places.at(j, r) = two_codes<ALONG_ROUNDING, ALONG_HOLDER>(y[0], y[2], factor[r], hash[r], own);
                }
            }
            if (ACROSS != NONE) {
                float d[R / 8][4];
#pragma unroll
                for (int h = 0; h < R / 8; h++) multiply<T>(d[h], t, across[h]);
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    const int in_panel = SIDE * j + lane.g + 8 * c;
                    const uint2 own = shared.columns[in_panel];
                    unsigned codes[PER_LANE / 2];
#pragma unroll
                    for (int i = 0; i < PER_LANE / 2; i++)
                        codes[i] = two_codes<ACROSS_ROUNDING, ACROSS_HOLDER>(
                            d[i][2 * c], d[i][2 * c + 1], __uint_as_float(own.x), own.y, pair[i]);
                    unsigned char* at = shared.codes(in_panel, lane.warp * R + PER_LANE * lane.q);
                    if (R == 8) *reinterpret_cast<unsigned short*>(at) = codes[0];
                    else *reinterpret_cast<unsigned*>(at) = __byte_perm(codes[0], codes[PER_LANE / 2 - 1], 0x5410);
                }
            }
        }

        // Codes of a row that is not finite are 0, whatever came out; its factor is 0.
        const float least = fminf(fminf(factor[0], factor[1]), fminf(factor[2], factor[3]));
        if (!finite || __any_sync(~0u, !(least > 0.0f))) {
#pragma unroll 1
            for (int j = 0; j < BLOCKS; j++) {
#pragma unroll
                for (int r = 0; ALONG != NONE && r < 4; r++)
                    if (!(factor[r] > 0.0f)) places.at(j, r) = 0;
                for (int c = 0; ACROSS != NONE && c < 2; c++) {
                    const int in_panel = SIDE * j + lane.g + 8 * c;
                    if (!(__uint_as_float(shared.columns[in_panel].x) > 0.0f))
                        for (int i = 0; i < PER_LANE; i++) *shared.codes(in_panel, lane.warp * R + PER_LANE * lane.q + i) = 0;
                }
            }
        }

        if (ALONG != NONE) {  // a warp's own rows, 128 bytes each
            __syncwarp();
            const int piece = lane.own % 8, k = column + 16 * piece;
            unsigned char* at = p.along_codes + (long long)(rows.first + lane.own / 8) * along_k + k;
#pragma unroll
            for (int i = 0; i < SIDE / 4; i++, at += 4ll * along_k)
                if (4 * i + lane.own / 8 < rows.left && k < along_k)
                    __stcs(reinterpret_cast<uint4*>(at), *reinterpret_cast<const uint4*>(memory + x.piece(4 * i + lane.own / 8, piece)));
        }
        if (ACROSS != NONE) {  // WARPS · R bytes of every column
            __syncthreads();
            constexpr int PIECES = WARPS * R / 16;
            const int in_row = thread % PIECES * 16, k = strips.tile * WARPS * R + in_row;
            unsigned char* at = p.across_codes + (long long)(column + thread / PIECES) * across_k + k;
#pragma unroll
            for (int i = 0; i < COLUMNS * PIECES / THREADS; i++, at += (THREADS / PIECES) * (long long)across_k) {
                const int own = i * (THREADS / PIECES) + thread / PIECES;
                if (column + own >= p.columns || k >= across_k) continue;
                const uint4 codes = *reinterpret_cast<uint4*>(shared.codes(own, in_row));
                if (across_k % 16 == 0) {
                    __stcs(reinterpret_cast<uint4*>(at), codes);
                } else {
                    *reinterpret_cast<uint2*>(at) = make_uint2(codes.x, codes.y);
                    if (k + 8 < across_k) *reinterpret_cast<uint2*>(at + 8) = make_uint2(codes.z, codes.w);
                }
            }
        }
    }
}

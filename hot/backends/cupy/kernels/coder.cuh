// Operands of products, the second reading, or the only one: codes. See operands.cuh.
#pragma once

#include "codes16.cuh"
#include "operands.cuh"

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

// Makes the codes, and the scales of groups, of strips, once `prepare` is through. FOUND: where largest magnitudes are.
template <class T, int ALONG, int ACROSS, int R, int ALONG_ROUNDING, int ACROSS_ROUNDING, int ALONG_HOLDER, int ACROSS_HOLDER,
          int FOUND>
struct Coder {
    static constexpr int PER_LANE = R / 4;  // coefficients of a block that a lane holds across, neighbours along K
    const Operands& p;
    const Lane& lane;
    Shared<ACROSS, R>& shared;
    const int along_k, across_k;
    uint4 along;
    uint2 across[R / 8];
    bool finite = true;   // across, all columns of the panel
    float whole = 1.0f;   // 1 / scale of the along operand, if there is one for all

    __device__ Coder(const Operands& p, const Lane& lane, Shared<ACROSS, R>& shared)
        : p(p), lane(lane), shared(shared), along_k((p.columns + SIDE - 1) / SIDE * SIDE), across_k(p.blocks * R) {
        if (ALONG != NONE) along = along_basis<T>(p.along_basis, lane);
        if (ACROSS != NONE) across_basis<T, R>(across, p.across_basis, lane);
        float scale;
        if (ALONG == TENSOR) scale_of(__ldg(p.along_top), p.along_limit, scale, whole);
        if (ALONG == TENSOR && blockIdx.x == 0 && threadIdx.x == 0) *p.along_scale = scale;
    }

    // 1 / scale of a column; the first group of tiles puts the scale where it goes.
    __device__ float factor_of_column(int column) {
        if (FOUND == BEFORE) return __uint_as_float(__ldg(p.across_top + column));
        const int groups = gridDim.x / p.panels;
        float top = 0.0f, scale, factor;
#pragma unroll 8
        for (int i = 0; i < groups; i++) top = larger(top, __uint_as_float(__ldcg(p.across_top + (long long)i * p.columns + column)));
        scale_of(__float_as_uint(top), p.across_limit, scale, factor);
        if (blockIdx.x < p.panels) p.across_scale[column] = scale;
        return factor;
    }

    // 1 / scale of row own % 16 of these; the first panel puts the scale where it goes.
    __device__ float factor_of_row(const Rows& rows, int panel) {
        const int own = lane.own % SIDE;
        const bool inside = own < rows.left;
        if (FOUND == BEFORE) return inside ? __uint_as_float(__ldg(p.along_top + rows.first + own)) : 1.0f;
        const unsigned* tops = p.along_top + (long long)(rows.first + own) * p.panels;
        float top = 0.0f, scale, factor;
#pragma unroll 8
        for (int i = lane.own / SIDE; inside && i < p.panels; i += 2) top = larger(top, __uint_as_float(__ldcg(tops + i)));
        top = larger(top, __shfl_xor_sync(~0u, top, SIDE));
        scale_of(__float_as_uint(top), p.along_limit, scale, factor);
        if (panel == 0 && inside) p.along_scale[rows.first + own] = scale;
        return factor;
    }

    // What codes of a panel need of its columns.
    __device__ void prepare(int panel) {
        const int thread = threadIdx.x, column = panel * COLUMNS + thread;
        if (thread < COLUMNS) {
            float factor = 1.0f, scale;
            if (ACROSS == ROW && column < p.columns) factor = factor_of_column(column);
            if (ACROSS == TENSOR) scale_of(__ldg(p.across_top), p.across_limit, scale, factor);
            if (ACROSS == TENSOR && blockIdx.x == 0 && thread == 0) *p.across_scale = scale;
            finite = factor > 0.0f;
            shared.columns[thread] = make_uint2(__float_as_uint(factor), row_hash(column));
            if (thread < COLUMNS / 2) shared.pairs[thread] = column_hash(panel * COLUMNS / 2 + thread);
        }
        finite = __syncthreads_and(finite);
    }

    __device__ void code(const Strip& x, const Rows& rows, int tile, int panel) {
        const int thread = threadIdx.x, column = panel * COLUMNS;
        float factor[4] = {whole, whole, whole, whole};  // along, of rows 2q, 2q + 1, 2q + 8, 2q + 9
        unsigned hash[4] = {};
        if (ALONG != NONE && ALONG_ROUNDING == HASHED) {
            const unsigned known = row_hash(rows.first + lane.own % SIDE);
#pragma unroll
            for (int r = 0; r < 4; r++) hash[r] = __shfl_sync(~0u, known, 2 * lane.q + r % 2 + r / 2 * 8);
        }
        if (ALONG == ROW) {
            const float known = factor_of_row(rows, panel);
#pragma unroll
            for (int r = 0; r < 4; r++) factor[r] = __shfl_sync(~0u, known, 2 * lane.q + r % 2 + r / 2 * 8);
        }
        unsigned pair[PER_LANE / 2];
#pragma unroll
        for (int i = 0; i < PER_LANE / 2; i++)
            pair[i] = ACROSS_ROUNDING == HASHED ? column_hash((rows.block * (long long)R + PER_LANE * lane.q) / 2 + i) : 0;
        const unsigned corner = x.corner(lane);
        const Places places(x, lane);
        if (ALONG == GROUP) {
            float row[4] = {}, scale;
#pragma unroll
            for (int j = 0; j < BLOCKS; j++) larger_of_rows<T>(row, along, block(corner, j));
            scale_of(__float_as_uint(of_all_lanes(row, lane)), p.along_limit, scale, whole);
            if (lane.g < 4 && row_of(lane) < rows.left)
                p.along_scale[(long long)(rows.first + row_of(lane)) * p.panels + panel] = scale;
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
            if (thread == 0) p.across_scale[(long long)panel * p.tiles + tile] = scale;
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
                __syncwarp();  // codes go where blocks up to this one were
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
                    *reinterpret_cast<uint4*>(at) = *reinterpret_cast<const uint4*>(memory + x.piece(4 * i + lane.own / 8, piece));
        }
        if (ACROSS != NONE) {  // WARPS · R bytes of every column
            __syncthreads();
            constexpr int PIECES = WARPS * R / 16;
            const int in_row = thread % PIECES * 16, k = tile * WARPS * R + in_row;
            unsigned char* at = p.across_codes + (long long)(column + thread / PIECES) * across_k + k;
#pragma unroll
            for (int i = 0; i < COLUMNS * PIECES / THREADS; i++, at += (THREADS / PIECES) * (long long)across_k) {
                const int own = i * (THREADS / PIECES) + thread / PIECES;
                if (column + own >= p.columns || k >= across_k) continue;
                const uint4 codes = *reinterpret_cast<uint4*>(shared.codes(own, in_row));
                if (across_k % 16 == 0) {
                    *reinterpret_cast<uint4*>(at) = codes;
                } else {
                    *reinterpret_cast<uint2*>(at) = make_uint2(codes.x, codes.y);
                    if (k + 8 < across_k) *reinterpret_cast<uint2*>(at + 8) = make_uint2(codes.z, codes.w);
                }
            }
        }
    }
};

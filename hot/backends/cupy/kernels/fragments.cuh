// Blocks of 16 × 16 for tensor cores, of 16-bit floats: how they are loaded, turned and multiplied.
#pragma once

#include "numbers.cuh"

constexpr int SIDE = 16;                // of a block
constexpr int COLUMNS = 128;            // of a strip
constexpr int BLOCKS = COLUMNS / SIDE;  // of columns
constexpr int PITCH = 2 * COLUMNS;      // bytes from row to row of a strip

template <class T>
constexpr unsigned ONES = 0x3F803F80u;  // two ones
template <>
constexpr unsigned ONES<fp16> = 0x3C003C00u;

struct Lane {
    int warp = threadIdx.x / 32, own = threadIdx.x % 32, g = own / 4, q = own % 4;
};

struct Rows {  // 16 of a sample
    int block, start;
    int first;         // of all samples
    int left;          // of the sample from here on; none of what lies behind the last block
    long long offset;  // in elements

    template <class P>
    __device__ Rows(const P& p, int block) : block(block) {
        const int sample = block / p.per;
        start = (block - sample * p.per) * SIDE;
        first = sample * p.length + start;
        left = block < p.blocks ? p.length - start : 0;
        offset = sample * p.stride + start * p.step;
    }

    template <class P>
    __device__ void advance(const P& p, int blocks) {
        block += blocks, start += blocks * SIDE, first += blocks * SIDE, offset += blocks * SIDE * p.step;
        for (const int whole = p.per * SIDE; start >= whole; start -= whole)  // into the next sample
            first += p.length - whole, offset += p.stride - whole * p.step;
        left = block < p.blocks ? p.length - start : 0;
    }
};

// d = a · b for a (16, 16) and b (16, 8), float32 sums.
template <class T>
__device__ void multiply(float (&d)[4], uint4 a, uint2 b);

template <>
__device__ void multiply<bf16>(float (&d)[4], uint4 a, uint2 b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y), "f"(0.0f));
}

template <>
__device__ void multiply<fp16>(float (&d)[4], uint4 a, uint2 b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y), "f"(0.0f));
}

// a, or |b| where that is larger; NaN wins.
__device__ float larger(float a, float b) {
    float out;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(fabsf(b)));
    return out;
}

extern __shared__ __align__(1024) unsigned char memory[];

// 16 rows × COLUMNS columns in shared memory, a warp's own. 16 bytes, a piece, are where they belong but for the three low bits
// of their index, which are turned by the row: so neither rows of a piece nor pieces of a row meet in a bank. Places are
// offsets into `memory`: piece i of a row is at the place of piece 0 ^ 16·i.
struct Strip {
    unsigned at;  // a multiple of PITCH

    __device__ unsigned piece(int row, int index) const { return at + row * PITCH + 16 * (index ^ (row & 7)); }

    // Begin to copy it; what is outside becomes zeros. from: row own / 16, piece own % 16 of a lane, 16 bytes aligned; right: the
    // columns from there on.
    template <class T, class P>
    __device__ void copy(const P& p, const T* from, int right, int left, const Lane& lane) const {
        const int row = lane.own / 16;
        const unsigned to = address(piece(row, lane.own % 16));
        if (left >= SIDE && right >= COLUMNS - 8 * (lane.own % 16)) {
#pragma unroll
            for (int i = 0; i < SIDE / 2; i++, from += 2 * p.step)
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((to ^ 32 * i % 128) + 2 * i * PITCH), "l"(from));
        } else {
            const int bytes = right >= 8 ? 16 : right > 0 ? 2 * right : 0;
#pragma unroll 1
            for (int i = 0; i < SIDE / 2; i++, from += 2 * p.step) {
                const int held = 2 * i + row < left ? bytes : 0;
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((to ^ 32 * i % 128) + 2 * i * PITCH),
                             "l"(held ? from : static_cast<const T*>(p.x)), "r"(held));
            }
        }
    }

    // What `block` and `transposed` take: where this lane's row of one of four 8 × 8 matrices of block 0 begins.
    __device__ unsigned corner(const Lane& lane) const {
        return piece(lane.own % 8 + lane.own / 16 * 8, lane.own / 8 % 2);
    }

    __device__ static unsigned address(unsigned place) { return static_cast<unsigned>(__cvta_generic_to_shared(memory)) + place; }
};

// Block j as fragments: its rows g and g + 8 with columns 2q, 2q + 1, 2q + 8, 2q + 9 as K, in (x, y) and (z, w).
__device__ inline uint4 block(unsigned corner, int j) {
    uint4 out;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w)
                 : "r"(Strip::address(corner ^ 32 * j))
                 : "memory");
    return out;
}

// Block j with its columns g and g + 8 as rows, and its rows 2q, 2q + 1, 2q + 8, 2q + 9 as K.
__device__ inline uint4 transposed(unsigned corner, int j) {
    uint4 out;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w)
                 : "r"(Strip::address(corner ^ 32 * j))
                 : "memory");
    return out;
}

__device__ inline void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }  // that began since the last end
template <int N>
__device__ void wait_for_all_but() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// The basis (16, 16) that multiplies halves of `block`: a lane gets coefficients 2g and 2g + 1 of rows 2q (d[0], d[2]) and
// 2q + 1 (d[1], d[3]).
template <class T>
__device__ uint4 along_basis(const void* basis, const Lane& lane) {
    const T* at = static_cast<const T*>(basis) + 2 * lane.g * SIDE + 2 * lane.q;
    const auto two = [=](int i) { return *reinterpret_cast<const unsigned*>(at + i); };
    return make_uint4(two(0), two(SIDE), two(8), two(SIDE + 8));
}

// The basis (R, 16) by which `transposed` is multiplied, in halves of eight rows: a lane gets of column g (d[0], d[1]) and of
// column g + 8 (d[2], d[3]) coefficients 2q, 2q + 1 for R = 8, and 4q + 2h, 4q + 2h + 1 of half h for R = 16.
template <class T, int R>
__device__ void across_basis(uint2 (&fragments)[R / 8], const void* basis, const Lane& lane) {
#pragma unroll
    for (int h = 0; h < R / 8; h++) {
        const int row = R == 8 ? lane.g : lane.g / 2 * 4 + 2 * h + lane.g % 2;
        const T* at = static_cast<const T*>(basis) + row * SIDE + 2 * lane.q;
        fragments[h] = make_uint2(*reinterpret_cast<const unsigned*>(at), *reinterpret_cast<const unsigned*>(at + 8));
    }
}

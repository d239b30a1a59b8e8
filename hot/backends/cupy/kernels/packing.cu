// Two 4-bit codes a byte: byte = even & 15 | odd << 4, and back: even = byte << 4 >> 4, odd = byte >> 4, both with sign. A
// thread takes 16 codes of a row.

#include "memory.cuh"

struct Packing {
    const unsigned char* source;
    unsigned char* target;  // dense
    long long rows, k;      // codes of a row
    long long row_step, step;  // of the source
    int dense_source, dense_target;  // chunks may be moved at once
};

__global__ void __launch_bounds__(256) pack_kernel(Packing p) {
    const long long length = (p.k + 1) / 2, chunks = ceil_div(length, 8), units = p.rows * chunks;
    for (long long unit = blockIdx.x * 256ll + threadIdx.x; unit < units; unit += gridDim.x * 256ll) {
        const long long row = unit / chunks, at = unit % chunks * 8;
        unsigned char code[16], byte[8];
        load_chunk<16>(code, p.source + row * p.row_step + 2 * at * p.step, p.step, p.k - 2 * at, p.dense_source);
#pragma unroll
        for (int i = 0; i < 8; ++i) byte[i] = (code[2 * i] & 15) | (code[2 * i + 1] << 4);
        store_chunk<8>(p.target + row * length + at, byte, length - at, p.dense_target);
    }
}

__global__ void __launch_bounds__(256) unpack_kernel(Packing p) {
    const long long length = (p.k + 1) / 2, chunks = ceil_div(length, 8), units = p.rows * chunks;
    for (long long unit = blockIdx.x * 256ll + threadIdx.x; unit < units; unit += gridDim.x * 256ll) {
        const long long row = unit / chunks, at = unit % chunks * 8;
        unsigned char code[16], byte[8];
        load_chunk<8>(byte, p.source + row * p.row_step + at * p.step, p.step, length - at, p.dense_source);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            code[2 * i] = static_cast<signed char>(byte[i] << 4) >> 4;
            code[2 * i + 1] = static_cast<signed char>(byte[i]) >> 4;
        }
        store_chunk<16>(p.target + row * p.k + 2 * at, code, p.k - 2 * at, p.dense_target);
    }
}

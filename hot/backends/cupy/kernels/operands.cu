// Operands of products: two readings in two launches, or a small matrix's only one in one. See operands.cuh.
#include "coder.cuh"
#include "largest.cuh"

// Whoever is the last to look at a column or a row makes its scale; likewise the bias.
template <class T, int ALONG, int ACROSS, int R, bool SUMS>
__global__ void __launch_bounds__(THREADS, 2) largest_kernel(const Operands p) {
    auto& wide = *reinterpret_cast<float(*)[WARPS][COLUMNS]>(memory + Strips<T>::BYTES);
    const Lane lane;
    Strips<T> strips(p, lane);
    Largest<T, ALONG, ACROSS, R, SUMS, BEFORE> largest(p, lane);
    for (; strips.tile < strips.end; strips.advance()) {
        const Strip x = strips.get();
        largest.look(p, x, strips.rows, strips.panel(), lane);
    }
    largest.publish(p, strips.panel(), strips.group(), wide, lane);
    if ((ACROSS == ROW || SUMS) && is_last(p.counters + strips.panel(), strips.groups())) {
        const int column = strips.column + threadIdx.x;
        if (ACROSS == ROW && threadIdx.x < COLUMNS && column < p.columns)
            settle(p.across_top + column, p.across_scale + column, p.across_limit);
        if (SUMS) put_bias<T>(p, strips.panel(), half_of_bias(p, strips.panel(), strips.groups()), wide);
    }
    if (ALONG == ROW && is_last(p.counters + p.panels + strips.group(), p.panels)) {
        for (int i = threadIdx.x; i < p.count * WARPS * SIDE; i += THREADS) {
            const Rows rows(p, strips.group() * p.count * WARPS + i / SIDE);
            const int row = rows.first + i % SIDE;
            if (i % SIDE < rows.left) settle(p.along_top + row, p.along_scale + row, p.along_limit);
        }
    }
}

template <class T, int ALONG, int ACROSS, int R, int ALONG_ROUNDING, int ACROSS_ROUNDING, int ALONG_HOLDER, int ACROSS_HOLDER>
__global__ void __launch_bounds__(THREADS, R == 8 ? 3 : 2) quantize_kernel(const Operands p) {
    auto& shared = *reinterpret_cast<Shared<ACROSS, R>*>(memory + Strips<T>::BYTES);
    const Lane lane;
    Strips<T> strips(p, lane);
    Coder<T, ALONG, ACROSS, R, ALONG_ROUNDING, ACROSS_ROUNDING, ALONG_HOLDER, ACROSS_HOLDER, BEFORE> coder(p, lane, shared);
    coder.prepare(strips.panel());
    for (; strips.tile < strips.end; strips.advance()) {
        const Strip x = strips.get();
        coder.code(x, strips.rows, strips.tile, strips.panel());
    }
}

// All programs come here before any goes on, and sees what the others wrote. It takes a cooperative launch: then they run at
// once, and the driver keeps a word for them, at the address in two registers of their environment, as its header driver_abi.h
// has it. The low bits of the word count to 0, the highest turns over when all are there.
__device__ void meet() {
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned low, high, before, now;
        asm("mov.u32 %0, %%envreg2; mov.u32 %1, %%envreg1;" : "=r"(low), "=r"(high));
        unsigned* word = reinterpret_cast<unsigned*>((static_cast<unsigned long long>(high) << 32 | low) + 4);
        const unsigned own = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u;
        asm volatile("atom.add.release.gpu.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(own) : "memory");
        do asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(now) : "l"(word) : "memory");
        while (((before ^ now) & 0x80000000u) == 0);
    }
    __syncthreads();
}

// Both in one, of a tile that stays in shared memory: scales a row alone, a program for every tile.
template <class T, int ALONG, int ACROSS, int R, bool SUMS, int ALONG_ROUNDING, int ACROSS_ROUNDING, int ALONG_HOLDER,
          int ACROSS_HOLDER>
__global__ void __launch_bounds__(THREADS, 2) both_kernel(const Operands p) {
    auto& wide = *reinterpret_cast<float(*)[WARPS][COLUMNS]>(memory + Strips<T>::BYTES);
    auto& shared = *reinterpret_cast<Shared<ACROSS, R>*>(memory + Strips<T>::BYTES);
    const Lane lane;
    Strips<T> strips(p, lane);
    Largest<T, ALONG, ACROSS, R, SUMS, HERE> largest(p, lane);
    Coder<T, ALONG, ACROSS, R, ALONG_ROUNDING, ACROSS_ROUNDING, ALONG_HOLDER, ACROSS_HOLDER, HERE> coder(p, lane, shared);
    const Strip x = strips.get();
    largest.look(p, x, strips.rows, strips.panel(), lane);
    largest.publish(p, strips.panel(), strips.group(), wide, lane);
    meet();
    const bool adds_up = SUMS && strips.group() == 0;
    const float half = adds_up ? half_of_bias(p, strips.panel(), strips.groups()) : 0.0f;  // on its way meanwhile
    coder.prepare(strips.panel());
    coder.code(x, strips.rows, strips.tile, strips.panel());
    if (adds_up) put_bias<T>(p, strips.panel(), half, wide);
}

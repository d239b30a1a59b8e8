// The threads of a block as coroutines. Blocks run one after another, every second one with its threads in reverse order, and
// warps run as far as they can alone, so that what is not waited for is not there. Shared memory begins as NaN.

#include <setjmp.h>
#include <ucontext.h>

#include <cstring>
#include <string>
#include <vector>

#include "cuda.h"

dim3 threadIdx, blockIdx, blockDim, gridDim;
alignas(16) unsigned char room[128 * 1024];

struct Barrier {
    int alive = 0, arrived = 0;
    long long passed = 0;
    void open_if_all() {
        if (arrived > 0 && arrived == alive) arrived = 0, ++passed;
    }
};
struct Thread {
    ucontext_t start;
    jmp_buf here;  // once it has started: swapcontext asks the system each time, this does not
    std::vector<char> stack;
    bool started, done;
    long long exchanges;
};

static std::vector<Thread> threads;
static std::vector<Barrier> warps;
static Barrier block;
static std::vector<unsigned char> slots;  // of exchanges: warp, parity, lane
static ucontext_t unused;
static jmp_buf scheduler;
static void (*kernel)();
static std::string failure;
static bool moved;

static void yield() {
    if (!_setjmp(threads[threadIdx.x].here)) _longjmp(scheduler, 1);
}

static void resume(Thread& thread) {
    if (_setjmp(scheduler)) return;
    if (thread.started) _longjmp(thread.here, 1);
    thread.started = true;
    swapcontext(&unused, &thread.start);
}

static void wait(Barrier& barrier) {
    const long long before = barrier.passed;
    ++barrier.arrived;
    barrier.open_if_all();
    while (barrier.passed == before) yield();
    moved = true;
}

void __syncthreads() { wait(block); }
void __syncwarp() { wait(warps[threadIdx.x / 32]); }

void exchange(void* value, unsigned long size, int apart) {
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warps[warp].alive != 32) failure = "a shuffle without all lanes of its warp";
    // two sets of slots: whoever writes the next value waits for nobody who still reads this one
    unsigned char* own = slots.data() + (warp * 2 + threads[threadIdx.x].exchanges++ % 2) * 32 * 16;
    std::memcpy(own + lane * 16, value, size);
    wait(warps[warp]);
    std::memcpy(value, own + (lane ^ apart) * 16, size);
}

static void enter() {
    kernel();
    threads[threadIdx.x].done = moved = true;
    for (Barrier* barrier : {&block, &warps[threadIdx.x / 32]}) --barrier->alive, barrier->open_if_all();
    _longjmp(scheduler, 1);
}

static void run_block(unsigned count, bool reversed) {
    std::memset(room, 0xFF, sizeof(room));
    threads.resize(count);
    warps.assign((count + 31) / 32, Barrier());
    slots.assign(warps.size() * 2 * 32 * 16, 0);
    block = Barrier();
    for (unsigned i = 0; i < count; ++i) {
        Thread& thread = threads[i];
        thread.stack.resize(64 * 1024);
        thread.started = thread.done = false, thread.exchanges = 0;
        getcontext(&thread.start);
        thread.start.uc_stack.ss_sp = thread.stack.data();
        thread.start.uc_stack.ss_size = thread.stack.size();
        thread.start.uc_link = nullptr;
        makecontext(&thread.start, enter, 0);
        ++block.alive, ++warps[i / 32].alive;
    }
    for (bool stuck = false; block.alive > 0 && !stuck;) {
        stuck = true;
        for (unsigned n = 0; n < count; n += 32) {  // each warp as far as it can go alone
            do {
                moved = false;
                for (unsigned m = n; m < n + 32 && m < count; ++m) {
                    threadIdx.x = reversed ? count - 1 - m : m;
                    if (!threads[threadIdx.x].done) resume(threads[threadIdx.x]);
                }
                stuck = stuck && !moved;
            } while (moved);
        }
        if (stuck) failure = "threads wait for one another";
    }
}

const char* run(void (*body)(), unsigned grid, unsigned count) {
    kernel = body, gridDim.x = grid, blockDim.x = count;
    failure.clear();
    for (blockIdx.x = 0; blockIdx.x < grid && failure.empty(); ++blockIdx.x) run_block(count, blockIdx.x % 2);
    return failure.c_str();
}

// What this machine can do at most, measured: multiply-adds, bf16 dot products, and copying memory.

#include <time.h>

#include "amx.h"
#include "parallel.h"
#include "vector.h"

namespace {

// Two operations a cycle times a latency of up to six cycles, and some to spare where registers allow.
constexpr int CHAINS = W == 16 ? 16 : 12;
constexpr int STEPS = 1 << 16;  // about 0.1 ms, so that the clock's resolution does not matter

double now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

struct FusedMultiplyAdd {
    static constexpr double flops = 2.0 * W;
    INLINE F step(F acc, F a, F b) { return madd(a, b, acc); }
};

#ifdef __AVX512BF16__
struct PairDot {
    static constexpr double flops = 4.0 * W;
    INLINE F step(F acc, F a, F b) { return dot_pairs(acc, a, b); }
};
#endif

struct Rate {
    double seconds;  // how long each thread runs
    double total;    // sum over threads, per second
    pthread_mutex_t mutex;
};

void add_to_total(Rate& rate, double best) {
    pthread_mutex_lock(&rate.mutex);
    rate.total += best;
    pthread_mutex_unlock(&rate.mutex);
}

// Independent chains in registers, until the time is up; adds this thread's best rate to the total.
template <class Operation>
void compute(void* data) {
    Rate& rate = *(Rate*)data;
    F acc[CHAINS];
#pragma GCC unroll 16
    for (int i = 0; i < CHAINS; ++i) acc[i] = set1((float)i);  // equal chains would be merged into one
    F a = set1(1.0f), b = set1(1e-6f);
    double best = 0.0;
    for (const double end = now() + rate.seconds; now() < end;) {
        const double start = now();
        for (int s = 0; s < STEPS; ++s) {
#pragma GCC unroll 16
            for (int i = 0; i < CHAINS; ++i) acc[i] = Operation::step(acc[i], a, b);
            // The compiler may not know the operands, nor merge the steps.
            __asm__ volatile("" : : "r"(&a), "r"(&b) : "memory");
        }
        const double flops = Operation::flops * CHAINS * STEPS / (now() - start);
        if (flops > best) best = flops;
    }
    float sink[W];
#pragma GCC unroll 16
    for (int i = 0; i < CHAINS; ++i) {
        store(sink, acc[i]);
        __asm__ volatile("" : : "r"(sink) : "memory");
    }
    add_to_total(rate, best);
}

#if HAS_AMX
// Four chains of products of registers that stay as they are.
void compute_on_amx(void* data) {
    constexpr int PRODUCTS = 4;
    constexpr double flops = 4.0 * AMX_ROWS * AMX_ROWS * AMX_ROWS * PRODUCTS * STEPS;
    const AmxSession session;
    AMX_ZERO(0);
    AMX_ZERO(1);
    AMX_ZERO(2);
    AMX_ZERO(3);
    AMX_ZERO(4);
    AMX_ZERO(5);
    AMX_ZERO(6);
    AMX_ZERO(7);
    double best = 0.0;
    Rate& rate = *(Rate*)data;
    for (const double end = now() + rate.seconds; now() < end;) {
        const double start = now();
        for (int s = 0; s < STEPS; ++s) {
            AMX_DOT(0, 4, 6);
            AMX_DOT(1, 4, 7);
            AMX_DOT(2, 5, 6);
            AMX_DOT(3, 5, 7);
        }
        const double reached = flops / (now() - start);
        if (reached > best) best = reached;
    }
    add_to_total(rate, best);
}
#endif

template <class Operation>
double total_rate(int threads, double seconds) {
    Rate rate = {seconds, 0.0, PTHREAD_MUTEX_INITIALIZER};
    run_on_every_thread(compute<Operation>, &rate, threads);
    return rate.total;
}

struct Copy {
    const char* from;
    char* to;
    size_t bytes;
    int parts, next;
};

void copy_part(void* data) {
    Copy& copy = *(Copy*)data;
    const int part = __atomic_fetch_add(&copy.next, 1, __ATOMIC_RELAXED);
    if (part >= copy.parts) return;
    const size_t length = copy.bytes / copy.parts;
    memcpy(copy.to + part * length, copy.from + part * length, length);
}

// Shares are dealt out as threads come for them: equal ones would make all wait for a thread that began late.
constexpr size_t READ_WORDS = 1 << 15;

struct Read {
    const uint64_t* from;
    size_t words, next;
    uint64_t sum;  // so that what is read is needed
};

void read_shares(void* data) {
    Read& read = *(Read*)data;
    uint64_t sum = 0;
    for (;;) {
        const size_t begin = __atomic_fetch_add(&read.next, READ_WORDS, __ATOMIC_RELAXED);
        if (begin >= read.words) break;
        const size_t end = begin + READ_WORDS < read.words ? begin + READ_WORDS : read.words;
        for (size_t i = begin; i < end; ++i) sum += read.from[i];
    }
    __atomic_fetch_add(&read.sum, sum, __ATOMIC_RELAXED);
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// FLOP/s of fp32 multiply-adds (two operations each), all threads together.
EXPORT double flashmoe_peak_fp32(int threads, double seconds) {
    return total_rate<FusedMultiplyAdd>(threads, seconds);
}

// The same for bf16 dot products with fp32 sums, on the matrix unit where there is one; 0 where the CPU has neither.
EXPORT double flashmoe_peak_bf16(int threads, double seconds) {
#if HAS_AMX
    Rate rate = {seconds, 0.0, PTHREAD_MUTEX_INITIALIZER};
    run_on_every_thread(compute_on_amx, &rate, threads);
    return rate.total;
#elif defined(__AVX512BF16__)
    return total_rate<PairDot>(threads, seconds);
#else
    (void)threads;
    (void)seconds;
    return 0.0;
#endif
}

// Bytes read and written per second while copying `bytes` from one buffer to another, the best of `repeats`.
EXPORT double flashmoe_peak_copy(const void* from, void* to, size_t bytes, int threads, int repeats) {
    double best = 0.0;
    for (int i = 0; i < repeats; ++i) {
        Copy copy = {(const char*)from, (char*)to, bytes, threads, 0};
        const double start = now();
        run_on_every_thread(copy_part, &copy, threads);
        const double rate = 2.0 * bytes / (now() - start);
        if (rate > best) best = rate;
    }
    return best;
}

// Bytes read per second, in the order in which they lie.
EXPORT double flashmoe_peak_read(const void* from, size_t bytes, int threads) {
    Read read = {(const uint64_t*)from, bytes / sizeof(uint64_t), 0, 0};
    const double start = now();
    run_on_every_thread(read_shares, &read, threads);
    const double seconds = now() - start;
    return read.sum == 1 ? 0.0 : bytes / seconds;
}

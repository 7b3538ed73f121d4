// Four lanes in the compilers' own vector notation (GCC and Clang): SSE2, NEON, or whatever the target has.
#pragma once

#ifdef __aarch64__
#include <arm_neon.h>
#endif

typedef float F __attribute__((vector_size(16)));
typedef int32_t I __attribute__((vector_size(16)));
typedef uint32_t U __attribute__((vector_size(16)));
constexpr int W = 4;

#ifdef __aarch64__
constexpr int MAX_COLUMNS = 4;
constexpr int rows_for(int columns) { return columns == 4 ? 6 : columns == 3 ? 8 : columns == 2 ? 12 : 16; }
#else
constexpr int MAX_COLUMNS = 2;
constexpr int rows_for(int columns) { return columns == 2 ? 6 : 12; }
#endif
constexpr int WIDE_COLUMNS = MAX_COLUMNS;

INLINE F load(const float* p) {
    F x;
    memcpy(&x, p, sizeof x);
    return x;
}
INLINE void store(float* p, F x) { memcpy(p, &x, sizeof x); }
INLINE F set1(float x) { return F{x, x, x, x}; }
INLINE F add(F a, F b) { return a + b; }
INLINE F sub(F a, F b) { return a - b; }
INLINE F mul(F a, F b) { return a * b; }
INLINE F div(F a, F b) { return a / b; }
#ifdef __aarch64__
INLINE F madd(F a, F b, F c) { return vfmaq_f32(c, a, b); }
#else
INLINE F madd(F a, F b, F c) { return a * b + c; }
#endif

INLINE F select(I mask, F x, F y) { return (F)(((I)x & mask) | ((I)y & ~mask)); }

INLINE F max(F a, F b) { return select(a > b, a, b); }

INLINE F select_equal(F a, F b, F x, F y) { return select(a == b, x, y); }

INLINE F keep_from(F x, int lane) {
    const I index = {0, 1, 2, 3};
    return select(index >= lane, x, set1(-__builtin_inff()));
}

// The low bits are then n + SPARE with the exponent's bias. Polynomials give 2^(f - SPARE), so that one product takes n as
// far as the subnormal numbers with a power that is a normal number, or zero at LOWEST - 1.
constexpr int SPARE = 24;
constexpr float ROUND_MAGIC = ROUND_BASE + 127 + SPARE;

// Zeros come from a power of zero: a product that underflows is slow on some processors.
INLINE F bounded(F t) { return max(set1(LOWEST - 1), t); }

INLINE F times_power(F x, F rounded, F) { return mul(x, (F)((U)rounded << 23)); }

// Rows become columns: x[i] lane j <-> x[j] lane i.
INLINE void transpose(F x[W]) {
    const F a = x[0], b = x[1], c = x[2], d = x[3];
    x[0] = F{a[0], b[0], c[0], d[0]};
    x[1] = F{a[1], b[1], c[1], d[1]};
    x[2] = F{a[2], b[2], c[2], d[2]};
    x[3] = F{a[3], b[3], c[3], d[3]};
}

INLINE F sum_lanes(const F x[W]) {
    F y[W] = {x[0], x[1], x[2], x[3]};
    transpose(y);
    return add(add(y[0], y[1]), add(y[2], y[3]));
}

// W lanes from memory. Head dimensions are multiples of 8, so `count` is always W here.
template <class T>
INLINE F load_first(const T* p, int) {
    return F{widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3])};
}

INLINE float highest_lane(F x) {
    float highest = x[0];
    for (int i = 1; i < W; ++i) highest = x[i] > highest ? x[i] : highest;
    return highest;
}

// Head dimensions are multiples of 8: there are always 2 * W numbers.
INLINE F load_pairs(const BFloat16* p, int) {
    F x;
    memcpy(&x, p, sizeof x);
    return x;
}
INLINE F low_of_pairs(F x) { return (F)((U)x << 16); }
INLINE F high_of_pairs(F x) { return (F)((U)x & 0xffff0000u); }

template <class T>
INLINE void store_first(T* p, F x, int) {
    for (int i = 0; i < W; ++i) narrow(p + i, x[i]);
}

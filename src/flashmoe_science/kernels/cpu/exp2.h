// Powers of two, and of e, for the softmax, for arguments that are zero or below.
//
// t is split as n + f with |f| <= 1/2 by adding 1.5 * 2^23, which leaves n in the low bits of the sum; 2^f is
// a polynomial (minimax in relative error, with p(0) = 1 so that the largest score's weight is exact) and the
// vector type multiplies by 2^n. Only additions, shifts and multiply-adds: on current cores the rest overlaps with
// the multiply-adds of the matrix products. Reassociation (-ffast-math) would remove the split.
#pragma once

#include "vector.h"

template <int DEGREE>
struct Exp2Coefficients;

// Relative error 1.0e-4: for weights that are rounded to bf16 (2^-9) next.
template <>
struct Exp2Coefficients<3> {
    static constexpr float c[] = {1.0f, 0x1.62f5fap-1f, 0x1.f00c4cp-3f, 0x1.c2a218p-5f};
};

// Relative error 3.0e-9, 6.4e-8 with the rounding of its evaluation.
template <>
struct Exp2Coefficients<6> {
    static constexpr float c[] = {1.0f,           0x1.62e43p-1f,  0x1.ebfbdcp-3f, 0x1.c6af7cp-5f,
                                  0x1.3b2dep-7f, 0x1.5f082ep-10f, 0x1.416b5ep-13f};
};

constexpr float SPARE_FACTOR = 1.0f / (1 << SPARE);

// x[i] = 2^(f[i] - SPARE) for |f[i]| <= 1/2. N independent chains.
template <int DEGREE, int N>
INLINE void power_of_fraction(const F f[N], F x[N]) {
    using Coefficients = Exp2Coefficients<DEGREE>;
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) x[i] = set1(Coefficients::c[DEGREE] * SPARE_FACTOR);
#pragma GCC unroll 8
    for (int k = DEGREE - 1; k >= 0; --k)
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) x[i] = madd(x[i], f[i], set1(Coefficients::c[k] * SPARE_FACTOR));
}

// log2(e), and what its rounding leaves out.
constexpr float LOG2_E_HIGH = 0x1.715476p+0f;
constexpr float LOG2_E_LOW = 0x1.4ae0cp-26f;
// e to the power of this is 2^(LOWEST - 1), to the nearest eighth of an exponent.
constexpr float LOWEST_NATURAL = -104.665f;

// t = n + f, where n is a multiple of what `magic` rounds to and stands in the low bits of `rounded`. NATURAL: t is
// log2(e) * x. That product is rounded when n has been taken off it: before, it is larger, and so would its error be.
template <bool NATURAL, int N>
INLINE void split(const F x[N], float magic, F rounded[N], F f[N]) {
    F within[N];
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) within[i] = NATURAL ? max(set1(LOWEST_NATURAL), x[i]) : bounded(x[i]);
    if constexpr (NATURAL) {
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) rounded[i] = madd(within[i], set1(LOG2_E_HIGH), set1(magic));
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) f[i] = madd(within[i], set1(LOG2_E_HIGH), sub(set1(magic), rounded[i]));
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) f[i] = madd(within[i], set1(LOG2_E_LOW), f[i]);
    } else {
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) rounded[i] = add(within[i], set1(magic));
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) f[i] = sub(within[i], sub(rounded[i], set1(magic)));
    }
}

#ifdef HAS_POWERS_OF_EIGHTHS
// x[i] = 2^t[i], see exp2_to_zero: t is split as m / 8 + f with |f| <= 1/16, for which a polynomial of degree 3 is within
// 2.6e-8. The table's numbers, the polynomial and its product with them are rounded: 1.6e-7 in all.
template <bool NATURAL, int N>
INLINE void exp2_by_eighths(const F t[N], F x[N]) {
    constexpr float c[] = {1.0f, 0x1.62e432p-1f, 0x1.ec0c32p-3f, 0x1.c6a004p-5f};
    F f[N], rounded[N];
    split<NATURAL, N>(t, EIGHTHS_MAGIC, rounded, f);
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) x[i] = set1(c[3] * SPARE_FACTOR);
#pragma GCC unroll 4
    for (int k = 2; k >= 0; --k)
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) x[i] = madd(x[i], f[i], set1(c[k] * SPARE_FACTOR));
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) x[i] = mul(x[i], power_of_eighths(rounded[i]));
}
#endif

// x[i] = 2^t[i], or e^t[i] if NATURAL, for t[i] at most zero, subnormal numbers included; 0 for minus infinity, NaN for NaN.
template <int DEGREE, int N, bool NATURAL = false>
INLINE void exp2_to_zero(const F t[N], F x[N]) {
#ifdef HAS_POWERS_OF_EIGHTHS
    if constexpr (DEGREE == 6) {
        exp2_by_eighths<NATURAL, N>(t, x);
        return;
    }
#endif
    F f[N], rounded[N];
    split<NATURAL, N>(t, ROUND_MAGIC, rounded, f);
    power_of_fraction<DEGREE, N>(f, x);
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) x[i] = times_power(x[i], rounded[i], t[i]);
}

// Powers of two for the softmax, for arguments that are zero or below.
//
// t is split as n + f with |f| <= 1/2 by adding 1.5 * 2^23, which leaves n in the low bits of the sum; 2^f is
// a polynomial (minimax in relative error, with p(0) = 1 so that the largest score's weight is exact) and n
// is added to its exponent. Only additions, shifts and multiply-adds: on current cores the rest overlaps with
// the multiply-adds of the matrix products. Reassociation (-ffast-math) would remove the split.
#pragma once

#include "vector.h"

constexpr float ROUND_MAGIC = 12582912.0f;
// 2^-126, the smallest normal number: scores that far below the maximum count as that far.
constexpr float LOWEST = -126.0f;

template <int DEGREE>
struct Exp2Coefficients;

// Relative error 1.0e-4: for weights that are rounded to bf16 (2^-9) next.
template <>
struct Exp2Coefficients<3> {
    static constexpr float c[] = {1.0f, 0x1.62f5fap-1f, 0x1.f00c4cp-3f, 0x1.c2a218p-5f};
};

// Relative error 9.2e-8, before the rounding of its evaluation.
template <>
struct Exp2Coefficients<5> {
    static constexpr float c[] = {1.0f,           0x1.62e42ap-1f, 0x1.ebf9bcp-3f,
                                  0x1.c6b754p-5f, 0x1.3cea84p-7f, 0x1.5bb994p-10f};
};

// x[i] = 2^t[i], except: 0 where score[i] is minus infinity, NaN where it is NaN. N independent chains.
template <int DEGREE, int N>
INLINE void exp2_to_zero(const F t[N], const F score[N], F x[N]) {
    using Coefficients = Exp2Coefficients<DEGREE>;
    F f[N], biased[N];
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) f[i] = max(set1(LOWEST), t[i]);
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) biased[i] = add(f[i], set1(ROUND_MAGIC));
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) f[i] = sub(f[i], sub(biased[i], set1(ROUND_MAGIC)));
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) x[i] = set1(Coefficients::c[DEGREE]);
#pragma GCC unroll 8
    for (int k = DEGREE - 1; k >= 0; --k)
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) x[i] = madd(x[i], f[i], set1(Coefficients::c[k]));
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) x[i] = join_exponent(x[i], biased[i], score[i]);
}

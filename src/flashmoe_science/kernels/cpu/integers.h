// Products of 16-bit numbers in 16-bit integers, for processors that multiply more integers than fp32 numbers at a time and
// have no products of bf16: a bf16 number has eight significant bits and an fp16 number eleven, so times a power of two most
// of a row are integers as they are.
//
//   I                    a vector of W integers
//   bits_of, of_bits     the same bits as I and as F
//   all_integers(x)      x in every lane
//   halved(x)            x / 2, rounded down
//   as_integers(x)       rounded, the lanes' bits are integers then; as_floats and max_integers take such
//   integer_pairs(a, b)  lane i: the pair (a[i], b[i]), rounded
//   store_integers       W neighbouring 16-bit integers, rounded
//   rounded(x)           to the nearest integer, as the conversions do
//   all_at_most(x, y)    whether x is at most y in every lane; false where either is NaN
//   none_at_least(x, y)  whether x is at least y in no lane
//   select_at_most       per lane: a <= b ? x : y
#pragma once

#include "exp2.h"

#if defined(__AVX512F__) && defined(__AVX512VNNI__) && !defined(__AVX512BF16__)
#define HAS_INTEGERS 1
#include "integers_avx512.h"
#elif defined(__AVX2__) && !defined(__AVX512F__) && defined(__x86_64__)
#define HAS_INTEGERS 1
#include "integers_avx2.h"
#else
#define HAS_INTEGERS 0
#endif

#if HAS_INTEGERS

INLINE F lowest_integers() { return of_bits(all_integers(INT32_MIN)); }

// 2^n for n in -126 .. 127, which are the lanes' bits.
INLINE F power_of_two(I n) { return of_bits(shifted_left<23>(add_integers(n, all_integers(127)))); }

// The largest n with 2^n <= x, as bits; x is positive and normal.
INLINE I exponent_of(F x) { return sub_integers(shifted_right<23>(bits_of(x)), all_integers(127)); }

// x[i] = 2^(s[i] * slope + offset + BITS), whose exponent without BITS is from -120 up to zero, to 2.8e-6 of it.
template <int BITS, int N>
INLINE void integer_weights(const F s[N], F slope, F offset, F x[N]) {
    constexpr float c[] = {1.0f, 0x1.62e12cp-1f, 0x1.ec0378p-3f, 0x1.c9fc46p-5f, 0x1.3a02ccp-7f};
    constexpr float UNIT = 1 << BITS;
    const F to_round = add(offset, set1(ROUND_BASE));
    F rounded[N], f[N];
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) rounded[i] = madd(s[i], slope, to_round);
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) f[i] = sub(madd(s[i], slope, offset), sub(rounded[i], set1(ROUND_BASE)));
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) x[i] = set1(c[4] * UNIT);
#pragma GCC unroll 4
    for (int k = 3; k >= 0; --k)
#pragma GCC unroll 8
        for (int i = 0; i < N; ++i) x[i] = madd(x[i], f[i], set1(c[k] * UNIT));
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) {
        const I n = shifted_left<23>(bits_of(rounded[i]));
        x[i] = of_bits(add_integers(bits_of(x[i]), n));
    }
}

#endif

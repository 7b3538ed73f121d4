// Products of 16-bit numbers in 16-bit integers, for processors that multiply fp32 numbers eight at a time and integers
// sixteen: a bf16 number has eight significant bits and an fp16 number eleven, so times a power of two most of a row are
// integers as they are.
#pragma once

#include "exp2.h"

#if defined(__AVX2__) && !defined(__AVX512F__) && defined(__x86_64__)
#define HAS_INTEGERS 1
#else
#define HAS_INTEGERS 0
#endif

#if HAS_INTEGERS

// The lanes' bits are integers here.
INLINE F as_integers(F x) { return _mm256_castsi256_ps(_mm256_cvtps_epi32(x)); }
INLINE F as_floats(F x) { return _mm256_cvtepi32_ps(_mm256_castps_si256(x)); }
INLINE F max_integers(F a, F b) {
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
}
INLINE F lowest_integers() { return _mm256_castsi256_ps(_mm256_set1_epi32(INT32_MIN)); }

// Lane i: the pair (low[i], high[i]), rounded.
INLINE F integer_pairs(F low, F high) {
    const __m256i above = _mm256_slli_epi32(_mm256_cvtps_epi32(high), 16);
    return _mm256_castsi256_ps(_mm256_blend_epi16(_mm256_cvtps_epi32(low), above, 0xaa));
}

// W neighbouring 16-bit integers, rounded.
INLINE void store_integers(int16_t* p, F x) {
    const __m256i wide = _mm256_cvtps_epi32(x);
    const __m128i narrow = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    _mm_storeu_si128((__m128i*)p, narrow);
}

// To the nearest integer, as the conversions do.
INLINE F rounded(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

INLINE F absolute(F x) { return _mm256_andnot_ps(set1(-0.0f), x); }

INLINE F min(F a, F b) { return _mm256_min_ps(a, b); }

// Whether x is at most y in every lane; false where either is NaN.
INLINE bool all_at_most(F x, F y) { return _mm256_movemask_ps(_mm256_cmp_ps(x, y, _CMP_LE_OQ)) == 0xff; }

// Per lane: a <= b ? x : y.
INLINE F select_at_most(F a, F b, F x, F y) { return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LE_OQ)); }

// 2^n for n in -126 .. 127, which are the lanes' bits.
INLINE F power_of_two(__m256i n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}

// The largest n with 2^n <= x, as bits; x is positive and normal.
INLINE __m256i exponent_of(F x) {
    return _mm256_sub_epi32(_mm256_srli_epi32(_mm256_castps_si256(x), 23), _mm256_set1_epi32(127));
}

// Two neighbouring 16-bit integers of A times W pairs of B, added to 32-bit sums.
struct IntegerProduct {
    INLINE F broadcast(const char* a) {
        int x;
        memcpy(&x, a, sizeof x);
        return _mm256_castsi256_ps(_mm256_set1_epi32(x));
    }
    INLINE F accumulate(F acc, F a, F b) {
        // As one: compilers reorder integer sums and gather the products first, which do not fit the registers.
        F product;
        __asm__("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(acc), "=&x"(product) : "x"(a), "x"(b));
        return acc;
    }
};

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
        const __m256i n = _mm256_slli_epi32(_mm256_castps_si256(rounded[i]), 23);
        x[i] = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x[i]), n));
    }
}

#endif

#pragma once

#include <immintrin.h>

#include "bf16.h"

typedef __m512 F;
constexpr int W = 16;
constexpr int MAX_COLUMNS = 4;
constexpr int WIDE_COLUMNS = MAX_COLUMNS;

constexpr int rows_for(int columns) {
    return columns == 4 ? 6 : columns == 3 ? 8 : columns == 2 ? 12 : 16;
}

INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
INLINE void store(float* p, F x) { _mm512_storeu_ps(p, x); }
INLINE F set1(float x) { return _mm512_set1_ps(x); }
INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
INLINE F madd(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }

INLINE F select_equal(F a, F b, F x, F y) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ), y, x);
}

INLINE F keep_from(F x, int lane) {
    const uint32_t keep = lane <= 0 ? 0xffffu : lane >= W ? 0u : 0xffffu << lane;
    return _mm512_mask_blend_ps((__mmask16)keep, set1(-__builtin_inff()), x);
}

constexpr int SPARE = 0;
constexpr float ROUND_MAGIC = ROUND_BASE;

INLINE F bounded(F t) { return t; }

INLINE F times_power(F x, F rounded, F t) {
    const __mmask16 counts = _mm512_cmp_ps_mask(t, set1(LOWEST), _CMP_NLT_UQ);
    return _mm512_maskz_scalef_ps(counts, x, sub(rounded, set1(ROUND_MAGIC)));
}

// Rows become columns: x[i] lane j <-> x[j] lane i.
INLINE void transpose(F x[W]) {
    F a[W], b[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; i += 2) {
        a[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
        a[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < W; i += 4) {
        b[i] = _mm512_shuffle_ps(a[i], a[i + 2], 0x44);
        b[i + 1] = _mm512_shuffle_ps(a[i], a[i + 2], 0xee);
        b[i + 2] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0x44);
        b[i + 3] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0xee);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 4; ++i) {
        a[i] = _mm512_shuffle_f32x4(b[i], b[i + 4], 0x88);
        a[i + 4] = _mm512_shuffle_f32x4(b[i], b[i + 4], 0xdd);
        a[i + 8] = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0x88);
        a[i + 12] = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 8; ++i) {
        x[i] = _mm512_shuffle_f32x4(a[i], a[i + 8], 0x88);
        x[i + 8] = _mm512_shuffle_f32x4(a[i], a[i + 8], 0xdd);
    }
}

// Halves of neighbouring pairs are added as they are brought together: 45 operations for 16 sums.
INLINE F sum_lanes(const F x[W]) {
    F quarter[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const F* const y = x + 4 * i;
        const F ab = add(_mm512_unpacklo_ps(y[0], y[1]), _mm512_unpackhi_ps(y[0], y[1]));
        const F cd = add(_mm512_unpacklo_ps(y[2], y[3]), _mm512_unpackhi_ps(y[2], y[3]));
        quarter[i] = add(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    }
    const F low = add(
        _mm512_shuffle_f32x4(quarter[0], quarter[1], 0x88), _mm512_shuffle_f32x4(quarter[0], quarter[1], 0xdd));
    const F high = add(
        _mm512_shuffle_f32x4(quarter[2], quarter[3], 0x88), _mm512_shuffle_f32x4(quarter[2], quarter[3], 0xdd));
    return add(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
}

INLINE __mmask16 first_lanes(int count) { return count >= W ? 0xffffu : (__mmask16)((1u << count) - 1); }

// The first `count` lanes from memory, zero in the others.
INLINE F load_first(const float* p, int count) { return _mm512_maskz_loadu_ps(first_lanes(count), p); }
INLINE F load_first(const Half* p, int count) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(count), p));
}
INLINE F load_first(const BFloat16* p, int count) {
    const __m256i bits = _mm256_maskz_loadu_epi16(first_lanes(count), p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

INLINE float highest_lane(F x) { return _mm512_reduce_max_ps(x); }

INLINE F load_pairs(const BFloat16* p, int count) { return load_first((const float*)p, count / 2); }
INLINE F low_of_pairs(F x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(x), 16)); }
INLINE F high_of_pairs(F x) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32((int)0xffff0000u)));
}

INLINE void store_first(float* p, F x, int count) { _mm512_mask_storeu_ps(p, first_lanes(count), x); }
INLINE void store_first(Half* p, F x, int count) {
    const __m256i bits = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_mask_storeu_epi16(p, first_lanes(count), bits);
}
INLINE void store_first(BFloat16* p, F x, int count) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i half = _mm512_add_epi32(_mm512_set1_epi32(0x7fff), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    __m512i rounded = _mm512_add_epi32(bits, half);
    rounded = _mm512_mask_blend_epi32(nan, rounded, _mm512_or_si512(bits, _mm512_set1_epi32(0x400000)));
    const __m256i narrow = _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
    _mm256_mask_storeu_epi16(p, first_lanes(count), narrow);
}

#if HAS_BF16
// Each 32-bit lane holds two bf16 numbers; acc += a.low * b.low + a.high * b.high.
INLINE F dot_pairs(F acc, F a, F b) { return bf16_dot(acc, _mm512_castps_si512(a), _mm512_castps_si512(b)); }

// Zero for each of the bf16 numbers that is finite, else NaN.
INLINE F times_zero_pairs(F x) {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    const __mmask32 infinite = _mm512_cmpeq_epi16_mask(_mm512_and_si512(_mm512_castps_si512(x), exponent), exponent);
    return _mm512_castsi512_ps(_mm512_maskz_mov_epi16(infinite, _mm512_set1_epi16(0x7fc0)));
}

// Lane i: (low[i], high[i]) rounded to bf16.
INLINE F pack_pairs(F low, F high) {
    const __m512i order = _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
        23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, bf16_rounded(high, low)));
}

// Numbers rounded to bf16.
INLINE F rounded_to_bf16(F x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16_rounded(x)), 16));
}

// Two rows of pairs become pairs of one number of each: of the first four of each eight numbers, and of the other four.
INLINE void pair_rows(F a, F b, F x[2]) {
    x[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(_mm512_castps_si512(a), _mm512_castps_si512(b)));
    x[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}

// W neighbouring bf16 numbers.
INLINE void store_rounded(BFloat16* p, F x) { _mm256_storeu_si256((__m256i*)p, bf16_rounded(x)); }

// Lane i: (low[i], high[i]), the first `count` lanes.
INLINE F interleave_first(const BFloat16* low, const BFloat16* high, int count) {
    const __mmask16 lanes = first_lanes(count);
    const __m512i a = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, low));
    const __m512i b = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(high ? lanes : 0, high));
    return _mm512_castsi512_ps(_mm512_or_si512(a, _mm512_slli_epi32(b, 16)));
}
#endif

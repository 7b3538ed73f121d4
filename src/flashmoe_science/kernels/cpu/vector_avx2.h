#pragma once

#include <immintrin.h>

typedef __m256 F;
constexpr int W = 8;
constexpr int MAX_COLUMNS = 2;
// By four rows: 7 loads for 12 multiply-adds in place of 8, worth 8 to 11 % beside a neighbour on the core.
constexpr int WIDE_COLUMNS = 3;

constexpr int rows_for(int columns) { return columns == 3 ? 4 : columns == 2 ? 6 : 12; }

INLINE F load(const float* p) { return _mm256_loadu_ps(p); }
INLINE void store(float* p, F x) { _mm256_storeu_ps(p, x); }
INLINE F set1(float x) { return _mm256_set1_ps(x); }
INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
INLINE F sub(F a, F b) { return _mm256_sub_ps(a, b); }
INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
INLINE F div(F a, F b) { return _mm256_div_ps(a, b); }
INLINE F madd(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
INLINE F max(F a, F b) { return _mm256_max_ps(a, b); }

INLINE F select_equal(F a, F b, F x, F y) { return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_EQ_OQ)); }

INLINE F keep_from(F x, int lane) {
    const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i drop = _mm256_cmpgt_epi32(_mm256_set1_epi32(lane), index);
    return _mm256_blendv_ps(x, set1(-__builtin_inff()), _mm256_castsi256_ps(drop));
}

// The low bits are then n + SPARE with the exponent's bias. Polynomials give 2^(f - SPARE), so that one product takes n as
// far as the subnormal numbers with a power that is a normal number, or zero at LOWEST - 1.
constexpr int SPARE = 24;
constexpr float ROUND_MAGIC = ROUND_BASE + 127 + SPARE;

// Zeros come from a power of zero: a product that underflows is slow on some processors.
INLINE F bounded(F t) { return max(set1(LOWEST - 1), t); }

INLINE F times_power(F x, F rounded, F) {
    return mul(x, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(rounded), 23)));
}

// A table of eight numbers is one permutation away: with it a polynomial need not go as far as a half.
#define HAS_POWERS_OF_EIGHTHS 1

// For `rounded` = m / 8 + EIGHTHS_MAGIC: 2^(m / 8 + SPARE), a normal number, or zero for m / 8 = LOWEST - 1.
constexpr float EIGHTHS_MAGIC = ROUND_BASE / 8 + 127 + SPARE;

INLINE F power_of_eighths(F rounded) {
    // The last digits of 2^(i / 8), less i at the place where the low bits of `rounded` add it to their exponent.
    const __m256i digits = _mm256_setr_epi32(
        0, 0x0b95c2 - (1 << 20), 0x1837f0 - (2 << 20), 0x25fed7 - (3 << 20), 0x3504f3 - (4 << 20), 0x45672a - (5 << 20),
        0x5744fd - (6 << 20), 0x6ac0c7 - (7 << 20));
    const __m256i bits = _mm256_castps_si256(rounded);
    const __m256i exponents = _mm256_slli_epi32(bits, 20);
    return _mm256_castsi256_ps(_mm256_add_epi32(exponents, _mm256_permutevar8x32_epi32(digits, bits)));
}

// Rows become columns: x[i] lane j <-> x[j] lane i.
INLINE void transpose(F x[W]) {
    F a[W], b[W];
#pragma GCC unroll 8
    for (int i = 0; i < W; i += 2) {
        a[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
        a[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < W; i += 4) {
        b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
        b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
        b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
        b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 4; ++i) {
        x[i] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
        x[i + 4] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
    }
}

INLINE F sum_lanes(const F x[W]) {
    const F low = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
    const F high = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
    return add(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}

// W lanes from memory. Head dimensions are multiples of 8, so `count` is always W here.
INLINE F load_first(const float* p, int) { return load(p); }
INLINE F load_first(const Half* p, int) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
INLINE F load_first(const BFloat16* p, int) {
    const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
}

INLINE float highest_lane(F x) {
    const __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 pair = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(pair, _mm_shuffle_ps(pair, pair, 1)));
}

INLINE F load_pairs(const BFloat16* p, int count) {
    if (count >= 2 * W) return load((const float*)p);
    const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_maskload_ps((const float*)p, _mm256_cmpgt_epi32(_mm256_set1_epi32(count / 2), index));
}
INLINE F low_of_pairs(F x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x), 16)); }
INLINE F high_of_pairs(F x) {
    return _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32((int)0xffff0000u)));
}

INLINE void store_first(float* p, F x, int) { store(p, x); }
INLINE void store_first(Half* p, F x, int) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE void store_first(BFloat16* p, F x, int) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i half = _mm256_add_epi32(_mm256_set1_epi32(0x7fff), odd);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i rounded = _mm256_blendv_epi8(_mm256_add_epi32(bits, half), quiet, nan);
    const __m256i high = _mm256_srli_epi32(rounded, 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
    _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(packed));
}

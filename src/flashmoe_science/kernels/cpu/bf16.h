// The processor's three instructions for bf16 (AVX512-BF16): dot products of pairs, and rounding of one vector and of two.
//
// EMULATE_BF16, a macro of the tests, computes the same with AVX-512 alone on processors that do not have them. The manual
// has rounding to the nearest, ties to even; numbers below the normal ones count as zero and become zero, with their sign.
// Of several NaN the instruction names the one that goes on; here it is any of them.
#pragma once

#include <immintrin.h>

#ifdef EMULATE_BF16

INLINE __m512i bf16_normal_or_zero(__m512i x) {
    const __mmask32 normal = _mm512_test_epi16_mask(x, _mm512_set1_epi16(0x7f80));
    return _mm512_mask_blend_epi16(normal, _mm512_and_si512(x, _mm512_set1_epi16((short)0x8000)), x);
}

INLINE __m512i fp32_normal_or_zero(__m512i x) {
    const __mmask16 small = _mm512_testn_epi32_mask(x, _mm512_set1_epi32(0x7f800000));
    return _mm512_mask_and_epi32(x, small, x, _mm512_set1_epi32((int)0x80000000u));
}

// a * b + c of eight numbers. A product of two bf16 numbers and its sum with an fp32 number round in fp64 only far below
// where they round in fp32. What would be below the normal numbers with an exponent without bounds is zero.
INLINE __m256 bf16_fused(__m256 a, __m256 b, __m256 c) {
    const __m512d exact = _mm512_fmadd_pd(_mm512_cvtps_pd(a), _mm512_cvtps_pd(b), _mm512_cvtps_pd(c));
    const __mmask8 tiny = _mm512_cmp_pd_mask(_mm512_abs_pd(exact), _mm512_set1_pd(0x1p-126 - 0x1p-151), _CMP_LT_OQ);
    const __m512i sign = _mm512_and_si512(_mm512_castpd_si512(exact), _mm512_set1_epi64((long long)(1ull << 63)));
    return _mm512_cvtpd_ps(_mm512_mask_mov_pd(exact, tiny, _mm512_castsi512_pd(sign)));
}

INLINE __m512 bf16_fused(__m512 a, __m512 b, __m512 c) {
    const __m256 low = bf16_fused(_mm512_castps512_ps256(a), _mm512_castps512_ps256(b), _mm512_castps512_ps256(c));
    const __m256 high = bf16_fused(
        _mm512_extractf32x8_ps(a, 1), _mm512_extractf32x8_ps(b, 1), _mm512_extractf32x8_ps(c, 1));
    return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
}

// The upper numbers of the pairs are added first. A call, as inlined it would double what compiling takes.
__attribute__((noinline)) static __m512 bf16_dot(__m512 acc, __m512i a, __m512i b) {
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
    const __m512i x = bf16_normal_or_zero(a), y = bf16_normal_or_zero(b);
    acc = _mm512_castsi512_ps(fp32_normal_or_zero(_mm512_castps_si512(acc)));
    acc = bf16_fused(
        _mm512_castsi512_ps(_mm512_and_si512(x, upper)), _mm512_castsi512_ps(_mm512_and_si512(y, upper)), acc);
    return bf16_fused(_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(y, 16)), acc);
}

INLINE __m256i bf16_rounded(__m512 x) {
    const __m512i bits = fp32_normal_or_zero(_mm512_castps_si512(x));
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i nearest = _mm512_add_epi32(bits, _mm512_add_epi32(_mm512_set1_epi32(0x7fff), odd));
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_blend_epi32(nan, nearest, quiet), 16));
}

// Those of `low` in the lower half.
INLINE __m512i bf16_rounded(__m512 high, __m512 low) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(bf16_rounded(low)), bf16_rounded(high), 1);
}

#elif HAS_BF16

INLINE __m512 bf16_dot(__m512 acc, __m512i a, __m512i b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }
INLINE __m256i bf16_rounded(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }
INLINE __m512i bf16_rounded(__m512 high, __m512 low) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

#endif

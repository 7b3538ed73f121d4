// What integers.h asks of vectors of sixteen lanes.
#pragma once

#include "vector.h"

typedef __m512i I;

INLINE I bits_of(F x) { return _mm512_castps_si512(x); }
INLINE F of_bits(I x) { return _mm512_castsi512_ps(x); }
INLINE I all_integers(int x) { return _mm512_set1_epi32(x); }
INLINE I add_integers(I a, I b) { return _mm512_add_epi32(a, b); }
INLINE I sub_integers(I a, I b) { return _mm512_sub_epi32(a, b); }
INLINE I halved(I x) { return _mm512_srai_epi32(x, 1); }
template <int BITS>
INLINE I shifted_left(I x) {
    return _mm512_slli_epi32(x, BITS);
}
template <int BITS>
INLINE I shifted_right(I x) {
    return _mm512_srli_epi32(x, BITS);
}

INLINE F as_integers(F x) { return of_bits(_mm512_cvtps_epi32(x)); }
INLINE F as_floats(F x) { return _mm512_cvtepi32_ps(bits_of(x)); }
INLINE F max_integers(F a, F b) { return of_bits(_mm512_max_epi32(bits_of(a), bits_of(b))); }

INLINE F integer_pairs(F low, F high) {
    const I above = _mm512_slli_epi32(_mm512_cvtps_epi32(high), 16);
    return of_bits(_mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_cvtps_epi32(low), above));
}

INLINE void store_integers(int16_t* p, F x) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x)));
}

INLINE F rounded(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE F absolute(F x) { return _mm512_abs_ps(x); }
INLINE F min(F a, F b) { return _mm512_min_ps(a, b); }

INLINE bool all_at_most(F x, F y) { return _mm512_cmp_ps_mask(x, y, _CMP_LE_OQ) == 0xffff; }
INLINE bool none_at_least(F x, F y) { return _mm512_cmp_ps_mask(x, y, _CMP_GE_OQ) == 0; }
INLINE F select_at_most(F a, F b, F x, F y) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LE_OQ), y, x); }

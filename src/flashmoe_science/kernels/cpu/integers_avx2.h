// What integers.h asks of vectors of eight lanes.
#pragma once

#include "vector.h"

typedef __m256i I;

INLINE I bits_of(F x) { return _mm256_castps_si256(x); }
INLINE F of_bits(I x) { return _mm256_castsi256_ps(x); }
INLINE I all_integers(int x) { return _mm256_set1_epi32(x); }
INLINE I add_integers(I a, I b) { return _mm256_add_epi32(a, b); }
INLINE I sub_integers(I a, I b) { return _mm256_sub_epi32(a, b); }
INLINE I halved(I x) { return _mm256_srai_epi32(x, 1); }
template <int BITS>
INLINE I shifted_left(I x) {
    return _mm256_slli_epi32(x, BITS);
}
template <int BITS>
INLINE I shifted_right(I x) {
    return _mm256_srli_epi32(x, BITS);
}

INLINE F as_integers(F x) { return _mm256_castsi256_ps(_mm256_cvtps_epi32(x)); }
INLINE F as_floats(F x) { return _mm256_cvtepi32_ps(_mm256_castps_si256(x)); }
INLINE F max_integers(F a, F b) {
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
}

INLINE F integer_pairs(F low, F high) {
    const __m256i above = _mm256_slli_epi32(_mm256_cvtps_epi32(high), 16);
    return _mm256_castsi256_ps(_mm256_blend_epi16(_mm256_cvtps_epi32(low), above, 0xaa));
}

INLINE void store_integers(int16_t* p, F x) {
    const __m256i wide = _mm256_cvtps_epi32(x);
    const __m128i narrow = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    _mm_storeu_si128((__m128i*)p, narrow);
}

INLINE F rounded(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE F absolute(F x) { return _mm256_andnot_ps(set1(-0.0f), x); }
INLINE F min(F a, F b) { return _mm256_min_ps(a, b); }

INLINE bool all_at_most(F x, F y) { return _mm256_movemask_ps(_mm256_cmp_ps(x, y, _CMP_LE_OQ)) == 0xff; }
INLINE bool none_at_least(F x, F y) { return _mm256_movemask_ps(_mm256_cmp_ps(x, y, _CMP_GE_OQ)) == 0; }
INLINE F select_at_most(F a, F b, F x, F y) { return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LE_OQ)); }

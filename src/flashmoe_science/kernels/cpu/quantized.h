// Scalar products of weight rows of 8 or 4 bits with token rows, all as they lie in memory.
//
// A row's weights come in groups along the depth, each with a scale: weight = scale * number. Numbers are widened to fp32, which
// is exact, and multiplied with the token; a group's sum is multiplied by its scale. So nothing is rounded but sums, and a
// row is what dot.h would make of the dequantised weights, or better.
//
//   int8   [row][depth]      numbers -128 to 127
//   int4   [row][depth / 2]  two in a byte, the first in the low half; numbers -8 to 7, stored as 0 to 15
#pragma once

#include "vector.h"

template <class A, class B>
struct is_same {
    static constexpr bool value = false;
};
template <class A>
struct is_same<A, A> {
    static constexpr bool value = true;
};

// 2 * W elements as two vectors. What is first and what is second is the same for weights and tokens: for int8 the halves,
// for int4 the even and the odd elements.
#if defined(__AVX512F__)
INLINE __m512i load_bytes(const char* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }

INLINE F widen_int8(const char* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
// A permutation looks at the low four bits only.
INLINE F int4_of(__m512i x) {
    const F numbers = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    return _mm512_permutexvar_ps(x, numbers);
}
INLINE void widen_int4(const char* p, F& even, F& odd) {
    const __m512i x = load_bytes(p);
    even = int4_of(x);
    odd = int4_of(_mm512_srli_epi32(x, 4));
}
INLINE void load_even_odd(const float* p, F& even, F& odd) {
    const __m512i first = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const F low = load(p), high = load(p + W);
    even = _mm512_permutex2var_ps(low, first, high);
    odd = _mm512_permutex2var_ps(low, _mm512_add_epi32(first, _mm512_set1_epi32(1)), high);
}
INLINE void load_even_odd(const BFloat16* p, F& even, F& odd) {
    const __m512i pairs = _mm512_loadu_si512(p);
    even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000u)));
}
INLINE void load_even_odd(const Half* p, F& even, F& odd) {
    const __m512i pairs = _mm512_loadu_si512(p);
    even = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(pairs));
    odd = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(pairs, 16)));
}
#elif defined(__AVX2__)
INLINE F widen_int8(const char* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
INLINE void widen_int4(const char* p, F& even, F& odd) {
    const __m256i x = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
    const __m256i middle = _mm256_set1_epi32(8);
    even = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_and_si256(x, _mm256_set1_epi32(15)), middle));
    odd = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_srli_epi32(x, 4), middle));
}
INLINE void load_even_odd(const float* p, F& even, F& odd) {
    const F low = load(p), high = load(p + W);
    const __m256d a = _mm256_castps_pd(_mm256_shuffle_ps(low, high, 0x88));
    const __m256d b = _mm256_castps_pd(_mm256_shuffle_ps(low, high, 0xdd));
    even = _mm256_castpd_ps(_mm256_permute4x64_pd(a, 0xd8));
    odd = _mm256_castpd_ps(_mm256_permute4x64_pd(b, 0xd8));
}
INLINE void load_even_odd(const BFloat16* p, F& even, F& odd) {
    const __m256i pairs = _mm256_loadu_si256((const __m256i*)p);
    even = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
    odd = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32((int)0xffff0000u)));
}
// The low 16 bits of each lane as fp16.
INLINE F half_lanes(__m256i x) {
    const __m256i packed = _mm256_packus_epi32(x, x);
    return _mm256_cvtph_ps(_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
}
INLINE void load_even_odd(const Half* p, F& even, F& odd) {
    const __m256i pairs = _mm256_loadu_si256((const __m256i*)p);
    even = half_lanes(_mm256_and_si256(pairs, _mm256_set1_epi32(0xffff)));
    odd = half_lanes(_mm256_srli_epi32(pairs, 16));
}
#else
INLINE F widen_int8(const char* p) {
    const signed char* x = (const signed char*)p;
    return F{(float)x[0], (float)x[1], (float)x[2], (float)x[3]};
}
INLINE void widen_int4(const char* p, F& even, F& odd) {
    const unsigned char* x = (const unsigned char*)p;
    even = F{(float)(x[0] & 15), (float)(x[1] & 15), (float)(x[2] & 15), (float)(x[3] & 15)} - set1(8.0f);
    odd = F{(float)(x[0] >> 4), (float)(x[1] >> 4), (float)(x[2] >> 4), (float)(x[3] >> 4)} - set1(8.0f);
}
template <class T>
INLINE void load_even_odd(const T* p, F& even, F& odd) {
    even = F{widen(p[0]), widen(p[2]), widen(p[4]), widen(p[6])};
    odd = F{widen(p[1]), widen(p[3]), widen(p[5]), widen(p[7])};
}
#endif

#if HAS_BF16
// Numbers of 4 bits as bf16 by the low four bits of words. A permutation looks at five: the table stands there twice.
INLINE __m512i bfloat16_of_int4(__m512i x) {
    return _mm512_permutexvar_epi16(x, _mm512_broadcast_i64x4(_mm256_setr_epi16(
        (short)0xc100, (short)0xc0e0, (short)0xc0c0, (short)0xc0a0, (short)0xc080, (short)0xc040, (short)0xc000,
        (short)0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0)));
}
#endif

struct Int8Weights {
    static constexpr int BITS = 8;
    static constexpr int STEP = 2 * W;
#if HAS_BF16
    // 2 * W numbers in their order, which bfloat16 has all of.
    INLINE void store_bfloat16(const char* row, int depth, BFloat16* to) {
        _mm512_storeu_si512(to, bf16_rounded(widen_int8(row + depth + W), widen_int8(row + depth)));
    }
#endif
    INLINE F accumulate(F sum, F a, F b) { return madd(a, b, sum); }
    INLINE void load_pair(const char* row, int depth, F& first, F& second) {
        first = widen_int8(row + depth);
        second = widen_int8(row + depth + W);
    }
    template <class T>
    INLINE void load_token(const T* token, F& first, F& second) {
        first = load_first(token, W);
        second = load_first(token + W, W);
    }
};

struct Int4Weights {
    static constexpr int BITS = 4;
    static constexpr int STEP = 2 * W;
    INLINE F accumulate(F sum, F a, F b) { return madd(a, b, sum); }
    INLINE void load_pair(const char* row, int depth, F& first, F& second) { widen_int4(row + (depth >> 1), first, second); }
    template <class T>
    INLINE void load_token(const T* token, F& first, F& second) { load_even_odd(token, first, second); }
#if HAS_BF16
    INLINE void store_bfloat16(const char* row, int depth, BFloat16* to) {
        const __m512i x = load_bytes(row + (depth >> 1));
        _mm512_storeu_si512(to, bfloat16_of_int4(_mm512_or_si512(x, _mm512_slli_epi32(x, 12))));
    }
#endif
};

#if HAS_BF16
// Numbers of 4 bits are exact as bf16, so that tokens of that type take dot products of pairs: of even elements, then of odd.
struct Int4Pairs {
    static constexpr int BITS = 4;
    static constexpr int STEP = 4 * W;
    INLINE F accumulate(F sum, F a, F b) { return dot_pairs(sum, a, b); }
    INLINE void load_pair(const char* row, int depth, F& even, F& odd) {
        const __m512i x = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)(row + (depth >> 1))));
        even = _mm512_castsi512_ps(bfloat16_of_int4(x));
        odd = _mm512_castsi512_ps(bfloat16_of_int4(_mm512_srli_epi16(x, 4)));
    }
    INLINE void load_token(const BFloat16* token, F& even, F& odd) {
        const __m512i low = _mm512_loadu_si512(token), high = _mm512_loadu_si512(token + 2 * W);
        // Words of even elements: the low halves of 32-bit lanes, in order.
        const __m512i evens = _mm512_inserti64x4(
            _mm512_castsi256_si512(_mm512_cvtepi32_epi16(low)), _mm512_cvtepi32_epi16(high), 1);
        const __m512i odds = _mm512_inserti64x4(
            _mm512_castsi256_si512(_mm512_cvtepi32_epi16(_mm512_srli_epi32(low, 16))),
            _mm512_cvtepi32_epi16(_mm512_srli_epi32(high, 16)), 1);
        even = _mm512_castsi512_ps(evens);
        odd = _mm512_castsi512_ps(odds);
    }
};
#endif

// Some rows of a matrix. A thread that is done with them multiplies those that begin at `next` and `next_scales`.
template <class T>
struct WeightRows {
    const char *weights, *next;
    ptrdiff_t row_bytes;
    const T *scales, *next_scales;
    ptrdiff_t row_scales;  // from one row's to the next row's
    int count;
};

// Where the rows begin that are multiplied after `count` rows from `first` on.
template <class T>
INLINE const char* rows_after(const WeightRows<T>& rows, int first, int count) {
    return first + count < rows.count ? rows.weights + (first + count) * rows.row_bytes : rows.next;
}

// Rows times tokens of half a block: each has two accumulators, of its group and of the whole depth.
constexpr int QUANTIZED_SUMS = W / 2;

// sum[c * R + r], lane by lane, of rows first to first + R - 1 and C tokens. A group is a multiple of Weights::STEP elements.
template <class Weights, class T, int C>
INLINE void quantized_block(
    const WeightRows<T>& rows, int first, const char* const* tokens, int depth, int group, F* sum) {
    constexpr int R = QUANTIZED_SUMS / C;
    const ptrdiff_t row_bytes = rows.row_bytes;
    const char* const weights = rows.weights + first * row_bytes;
    const char* const after = rows_after(rows, first, R);
    const T* const scales = rows.scales + first * rows.row_scales;
#pragma GCC unroll 16
    for (int i = 0; i < R * C; ++i) sum[i] = set1(0.0f);
    for (int begin = 0, g = 0; begin < depth; begin += group, ++g) {
        F part[R * C];
#pragma GCC unroll 16
        for (int i = 0; i < R * C; ++i) part[i] = set1(0.0f);
        for (int d = begin; d < begin + group; d += Weights::STEP) {
            F x[C], y[C];
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) Weights::load_token((const T*)tokens[c] + d, x[c], y[c]);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                F first, second;
                Weights::load_pair(weights + r * row_bytes, d, first, second);
                // Rows are short, so the processor's own prefetching stops at the end of each.
                __builtin_prefetch(after + r * row_bytes + d * Weights::BITS / 8, 0, 2);
#pragma GCC unroll 4
                for (int c = 0; c < C; ++c) {
                    part[c * R + r] = Weights::accumulate(part[c * R + r], first, x[c]);
                    part[c * R + r] = Weights::accumulate(part[c * R + r], second, y[c]);
                }
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const F scale = set1(widen(scales[r * rows.row_scales + g]));
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) sum[c * R + r] = madd(part[c * R + r], scale, sum[c * R + r]);
        }
    }
}

// All rows with tokens from `first` on, C at a time; returns the first that is left.
template <class Weights, class T, int C>
static int quantized_tokens(
    const WeightRows<T>& rows, const char* const* tokens, int first, int count, int depth, int group, float* out,
    ptrdiff_t out_row) {
    constexpr int R = QUANTIZED_SUMS / C;
    const int last = first + (count - first) / C * C;
    for (int r = 0; r < rows.count; r += 2 * R)
        for (int t = first; t < last; t += C) {
            F sum[2 * QUANTIZED_SUMS];
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half)
                quantized_block<Weights, T, C>(
                    rows, r + half * R, tokens + t, depth, group, sum + half * QUANTIZED_SUMS);
            float total[W];
            store(total, sum_lanes(sum));
            for (int i = 0; i < W; ++i)
                out[(t + i % QUANTIZED_SUMS / R) * out_row + r + i / QUANTIZED_SUMS * R + i % R] = total[i];
        }
    return last;
}

// out[token][row] for `count` tokens and all rows, whose number is a multiple of 16.
template <class Weights, class T>
static void quantized_rows(
    const WeightRows<T>& rows, const char* const* tokens, int count, int depth, int group, float* out,
    ptrdiff_t out_row) {
#if HAS_BF16
    if constexpr (is_same<Weights, Int4Weights>::value && is_same<T, BFloat16>::value)
        if (group % Int4Pairs::STEP == 0) {
            quantized_rows<Int4Pairs, T>(rows, tokens, count, depth, group, out, out_row);
            return;
        }
#endif
    int t = 0;
    if constexpr (QUANTIZED_SUMS >= 4)
        t = quantized_tokens<Weights, T, QUANTIZED_SUMS / 2>(rows, tokens, t, count, depth, group, out, out_row);
    quantized_tokens<Weights, T, 1>(rows, tokens, t, count, depth, group, out, out_row);
}

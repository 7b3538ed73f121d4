// The rows of quantized_integers.h with AVX-512 and VNNI: 64 bytes are multiplied with 64, and fours of products added to 32
// bits, in one instruction.
//
// A lane of 32 bits sums eight elements, which have a unit of their own. It has a scale of its own, too, so that any group will do.
#pragma once

#include "quantized.h"

constexpr int INTEGER_STEP = 128;
// Elements of a lane.
constexpr int LANE = INTEGER_STEP / W;
// Rows that meet a step of a token before its next: more would ask for memory in more places at a time.
constexpr int INTEGER_ROWS = 8;
// 0x80 in each of a number's lowest three bytes.
constexpr int HALF_DIGITS = 0x808080;

// Every group is a multiple of this.
constexpr int LEAST_GROUP = 32;

INLINE bool is_integer_group(int64_t group) { return group > 0; }

// 128 elements of a token; the last step may have fewer, and zeros for the rest.
template <class T>
struct alignas(64) TokenStep {
    signed char digit[DIGITS][2][INTEGER_STEP / 2];  // of the even elements, and of the odd ones
    int32_t offset[W];  // what is added because weights of zero are stored as 8
    float unit[W];
    int32_t scale[W];  // which of the scales that meet the step, in the high half
    const T* element;
    int first_scale, count;  // of a row's scales; of the elements
    __mmask8 scales;
    bool exact;  // the elements are integers in their units
};

INLINE __m512i byte_products(__m512i sum, __m512i even, __m512i odd, const signed char digit[2][INTEGER_STEP / 2]) {
    const __m512i both = _mm512_dpbusd_epi32(sum, even, _mm512_load_si512(digit[0]));
    return _mm512_dpbusd_epi32(both, odd, _mm512_load_si512(digit[1]));
}

// Lane i: sum of the numbers stored in `bytes` times integers, of elements 8 * i to 8 * i + 7, and offset[i].
template <class T>
INLINE __m512i integer_products(__m512i bytes, const TokenStep<T>& token, __m512i offset) {
    const __m512i low = _mm512_set1_epi8(15), zero = _mm512_setzero_si512();
    const __m512i even = _mm512_and_si512(bytes, low), odd = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low);
    const __m512i third = byte_products(zero, even, odd, token.digit[2]);
    const __m512i second = byte_products(_mm512_slli_epi32(third, 8), even, odd, token.digit[1]);
    return byte_products(_mm512_add_epi32(_mm512_slli_epi32(second, 8), offset), even, odd, token.digit[0]);
}

// Lane i: the largest of the eight lanes that i is one of.
INLINE F largest_of_eight(F x) {
    x = max(x, _mm512_permute_ps(x, 0xb1));
    x = max(x, _mm512_permute_ps(x, 0x4e));
    return max(x, _mm512_shuffle_f32x4(x, x, 0xb1));
}

// Digits of 16 integers, of elements `at` to at + 15 of the step.
template <class T>
INLINE void store_digits(__m512i integers, TokenStep<T>& to, int at) {
    const __m512i half = _mm512_set1_epi32(HALF_DIGITS);
    const __m512i digits = _mm512_xor_si512(_mm512_add_epi32(integers, half), half);
    // In each 128 bits: pairs of a digit of two even or two odd elements; then the pairs of all four.
    const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, -1, -1, -1, -1));
    const __m512i words = _mm512_set_epi16(
        31, 23, 15, 7, 30, 22, 14, 6, 29, 21, 13, 5, 28, 20, 12, 4, 27, 19, 11, 3, 26, 18, 10, 2, 25, 17, 9, 1, 24, 16, 8, 0);
    alignas(64) char bytes[64];
    _mm512_store_si512(bytes, _mm512_permutexvar_epi16(words, _mm512_shuffle_epi8(digits, order)));
    for (int k = 0; k < DIGITS; ++k)
        for (int parity = 0; parity < 2; ++parity) memcpy(to.digit[k][parity] + at / 2, bytes + (2 * k + parity) * 8, 8);
}

// `count` elements, a multiple of LEAST_GROUP; before them the token has `begin`.
template <class T>
static void prepare_step(const T* from, int begin, int count, int group, TokenStep<T>& to) {
    to.element = from;
    to.count = count;
    to.first_scale = begin / group;
    to.scales = (__mmask8)((2 << ((begin + count - 1) / group - to.first_scale)) - 1);
    for (int i = 0; i < W; ++i) to.scale[i] = ((begin + i * LANE) / group - to.first_scale) << 16;
    bool exact = true;
    for (int at = 0; at < INTEGER_STEP; at += W) {
        const F x = at < count ? load_first(from + at, W) : set1(0.0f);
        const F most = largest_of_eight(_mm512_abs_ps(x));
        exact &= _mm512_cmp_ps_mask(most, set1(power(UNIT_RANGE)), _CMP_LE_OQ) == 0xffff;
        // In a unit for larger ones, smaller elements are no integers, but zeros are.
        const __m512i bits = _mm512_castps_si512(max(most, set1(power(-UNIT_RANGE))));
        const __m512i exponent = _mm512_and_si512(bits, _mm512_set1_epi32(0x7f800000));
        const __m512i unit = _mm512_sub_epi32(exponent, _mm512_set1_epi32((INTEGER_BITS - 1) << 23));
        const F scaled = mul(x, _mm512_castsi512_ps(_mm512_sub_epi32(_mm512_set1_epi32(254 << 23), unit)));
        const __m512i integers = _mm512_cvtps_epi32(scaled);
        exact &= _mm512_cmp_ps_mask(_mm512_cvtepi32_ps(integers), scaled, _CMP_EQ_OQ) == 0xffff;
        store_digits(integers, to, at);
        const __m512i ends = _mm512_setr_epi32(0, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
        _mm_storel_pi((__m64*)(to.unit + at / LANE), _mm512_castps512_ps128(_mm512_castsi512_ps(_mm512_permutexvar_epi32(ends, unit))));
    }
    to.exact = exact;
    const __m512i zeros = _mm512_set1_epi8((char)0x88), none = _mm512_setzero_si512();
    _mm512_store_si512(to.offset, _mm512_sub_epi32(none, integer_products(zeros, to, none)));
}

// A token's elements. What is made of them refers to them.
template <class T>
static void prepare_token(const T* from, TokenStep<T>* to, int depth, int group) {
    for (int d = 0; d < depth; d += INTEGER_STEP) {
        const int left = depth - d;
        prepare_step(from + d, d, left < INTEGER_STEP ? left : INTEGER_STEP, group, to[d / INTEGER_STEP]);
    }
}

// Lane i: the scale of its elements, in one row whose scales begin at `scales`.
template <class T>
INLINE __m512i scale_words(const T* scales, const TokenStep<T>& token) {
    const __m128i few = _mm_maskz_loadu_epi16(token.scales, scales + token.first_scale);
    return _mm512_maskz_permutexvar_epi16(0xaaaaaaaa, _mm512_load_si512(token.scale), _mm512_castsi128_si512(few));
}
INLINE F scale_lanes(const BFloat16* scales, const TokenStep<BFloat16>& token) {
    return _mm512_castsi512_ps(scale_words(scales, token));
}
INLINE F scale_lanes(const Half* scales, const TokenStep<Half>& token) {
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(scale_words(scales, token), 16)));
}

// The same of elements that are no integers, in fp32, and times their scales.
template <class T>
static __attribute__((noinline)) F wide_product(const char* weights, const T* scales, const TokenStep<T>& token) {
    F sum = set1(0.0f);
    for (int i = 0; i < token.count; i += Int4Weights::STEP) {
        F even, odd, x, y;
        Int4Weights::load_pair(weights, i, even, odd);
        Int4Weights::load_token(token.element + i, x, y);
        const F scale = set1(widen(scales[token.first_scale + (token.scale[i / LANE] >> 16)]));
        sum = madd(madd(odd, y, mul(even, x)), scale, sum);
    }
    return sum;
}

// sum[i] += of INTEGER_ROWS rows with one step of a token, lane by lane. Where it is not whole, nothing behind it is read.
template <bool whole, class T>
INLINE void integer_step(
    const char* weights, const char* after, ptrdiff_t row_bytes, const T* scales, ptrdiff_t row_scales,
    const TokenStep<T>& token, F* sum) {
    if (__builtin_expect(!token.exact, 0)) {
#pragma GCC unroll 8
        for (int i = 0; i < INTEGER_ROWS; ++i)
            sum[i] = add(sum[i], wide_product(weights + i * row_bytes, scales + i * row_scales, token));
        return;
    }
    const __m512i offset = _mm512_load_si512(token.offset);
    const F unit = load(token.unit);
    const __mmask64 present = ~(__mmask64)0 >> (INTEGER_STEP - token.count) / 2;
#pragma GCC unroll 8
    for (int i = 0; i < INTEGER_ROWS; ++i) {
        const char* const row = weights + i * row_bytes;
        __builtin_prefetch(after + i * row_bytes, 0, 2);
        const __m512i bytes = whole ? _mm512_loadu_si512(row) : _mm512_maskz_loadu_epi8(present, row);
        const F product = mul(_mm512_cvtepi32_ps(integer_products(bytes, token, offset)), unit);
        sum[i] = madd(product, scale_lanes(scales + i * row_scales, token), sum[i]);
    }
}

// sum[i]: of INTEGER_ROWS rows from `first` on with one token, lane by lane.
template <class T>
INLINE void integer_block(const WeightRows<T>& rows, int first, const TokenStep<T>* token, int depth, F* sum) {
    constexpr int BYTES = INTEGER_STEP / 2;
    const char* row = rows.weights + first * rows.row_bytes;
    const char* after = rows_after(rows, first, INTEGER_ROWS);
    const T* const scales = rows.scales + first * rows.row_scales;
#pragma GCC unroll 8
    for (int i = 0; i < INTEGER_ROWS; ++i) sum[i] = set1(0.0f);
    for (int d = INTEGER_STEP; d <= depth; d += INTEGER_STEP, ++token, row += BYTES, after += BYTES)
        integer_step<true, T>(row, after, rows.row_bytes, scales, rows.row_scales, *token, sum);
    if (depth % INTEGER_STEP != 0)
        integer_step<false, T>(row, after, rows.row_bytes, scales, rows.row_scales, *token, sum);
}

// As `quantized_rows` in quantized.h, of tokens that are prepared.
template <class T>
static void integer_rows(
    const WeightRows<T>& rows, const char* const* tokens, int count, int depth, int, float* out, ptrdiff_t out_row) {
    for (int r = 0; r < rows.count; r += W)
        for (int t = 0; t < count; ++t) {
            F sum[W];
#pragma GCC unroll 2
            for (int half = 0; half < W; half += INTEGER_ROWS)
                integer_block<T>(rows, r + half, (const TokenStep<T>*)tokens[t], depth, sum + half);
            store(out + t * out_row + r, sum_lanes(sum));
        }
}

// The rows of quantized_integers.h with AVX2: 32 bytes are multiplied with 32 and neighbours added to 16 bits, in one
// instruction. A run of one or two steps has one unit.
#pragma once

#include "quantized.h"

constexpr int INTEGER_STEP = 64;
// Of a run: sums of 16 bits hold four steps, those of 32 bits two.
constexpr int MOST_STEPS = 2;

INLINE bool is_integer_group(int64_t group) { return group > 0 && group % INTEGER_STEP == 0; }

// 64 elements of a token.
template <class T>
struct alignas(32) TokenStep {
    T element[INTEGER_STEP];
    signed char digit[DIGITS][2][INTEGER_STEP / 2];  // of the even elements, and of the odd ones
    // Of a run, in its first step:
    int32_t offset[W];  // what weights of zero, which are stored as 8, make
    float unit;         // 2^e; 0: the run is not integers
};

// Lane i: sum over the run of numbers stored in `weights` times integers, of elements 8 * i to 8 * i + 7 of each step.
template <int STEPS, class T>
INLINE __m256i integer_products(const char* weights, ptrdiff_t weight_step, const TokenStep<T>* token) {
    const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    __m256i sum[DIGITS];
#pragma GCC unroll 2
    for (int step = 0; step < STEPS; ++step) {
        const __m256i bytes = _mm256_loadu_si256((const __m256i*)(weights + step * weight_step));
        const __m256i even = _mm256_and_si256(bytes, low);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low);
#pragma GCC unroll 3
        for (int k = 0; k < DIGITS; ++k) {
            const __m256i* const digit = (const __m256i*)token[step].digit[k];
            const __m256i both = _mm256_add_epi16(_mm256_maddubs_epi16(even, digit[0]), _mm256_maddubs_epi16(odd, digit[1]));
            sum[k] = step == 0 ? both : _mm256_add_epi16(sum[k], both);
        }
    }
    const __m256i second = _mm256_slli_epi32(_mm256_madd_epi16(sum[1], ones), 8);
    const __m256i third = _mm256_slli_epi32(_mm256_madd_epi16(sum[2], ones), 16);
    return _mm256_add_epi32(_mm256_madd_epi16(sum[0], ones), _mm256_add_epi32(second, third));
}

// Bytes `at`, `at` + 8 and `at` + 4, `at` + 12 of each half: 8 numbers of 32 bits as bytes of the even ones, then of the odd.
INLINE void store_digits(__m256i numbers, signed char* even, signed char* odd) {
    const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 8, 4, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1));
    const __m256i bytes = _mm256_shuffle_epi8(numbers, order);
    const __m128i both = _mm_unpacklo_epi16(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
    const int first = _mm_cvtsi128_si32(both), second = _mm_extract_epi32(both, 1);
    memcpy(even, &first, sizeof first);
    memcpy(odd, &second, sizeof second);
}

// One run of a token.
template <int STEPS, class T>
static void prepare_run(const T* from, TokenStep<T>* to) {
    F largest = set1(0.0f);
    for (int step = 0; step < STEPS; ++step) {
        memcpy(to[step].element, from + step * INTEGER_STEP, sizeof to->element);
        for (int i = 0; i < INTEGER_STEP; i += W)
            largest = max(largest, _mm256_andnot_ps(set1(-0.0f), load_first(from + step * INTEGER_STEP + i, W)));
    }
    float lanes[W], most = 0.0f;
    store(lanes, largest);
    for (int i = 0; i < W; ++i) most = lanes[i] > most ? lanes[i] : most;
    to->unit = 0.0f;
    if (!(most >= power(-UNIT_RANGE) && most <= power(UNIT_RANGE))) return;
    int bits;
    memcpy(&bits, &most, sizeof bits);
    const int exponent = (bits >> 23) - 127 - (INTEGER_BITS - 1);
    bool exact = true;
    for (int step = 0; step < STEPS; ++step)
        for (int i = 0; i < INTEGER_STEP; i += W) {
            const F scaled = mul(load_first(to[step].element + i, W), set1(power(-exponent)));
            __m256i rest = _mm256_cvtps_epi32(scaled);
            exact &= _mm256_movemask_ps(_mm256_cmp_ps(_mm256_cvtepi32_ps(rest), scaled, _CMP_EQ_OQ)) == 0xff;
            for (int k = 0; k < DIGITS; ++k) {
                const __m256i digit = _mm256_srai_epi32(_mm256_slli_epi32(rest, 24), 24);
                store_digits(digit, to[step].digit[k][0] + i / 2, to[step].digit[k][1] + i / 2);
                rest = _mm256_srai_epi32(_mm256_sub_epi32(rest, digit), 8);
            }
        }
    if (!exact) return;
    to->unit = power(exponent);
    char zeros[INTEGER_STEP / 2];
    memset(zeros, 0x88, sizeof zeros);
    _mm256_storeu_si256((__m256i*)to->offset, integer_products<STEPS>(zeros, 0, to));
}

// The run's sum for one row of weights, lane by lane; its lanes are those of `integer_products`, or others.
template <int STEPS, class T>
INLINE F run_product(const char* weights, const TokenStep<T>* token) {
    if (token->unit != 0.0f) {
        const __m256i products = integer_products<STEPS>(weights, INTEGER_STEP / 2, token);
        const __m256i offset = _mm256_load_si256((const __m256i*)token->offset);
        return mul(_mm256_cvtepi32_ps(_mm256_sub_epi32(products, offset)), set1(token->unit));
    }
    F sum = set1(0.0f);
    for (int step = 0; step < STEPS; ++step)
        for (int i = 0; i < INTEGER_STEP; i += Int4Weights::STEP) {
            F even, odd, x, y;
            Int4Weights::load_pair(weights, step * INTEGER_STEP + i, even, odd);
            Int4Weights::load_token(token[step].element + i, x, y);
            sum = madd(odd, y, madd(even, x, sum));
        }
    return sum;
}

// `make` is called with the number of steps in a run, as a type.
template <int N>
struct Steps {
    static constexpr int COUNT = N;
};
template <class Make>
INLINE void with_steps(int group, Make make) {
    if (group % (MOST_STEPS * INTEGER_STEP) == 0) make(Steps<MOST_STEPS>());
    else make(Steps<1>());
}

// A token's elements, whose number is a multiple of `group`, and `group` of INTEGER_STEP.
template <class T>
static void prepare_token(const T* from, TokenStep<T>* to, int depth, int group) {
    with_steps(group, [&](auto steps) {
        for (int d = 0; d < depth; d += steps.COUNT * INTEGER_STEP)
            prepare_run<steps.COUNT>(from + d, to + d / INTEGER_STEP);
    });
}

// sum[i]: of W rows from `first` on with one token, lane by lane.
template <int STEPS, class T>
INLINE void integer_block(
    const WeightRows<T>& rows, int first, const TokenStep<T>* token, int depth, int group, F* sum) {
    const ptrdiff_t row_bytes = rows.row_bytes;
    const char* const weights = rows.weights + first * row_bytes;
    const char* const after = rows_after(rows, first, W);
    const T* const scales = rows.scales + first * rows.row_scales;
#pragma GCC unroll 8
    for (int i = 0; i < W; ++i) sum[i] = set1(0.0f);
    for (int begin = 0, g = 0; begin < depth; begin += group, ++g)
        for (int d = begin; d < begin + group; d += STEPS * INTEGER_STEP)
#pragma GCC unroll 8
            for (int i = 0; i < W; ++i) {
                __builtin_prefetch(after + i * row_bytes + d / 2, 0, 2);
                const F product = run_product<STEPS>(weights + i * row_bytes + d / 2, token + d / INTEGER_STEP);
                sum[i] = madd(product, set1(widen(scales[i * rows.row_scales + g])), sum[i]);
            }
}

// As `quantized_rows` in quantized.h, of tokens that are prepared.
template <class T>
static void integer_rows(
    const WeightRows<T>& rows, const char* const* tokens, int count, int depth, int group, float* out,
    ptrdiff_t out_row) {
    with_steps(group, [&](auto steps) __attribute__((always_inline)) {
        for (int r = 0; r < rows.count; r += W)
            for (int t = 0; t < count; ++t) {
                F sum[W];
                integer_block<steps.COUNT, T>(rows, r, (const TokenStep<T>*)tokens[t], depth, group, sum);
                store(out + t * out_row + r, sum_lanes(sum));
            }
    });
}

// Scalar products of weight rows and token rows, both as they lie in memory: row-major, depth contiguous.
//
// Lanes lie along the depth, so nothing is packed or transposed and one token costs no more lanes than many. A block
// of accumulators is summed across lanes at its end, some 45 operations for 16 products.
#pragma once

#include "vector.h"

// Elements of one type, multiplied in fp32.
template <class T>
struct WidenDot {
    typedef T Element;
    static constexpr int STEP = W;
    INLINE F load_part(const char* p, int count) { return load_first((const T*)p, count); }
    INLINE F accumulate(F acc, F a, F b) { return madd(a, b, acc); }
};

#if HAS_BF16
// Pairs of bf16 numbers, multiplied and added to fp32 sums in one instruction.
struct PairDot {
    typedef BFloat16 Element;
    static constexpr int STEP = 2 * W;
    INLINE F load_part(const char* p, int count) { return load_first((const float*)p, count / 2); }
    INLINE F accumulate(F acc, F a, F b) { return dot_pairs(acc, a, b); }
};
typedef PairDot BFloat16Dot;
#else
typedef WidenDot<BFloat16> BFloat16Dot;
#endif

// Accumulators in flight: enough to hide a multiply-add's latency, few enough for the registers.
constexpr int DOT_SUMS = W == 16 ? 16 : 8;
constexpr int DOT_TOKENS = W == 16 ? 4 : 2;
// Every number of weight rows is a multiple of this.
constexpr int DOT_ROWS = 16;
// Bytes of a row that are multiplied at a time, so that a block's rows stay in the first-level cache; each part's sum is
// added as a whole, which also makes the summation blocked.
constexpr int DOT_DEPTH_BYTES = 4096;

// out[token][row] (+)= sum over depth, of R = DOT_SUMS / C rows and C tokens. `depth` is a multiple of 16.
template <class Dot, int C>
INLINE void dot_block(
    const char* weights, ptrdiff_t weight_row, const char* const* tokens, ptrdiff_t offset, int depth, float* out,
    ptrdiff_t out_row, bool add_to) {
    constexpr int R = DOT_SUMS / C;
    constexpr int SIZE = (int)sizeof(typename Dot::Element);
    F sum[DOT_SUMS];
#pragma GCC unroll 16
    for (int i = 0; i < DOT_SUMS; ++i) sum[i] = set1(0.0f);
    const char* token[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) token[c] = tokens[c] + offset;
    const auto step = [&](int d, int count) __attribute__((always_inline)) {
        F x[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) x[c] = Dot::load_part(token[c] + d * SIZE, count);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const F w = Dot::load_part(weights + r * weight_row + d * SIZE, count);
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) sum[c * R + r] = Dot::accumulate(sum[c * R + r], w, x[c]);
        }
    };
    int d = 0;
    for (; d + Dot::STEP <= depth; d += Dot::STEP) step(d, Dot::STEP);
    if (d < depth) step(d, depth - d);
    float total[DOT_SUMS];
#pragma GCC unroll 4
    for (int i = 0; i < DOT_SUMS; i += W) store(total + i, sum_lanes(sum + i));
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c)
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) out[c * out_row + r] = add_to ? out[c * out_row + r] + total[c * R + r] : total[c * R + r];
}

// All rows with tokens from `first` on, C at a time; returns the first that is left.
template <class Dot, int C>
static int dot_tokens(
    const char* weights, ptrdiff_t weight_row, int rows, const char* const* tokens, int first, int count,
    ptrdiff_t offset, int depth, float* out, ptrdiff_t out_row, bool add_to) {
    constexpr int R = DOT_SUMS / C;
    const int last = first + (count - first) / C * C;
    if (first == last) return first;
    for (int r = 0; r < rows; r += R)
        for (int t = first; t < last; t += C)
            dot_block<Dot, C>(
                weights + r * weight_row, weight_row, tokens + t, offset, depth, out + t * out_row + r, out_row, add_to);
    return last;
}

// out[token][row] for `count` tokens and `rows` weight rows, weight_row bytes apart. `rows` is a multiple of DOT_ROWS.
template <class Dot>
static void dot_rows(
    const char* weights, ptrdiff_t weight_row, int rows, const char* const* tokens, int count, int depth, float* out,
    ptrdiff_t out_row) {
    constexpr int SIZE = (int)sizeof(typename Dot::Element);
    constexpr int PART = DOT_DEPTH_BYTES / SIZE;
    for (int begin = 0; begin < depth; begin += PART) {
        const ptrdiff_t offset = (ptrdiff_t)begin * SIZE;
        const int part = depth - begin < PART ? depth - begin : PART;
        int t = 0;
        if constexpr (DOT_TOKENS >= 4)
            t = dot_tokens<Dot, 4>(weights + offset, weight_row, rows, tokens, t, count, offset, part, out, out_row, begin > 0);
        t = dot_tokens<Dot, 2>(weights + offset, weight_row, rows, tokens, t, count, offset, part, out, out_row, begin > 0);
        dot_tokens<Dot, 1>(weights + offset, weight_row, rows, tokens, t, count, offset, part, out, out_row, begin > 0);
    }
}

// Products of a few query rows with rows of keys and values, wherever those lie: lanes lie along the head dimension, so that a
// row is read and widened once for all query rows.
#pragma once

#include "fetch.h"
#include "varlen_tasks.h"

namespace {

// Accumulators in flight: enough to hide a multiply-add's latency, few enough for the registers.
constexpr int FEW_SUMS = W == 16 ? 16 : 8;

// Where the rows of a block of keys, or of its values, lie for all heads of a task.
struct FewRows {
    const char* base;     // of the first head
    ptrdiff_t head_row;   // from head to head
    int heads, keys, bytes;
    ptrdiff_t key_row;    // from key to key of a page
    ptrdiff_t offset[BLOCK_KEYS];
};

// Asks for rows in the order in which they lie, a cache line at a time: products are in between, as a processor keeps few requests
// in flight and waits with more of them.
class FewFetch {
    const FewRows* rows;
    const char *at = nullptr, *end = nullptr;
    ptrdiff_t run = 0;    // bytes of a row; of all heads' rows of a key, where those lie side by side
    int outer = 0, inner = 0;  // how many: keys of heads where a key's rows lie closer together, else heads of keys
    bool keys_outside = true;
    int at_outer = 0, at_inner = 0;

    __attribute__((noinline)) void next_row() {
        if (at_outer == outer) {
            at = end = nullptr;
            return;
        }
        const int key = keys_outside ? at_outer : at_inner, head = keys_outside ? at_inner : at_outer;
        at = rows->base + rows->offset[key] + head * rows->head_row;
        end = at + run;
        if (++at_inner == inner) at_inner = 0, ++at_outer;
    }

public:
    explicit FewFetch(const FewRows* rows) : rows(rows) {
        if (!rows) return;
        const bool side_by_side = rows->head_row == rows->bytes;
        run = (ptrdiff_t)rows->bytes * (side_by_side ? rows->heads : 1);
        keys_outside = side_by_side || rows->head_row < rows->key_row;
        const int heads = side_by_side ? 1 : rows->heads;
        outer = keys_outside ? rows->keys : heads;
        inner = keys_outside ? heads : rows->keys;
        next_row();
    }
    __attribute__((always_inline)) void line() {
        if (at >= end) return;
        __builtin_prefetch(at, 0, 2);
        at += CACHE_LINE;
        if (at >= end) next_row();
    }
    // As many as so many bytes are.
    template <int BYTES>
    __attribute__((always_inline)) void lines() {
#pragma GCC unroll 16
        for (int i = 0; i < (BYTES + CACHE_LINE - 1) / CACHE_LINE; ++i) line();
    }
};

// How the numbers of a row become vectors of fp32: VECTORS of them from one load.
template <class T>
struct FewNumbers {
    static constexpr int VECTORS = 1;
    INLINE void load_some(const T* row, int count, F x[1]) { x[0] = load_first(row, count); }
};
// Pairs as they lie in memory, taken apart: all even elements of 2 * W, then all odd ones.
template <>
struct FewNumbers<BFloat16> {
    static constexpr int VECTORS = 2;
    INLINE void load_some(const BFloat16* row, int count, F x[2]) {
        const F pairs = load_pairs(row, count);
        x[0] = low_of_pairs(pairs);
        x[1] = high_of_pairs(pairs);
    }
};

// Whether values are multiplied as pairs of two keys, with weights rounded to bf16. One row alone is read from memory no faster.
template <class T, int R>
constexpr bool FEW_PAIRS = false;
#ifdef __AVX512BF16__
template <int R>
constexpr bool FEW_PAIRS<BFloat16, R> = R > 1;
#endif

// Where the sums of element d of a row are.
template <class T, bool PAIRS>
INLINE int few_position(int d) {
    const int step = d / (2 * W) * (2 * W), in_step = d % (2 * W);
    if constexpr (PAIRS) return step + in_step % 8 / 4 * W + in_step / 8 * 4 + in_step % 4;
    if constexpr (FewNumbers<T>::VECTORS == 2) return step + in_step % 2 * W + in_step / 2;
    return d;
}

// The same for the products of queries and keys, which may be pairs as they lie in memory: STEP elements of a row at a time.
template <class T>
struct FewKeys : FewNumbers<T> {
    static constexpr int STEP = FewNumbers<T>::VECTORS * W;
    INLINE F accumulate(F sum, F key, F query) { return madd(key, query, sum); }
};
#ifdef __AVX512BF16__
template <>
struct FewKeys<BFloat16> {
    static constexpr int VECTORS = 1;
    static constexpr int STEP = 2 * W;
    INLINE void load_some(const BFloat16* row, int count, F x[1]) { x[0] = load_pairs(row, count); }
    INLINE F accumulate(F sum, F key, F query) { return dot_pairs(sum, key, query); }
};
#endif

// A query as score_few multiplies it.
template <class T>
void load_few_query(const char* from, int head_dim, float* to) {
    typedef FewKeys<T> Keys;
    for (int d = 0; d < head_dim; d += Keys::STEP, to += Keys::VECTORS * W) {
        F x[Keys::VECTORS];
        Keys::load_some((const T*)from + d, head_dim - d, x);
        for (int v = 0; v < Keys::VECTORS; ++v) store(to + v * W, x[v]);
    }
}

// scores[r][k] = query[r] * key k, which lies offset[k] bytes behind `base`, for R rows.
template <class T, int R>
void score_few(
    const float* query, int query_row, const char* base, const ptrdiff_t* offset, int keys, int head_dim, float* scores,
    FewFetch& fetch) {
    typedef FewKeys<T> Keys;
    constexpr int AT_ONCE = W / R;
    FewFetch ahead = fetch;
    for (int k = 0; k < keys; k += AT_ONCE) {
        const T* row[AT_ONCE];
        F x[W];
#pragma GCC unroll 16
        for (int i = 0; i < AT_ONCE; ++i) row[i] = (const T*)(base + offset[smaller(k + i, keys - 1)]);
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) x[i] = set1(0.0f);
        const float* q = query;
        const auto step = [&](int d, int count) __attribute__((always_inline)) {
            F element[AT_ONCE][Keys::VECTORS];
#pragma GCC unroll 16
            for (int i = 0; i < AT_ONCE; ++i) Keys::load_some(row[i] + d, count, element[i]);
#pragma GCC unroll 2
            for (int v = 0; v < Keys::VECTORS; ++v)
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    const F of_row = load(q + r * query_row + v * W);
#pragma GCC unroll 16
                    for (int i = 0; i < AT_ONCE; ++i)
                        x[r * AT_ONCE + i] = Keys::accumulate(x[r * AT_ONCE + i], element[i][v], of_row);
                }
            q += Keys::VECTORS * W;
            ahead.lines<AT_ONCE * Keys::STEP * (int)sizeof(T)>();
        };
        int d = 0;
        for (; d + Keys::STEP <= head_dim; d += Keys::STEP) step(d, Keys::STEP);
        if (d < head_dim) step(d, head_dim - d);
        float total[W];
        store(total, sum_lanes(x));
        const int here = smaller(AT_ONCE, keys - k);
        for (int r = 0; r < R; ++r) memcpy(scores + r * BLOCK_KEYS + k, total + r * AT_ONCE, here * sizeof(float));
    }
    fetch = ahead;
}

// out[r] = out[r] * rescale[r] + sum[r], for C vectors of R rows.
template <int R, int C>
INLINE void add_to_rescaled(const F* sum, const float* rescale, float* out, int out_row) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
            float* const to = out + r * out_row + c * W;
            store(to, madd(load(to), set1(rescale[r]), sum[r * C + c]));
        }
}

// out[r] = out[r] * rescale[r] + weights[r] * values, for C vectors of R rows from element d on, `count` elements at most.
template <class T, int R, int C>
INLINE void add_few(
    const float* weights, const char* base, const ptrdiff_t* offset, int keys, int d, int count, const float* rescale,
    float* out, int out_row, FewFetch& fetch) {
    typedef FewNumbers<T> Numbers;
    F sum[R * C];
#pragma GCC unroll 16
    for (int i = 0; i < R * C; ++i) sum[i] = set1(0.0f);
    for (int k = 0; k < keys; ++k) {
        const T* const from = (const T*)(base + offset[k]) + d;
        F element[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; c += Numbers::VECTORS) Numbers::load_some(from + c * W, count - c * W, element + c);
        if (C * W * (int)sizeof(T) >= CACHE_LINE || k % 2 == 0) fetch.lines<C * W * (int)sizeof(T)>();
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const F weight = set1(weights[r * BLOCK_KEYS + k]);
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) sum[r * C + c] = madd(weight, element[c], sum[r * C + c]);
        }
    }
    add_to_rescaled<R, C>(sum, rescale, out + d, out_row);
}

#ifdef __AVX512BF16__
// The same with weights in bf16, two keys at a time; an odd last one is paired with zeros.
template <int R, int C>
INLINE void add_few_pairs(
    const float* weights, const char* base, const ptrdiff_t* offset, int keys, int d, int count, const float* rescale,
    float* out, int out_row, FewFetch& fetch) {
    F sum[R * C];
#pragma GCC unroll 16
    for (int i = 0; i < R * C; ++i) sum[i] = set1(0.0f);
    const auto add_keys = [&](int k, bool both) __attribute__((always_inline)) {
        const BFloat16* const low = (const BFloat16*)(base + offset[k]) + d;
        const BFloat16* const high = both ? (const BFloat16*)(base + offset[k + 1]) + d : low;
        F element[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; c += 2)
            pair_rows(
                load_pairs(low + c * W, count - c * W), both ? load_pairs(high + c * W, count - c * W) : set1(0.0f),
                element + c);
        fetch.lines<2 * C * W * (int)sizeof(BFloat16)>();
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            float pair = 0.0f;
            memcpy(&pair, (const BFloat16*)(weights + r * BLOCK_KEYS) + k, both ? 4 : 2);
            const F weight = set1(pair);
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) sum[r * C + c] = dot_pairs(sum[r * C + c], element[c], weight);
        }
    };
    int k = 0;
    for (; k + 2 <= keys; k += 2) add_keys(k, true);
    if (k < keys) add_keys(k, false);
    add_to_rescaled<R, C>(sum, rescale, out + d, out_row);
}
#endif

// The same for all elements. No more rows at a time than accumulators.
template <class T, int R, bool PAIRS>
void add_values_few(
    const float* weights, const char* base, const ptrdiff_t* offset, int keys, int value_dim, const float* rescale, float* out,
    int out_row, FewFetch& fetch) {
    FewFetch ahead = fetch;
    constexpr int VECTORS = FewNumbers<T>::VECTORS;
    constexpr int ROWS = smaller(R, FEW_SUMS / VECTORS);
    constexpr int C = smaller(FEW_SUMS / ROWS / VECTORS * VECTORS, 8);
    int d = 0;
#ifdef __AVX512BF16__
    if constexpr (PAIRS) {
        for (; d + C * W <= value_dim; d += C * W)
            add_few_pairs<ROWS, C>(weights, base, offset, keys, d, C * W, rescale, out, out_row, ahead);
        for (; d < value_dim; d += 2 * W)
            add_few_pairs<ROWS, 2>(weights, base, offset, keys, d, value_dim - d, rescale, out, out_row, ahead);
    }
#endif
    if constexpr (!PAIRS) {
        for (; d + C * W <= value_dim; d += C * W)
            add_few<T, ROWS, C>(weights, base, offset, keys, d, C * W, rescale, out, out_row, ahead);
        for (; d < value_dim; d += VECTORS * W)
            add_few<T, ROWS, VECTORS>(weights, base, offset, keys, d, value_dim - d, rescale, out, out_row, ahead);
    }
    fetch = ahead;
    if constexpr (R > ROWS)
        add_values_few<T, R - ROWS, PAIRS>(
            weights + ROWS * BLOCK_KEYS, base, offset, keys, value_dim, rescale + ROWS, out + ROWS * out_row, out_row,
            fetch);
}

// Weights of a row's keys in the place of which they are: as they are multiplied with values.
template <bool PAIRS>
INLINE F store_few_weights(float* weights, int k, F x) {
#ifdef __AVX512BF16__
    if constexpr (PAIRS) {
        // Behind what is read next: two bytes a key in place of four.
        store_rounded((BFloat16*)weights + k, x);
        return rounded_to_bf16(x);
    }
#endif
    store(weights + k, x);
    return x;
}

// Those of keys from k on.
template <bool PAIRS>
INLINE const float* few_weights(const float* weights, int k) {
    return PAIRS ? (const float*)((const BFloat16*)weights + k) : weights + k;
}

}  // namespace

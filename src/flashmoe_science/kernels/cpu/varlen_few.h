// A few query rows that share a key/value head: decoding, with grouped heads or a few speculative tokens.
//
// In a tile they would fill a few lanes of a vector. Here lanes lie along the head dimension for the products and along keys for the
// softmax, so that a key is read and widened once for all rows, in place, wherever its page lies; the rows of the next block are
// asked for while this one is multiplied.
#pragma once

#include "varlen_tile.h"

namespace {

// As many rows as accumulators leave room for at least one vector of the head dimension each.
constexpr int MAX_FEW_ROWS = W >= 8 ? 8 : 4;
// Accumulators in flight: enough to hide a multiply-add's latency, few enough for the registers.
constexpr int FEW_SUMS = W == 16 ? 16 : 8;
constexpr int CACHE_LINE = 64;

struct FewWorkspace {
    float *query, *out;   // [rows][dimension, up to a multiple of W]
    float* scores;        // [rows][BLOCK_KEYS]
    float maximum[MAX_FEW_ROWS], rescale[MAX_FEW_ROWS], sum[MAX_FEW_ROWS];
    const char *key[2][BLOCK_KEYS], *value[2][BLOCK_KEYS];  // rows of this block and of the next
};

size_t few_floats(int64_t head_dim, int64_t value_dim) {
    return MAX_FEW_ROWS * (size_t)(up_to_multiple(head_dim, W) + up_to_multiple(value_dim, W) + BLOCK_KEYS);
}

// Where keys [first, last) of a sequence and their values lie.
void find_rows(
    const VarlenJob& job, const Sequence& sequence, int64_t kv_head, int64_t first, int64_t last, const char** key,
    const char** value) {
    const VarlenProblem& p = *job.problem;
    const char* const keys = job.call->key + kv_head * p.key_stride[2];
    const char* const values = job.call->value + kv_head * p.value_stride[2];
    int64_t page = sequence.pages ? first / p.page_size : 0;
    int64_t row = sequence.pages ? first % p.page_size : sequence.first_key + first;
    while (first < last) {
        const int64_t at = sequence.pages ? sequence.pages[page] : 0;
        const int64_t left = sequence.pages ? smaller(last - first, p.page_size - row) : last - first;
        for (int64_t i = row; i < row + left; ++i) {
            *key++ = keys + at * p.key_stride[0] + i * p.key_stride[1];
            *value++ = values + at * p.value_stride[0] + i * p.value_stride[1];
        }
        first += left;
        row = 0;
        ++page;
    }
}

INLINE void fetch_row(const char* row, int bytes) {
    for (int at = 0; at < bytes; at += CACHE_LINE) __builtin_prefetch(row + at);
}

// What the products of queries and keys are made of: numbers that are widened, or pairs as they lie in memory.
template <class T>
struct FewNumbers {
    typedef T Unit;
    INLINE F accumulate(F sum, F key, F query) { return madd(key, query, sum); }
};
#ifdef __AVX512BF16__
template <>
struct FewNumbers<BFloat16> {
    typedef float Unit;  // two of them
    INLINE F accumulate(F sum, F key, F query) { return dot_pairs(sum, key, query); }
};
#endif

// Row r of the queries as score_few multiplies it.
template <class T>
void load_few_query(const char* from, int head_dim, float* to) {
    typedef typename FewNumbers<T>::Unit Unit;
    const int units = head_dim * (int)sizeof(T) / (int)sizeof(Unit);
    for (int d = 0; d < units; d += W) store(to + d, load_first((const Unit*)from + d, units - d));
}

// scores[r][k] = query[r] * key[k], for R rows.
template <class T, int R>
void score_few(const FewWorkspace& w, const char* const* key, const char* const* next, int keys, int head_dim) {
    typedef typename FewNumbers<T>::Unit Unit;
    constexpr int AT_ONCE = W / R;
    const int padded = up_to_multiple(head_dim, W), units = head_dim * (int)sizeof(T) / (int)sizeof(Unit);
    for (int k = 0; k < keys; k += AT_ONCE) {
        const Unit* row[AT_ONCE];
        F x[W];
#pragma GCC unroll 16
        for (int i = 0; i < AT_ONCE; ++i) {
            row[i] = (const Unit*)key[smaller(k + i, keys - 1)];
            if (next) fetch_row(next[smaller(k + i, keys - 1)], head_dim * (int)sizeof(T));
        }
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) x[i] = set1(0.0f);
        for (int d = 0; d < units; d += W) {
            F element[AT_ONCE];
#pragma GCC unroll 16
            for (int i = 0; i < AT_ONCE; ++i) element[i] = load_first(row[i] + d, units - d);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const F q = load(w.query + r * padded + d);
#pragma GCC unroll 16
                for (int i = 0; i < AT_ONCE; ++i) 
                    x[r * AT_ONCE + i] = FewNumbers<T>::accumulate(x[r * AT_ONCE + i], element[i], q);
            }
        }
        float total[W];
        store(total, sum_lanes(x));
        const int here = smaller(AT_ONCE, keys - k);
        for (int r = 0; r < R; ++r) memcpy(w.scores + r * BLOCK_KEYS + k, total + r * AT_ONCE, here * sizeof(float));
    }
}

// Products of row r become weights; what was summed before is to be multiplied by w.rescale[r].
void weigh_few(const VarlenJob& job, FewWorkspace& w, const VarlenTile& tile, int r, int64_t first, int keys) {
    float* const s = w.scores + r * BLOCK_KEYS;
    const int low = (int)larger<int64_t>(0, smaller<int64_t>(keys, tile.seen[r].first - first));
    const int high = (int)larger<int64_t>(low, smaller<int64_t>(keys, tile.seen[r].last - first));
    for (int k = 0; k < low; ++k) s[k] = -__builtin_inff();
    for (int k = high; k < up_to_multiple(keys, W); ++k) s[k] = -__builtin_inff();
    if (job.cap_factor != 0.0f) {
        for (int k = 0; k < keys; k += W) store(s + k, tanh_of(mul(load(s + k), set1(job.cap_factor))));
        for (int k = 0; k < low; ++k) s[k] = -__builtin_inff();
        for (int k = high; k < up_to_multiple(keys, W); ++k) s[k] = -__builtin_inff();
    }
    if (tile.slope[r] != 0.0f)
        for (int k = low; k < high; ++k) {
            const float ahead = (float)(tile.position[r] - first) - (float)k;
            s[k] -= tile.slope[r] * (ahead < 0 ? -ahead : ahead);
        }
    F highest = set1(w.maximum[r]);
    for (int k = 0; k < keys; k += W) highest = max(load(s + k), highest);
    float lane[W], most = w.maximum[r];
    store(lane, highest);
    for (int i = 0; i < W; ++i)
        if (lane[i] > most) most = lane[i];
    // As in raise_maxima: where there is nothing but minus infinity weights are 0, and where it did not move the factor is 1.
    const float base = most == -__builtin_inff() ? 0.0f : most;
    if (most == w.maximum[r]) {
        w.rescale[r] = 1.0f;
    } else {
        const F t = set1((w.maximum[r] - base) * job.scale);
        F factor;
        exp2_to_zero<6, 1>(&t, &factor);
        store(lane, factor);
        w.rescale[r] = lane[0];
        w.maximum[r] = most;
    }
    F total = set1(0.0f);
    for (int k = 0; k < keys; k += W) {
        const F t = mul(sub(load(s + k), set1(base)), set1(job.scale));
        F weight;
        exp2_to_zero<6, 1>(&t, &weight);
        store(s + k, weight);
        total = add(total, weight);
    }
    float sum = 0.0f;
    store(lane, total);
    for (int i = 0; i < W; ++i) sum += lane[i];
    w.sum[r] = w.sum[r] * w.rescale[r] + sum;
}

// out[r] = out[r] * rescale[r] + weights[r] * value for C vectors of R rows from d on.
template <class T, int R, int C>
INLINE void add_few(
    const FewWorkspace& w, const char* const* value, const char* const* next, int first, int keys, int d, int value_dim,
    int row) {
    const int padded = up_to_multiple(value_dim, W);
    F sum[R * C];
#pragma GCC unroll 16
    for (int i = 0; i < R * C; ++i) sum[i] = set1(0.0f);
    for (int k = first; k < keys; ++k) {
        const T* const from = (const T*)value[k] + d;
        if (next) fetch_row(next[k] + d * sizeof(T), C * W * (int)sizeof(T));
        F element[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) element[c] = load_first(from + c * W, value_dim - d - c * W);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const F weight = set1(w.scores[(row + r) * BLOCK_KEYS + k]);
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) sum[r * C + c] = madd(weight, element[c], sum[r * C + c]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
            float* const to = w.out + (row + r) * padded + d + c * W;
            store(to, madd(load(to), set1(w.rescale[row + r]), sum[r * C + c]));
        }
}

template <class T, int R>
void add_values_few(
    const FewWorkspace& w, const char* const* value, const char* const* next, int first, int keys, int value_dim, int row) {
    constexpr int C = FEW_SUMS / R < 8 ? FEW_SUMS / R : 8;
    int d = 0;
    for (; value_dim - d > (C - 1) * W; d += C * W) add_few<T, R, C>(w, value, next, first, keys, d, value_dim, row);
    for (; d < value_dim; d += W) add_few<T, R, 1>(w, value, next, first, keys, d, value_dim, row);
}

// The tile's rows, at most R, against keys [keys.first, keys.last): into its sums, which are clear.
template <class T, int R>
void run_few(
    const VarlenJob& job, FewWorkspace& w, const Sequence& sequence, int64_t kv_head, const VarlenTile& tile, Span keys,
    int ld) {
    const VarlenProblem& p = *job.problem;
    const int head_dim = (int)p.head_dim, value_dim = (int)p.value_dim;
    const int query_row = up_to_multiple(head_dim, W), out_row = up_to_multiple(value_dim, W);
    memset(w.query, 0, R * query_row * sizeof(float));
    memset(w.out, 0, R * out_row * sizeof(float));
    for (int r = 0; r < R; ++r) {
        w.maximum[r] = -__builtin_inff();
        w.sum[r] = 0.0f;
        w.rescale[r] = 1.0f;
        if (r < tile.rows) load_few_query<T>(tile.query_row[r], head_dim, w.query + r * query_row);
    }
    int now = 0;
    for (int64_t first = keys.first; first < keys.last;) {
        const int64_t last = smaller((first / BLOCK_KEYS + 1) * BLOCK_KEYS, keys.last);
        const int64_t after = smaller(last + BLOCK_KEYS, keys.last);
        const int count = (int)(last - first);
        if (first == keys.first) find_rows(job, sequence, kv_head, first, last, w.key[now], w.value[now]);
        // Rows of the next block are asked for only where it is as long: else there are not enough of them.
        const bool whole = after - last >= count;
        if (after > last) find_rows(job, sequence, kv_head, last, after, w.key[1 - now], w.value[1 - now]);
        score_few<T, R>(w, w.key[now], whole ? w.key[1 - now] : nullptr, count, head_dim);
        for (int r = 0; r < tile.rows; ++r) weigh_few(job, w, tile, r, first, count);
        const char* const* const next = whole ? w.value[1 - now] : nullptr;
        const bool mask = first < tile.common.first || last > tile.common.last;
        bool strange = false;
        for (int k = 0; mask && k < count; ++k) strange |= has_nonfinite<T>(w.value[now][k], 0, 1, value_dim);
        if (!strange) {
            add_values_few<T, R>(w, w.value[now], next, 0, count, value_dim, 0);
        } else {
            // Only visible products: a weight of zero does not hide a NaN.
            for (int r = 0; r < tile.rows; ++r) {
                const int low = (int)larger<int64_t>(0, tile.seen[r].first - first);
                const int high = (int)smaller<int64_t>(count, tile.seen[r].last - first);
                add_values_few<T, 1>(w, w.value[now], nullptr, low, high, value_dim, r);
            }
        }
        now = 1 - now;
        first = last;
    }
    for (int r = 0; r < tile.rows; ++r) {
        tile.sums.maximum[r] = w.maximum[r];
        tile.sums.sum[r] = w.sum[r];
        for (int d = 0; d < value_dim; ++d) tile.sums.out[d * ld + r] = w.out[r * out_row + d];
    }
}

template <class T>
void run_few(
    const VarlenJob& job, FewWorkspace& w, const Sequence& sequence, int64_t kv_head, const VarlenTile& tile, Span keys,
    int ld) {
    if (tile.rows == 1) return run_few<T, 1>(job, w, sequence, kv_head, tile, keys, ld);
    if (tile.rows == 2) return run_few<T, 2>(job, w, sequence, kv_head, tile, keys, ld);
    if (tile.rows <= 4) return run_few<T, 4>(job, w, sequence, kv_head, tile, keys, ld);
    return run_few<T, MAX_FEW_ROWS>(job, w, sequence, kv_head, tile, keys, ld);
}

}  // namespace

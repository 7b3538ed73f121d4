// One query for a key/value head (decoding without grouped heads). In a tile it would fill one lane; here lanes
// lie along the head dimension for the products and along keys for the softmax, so that every load is a whole
// vector of a key or a value, read in place.
#pragma once

#include <math.h>

#include "fetch.h"
#include "paths.h"
#include "softmax.h"

namespace {

// Rows are asked for so many keys before they are read. From memory, in the order in which they lie there: eight or sixteen
// rows are multiplied at a time, which no processor foresees.
constexpr int FETCH_AHEAD = 32;

// scores[k] = query * key[k]; those that fill up the last vector are minus infinity.
template <class T>
void score_keys(const float* query, const char* key, ptrdiff_t key_row, int keys, int head_dim, float* scores) {
    for (int k = 0; k < keys; k += W) {
        const char* row[W];
        F x[W];
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) {
            row[i] = key + smaller(k + i, keys - 1) * key_row;
            x[i] = set1(0.0f);
        }
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) fetch_row(key + (k + i + FETCH_AHEAD) * key_row, head_dim * (int)sizeof(T));
        for (int d = 0; d < head_dim; d += W) {
            const F q = load(query + d);
#pragma GCC unroll 16
            for (int i = 0; i < W; ++i) x[i] = madd(load_first((const T*)row[i] + d, head_dim - d), q, x[i]);
        }
        transpose(x);
#pragma GCC unroll 4
        for (int half = W / 2; half > 0; half /= 2)
#pragma GCC unroll 8
            for (int i = 0; i < half; ++i) x[i] = add(x[i], x[i + half]);
        store(scores + k, x[0]);
    }
    for (int k = keys; k < up_to_multiple(keys, W); ++k) scores[k] = -__builtin_inff();
}

// out[d] = out[d] * rescale + weights * value[.][d] for G vectors from d on, summed in 8 / G interleaved chains.
template <class T, int G>
INLINE void add_values(
    const float* weights, const char* value, ptrdiff_t value_row, int keys, int d, int head_dim, F rescale, float* out) {
    constexpr int CHAINS = 8 / G;
    F sum[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) sum[i] = set1(0.0f);
    value += d * sizeof(T);
    const int left = head_dim - d;
    const auto add_row = [&](int k, int chain) __attribute__((always_inline)) {
        const F weight = set1(weights[k]);
        const T* row = (const T*)(value + k * value_row);
#pragma GCC unroll 8
        for (int g = 0; g < G; ++g)
            sum[chain * G + g] = madd(weight, load_first(row + g * W, left - g * W), sum[chain * G + g]);
    };
    int k = 0;
    for (; k + CHAINS <= keys; k += CHAINS) {
#pragma GCC unroll 8
        for (int chain = 0; chain < CHAINS; ++chain)
            fetch_row(value + (k + chain + FETCH_AHEAD) * value_row, G * W * (int)sizeof(T));
#pragma GCC unroll 8
        for (int chain = 0; chain < CHAINS; ++chain) add_row(k + chain, chain);
    }
    for (; k < keys; ++k) add_row(k, 0);
#pragma GCC unroll 4
    for (int half = CHAINS / 2; half > 0; half /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < half * G; ++i) sum[i] = add(sum[i], sum[i + half * G]);
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) store(out + d + g * W, madd(load(out + d + g * W), rescale, sum[g]));
}

// The query of a row space against keys [first_key, last_key): unnormalised output, sum by lanes, maximum in every lane.
template <class T>
void decode(const Job& job, const Workspace& w, int64_t space, int64_t first_key, int64_t last_key) {
    const AttentionProblem& p = *job.problem;
    const Tile& tile = w.tile[0];
    const int head_dim = (int)p.head_dim;
    const int64_t batch = space / p.heads;
    const int64_t head = space % p.heads;
    const int64_t kv_head = head / (p.heads / p.kv_heads);
    const T* query = (const T*)(job.query + batch * p.query_stride[0] + head * p.query_stride[1]);
    const char* key = job.key + batch * p.key_stride[0] + kv_head * p.key_stride[1];
    const char* value = job.value + batch * p.value_stride[0] + kv_head * p.value_stride[1];

    const F sign = set1(job.query_factor);
    for (int d = 0; d < head_dim; d += W) {
        store(tile.query + d, mul(load_first(query + d, head_dim - d), sign));
        store(tile.out + d, set1(0.0f));
    }
    // Lanes hold the same maximum and each its own part of the sum.
    const Running running = {tile.maximum, tile.sum, w.rescale};
    store(tile.maximum, set1(-__builtin_inff()));
    store(tile.sum, set1(0.0f));
    for (int64_t first = first_key; first < last_key; first += BLOCK_KEYS) {
        const int64_t from = NO_LOADS ? 0 : first;
        const int keys = (int)smaller<int64_t>(BLOCK_KEYS, last_key - first);
        const int vectors = up_to_multiple(keys, W) / W;
        score_keys<T>(tile.query, key + from * p.key_stride[2], p.key_stride[2], keys, head_dim, w.scores);
        F highest = set1(-__builtin_inff());
        for (int i = 0; i < vectors; ++i) highest = max(load(w.scores + i * W), highest);
        float lane[W], most = -__builtin_inff();
        store(lane, highest);
        for (int i = 0; i < W; ++i)
            if (lane[i] > most) most = lane[i];
        store(w.block_max, set1(most));
        raise_maxima<1>(running, 0, w.block_max, job.scale);
        weigh<1>(w.scores, W, vectors, 0, w.block_max, running, job.scale);

        const F rescale = load(w.rescale);
        const char* const rows = value + from * p.value_stride[2];
        int d = 0;
        for (; head_dim - d > 7 * W; d += 8 * W)
            add_values<T, 8>(w.scores, rows, p.value_stride[2], keys, d, head_dim, rescale, tile.out);
        for (; head_dim - d > 3 * W; d += 4 * W)
            add_values<T, 4>(w.scores, rows, p.value_stride[2], keys, d, head_dim, rescale, tile.out);
        for (; head_dim - d > W; d += 2 * W)
            add_values<T, 2>(w.scores, rows, p.value_stride[2], keys, d, head_dim, rescale, tile.out);
        if (d < head_dim)
            add_values<T, 1>(w.scores, rows, p.value_stride[2], keys, d, head_dim, rescale, tile.out);
    }
}

template <class T>
void finish_decode(const Job& job, const Tile& tile, int64_t space) {
    const AttentionProblem& p = *job.problem;
    const int head_dim = (int)p.head_dim;
    T* out = (T*)(job.out + space / p.heads * p.out_stride[0] + space % p.heads * p.out_stride[1]);
    float sum = 0.0f;
    for (int i = 0; i < W; ++i) sum += tile.sum[i];
    // Without keys zero, by zero over one.
    const F divisor = set1(p.seqlen_k == 0 ? 1.0f : sum);
    for (int d = 0; d < head_dim; d += W) store_first(out + d, div(load(tile.out + d), divisor), head_dim - d);
    if (job.lse != nullptr)
        job.lse[space] = p.seqlen_k == 0 ? -__builtin_inff()
                                        : (float)(tile.maximum[0] * ((double)job.scale / LOG2_E) + log((double)sum));
}

}  // namespace

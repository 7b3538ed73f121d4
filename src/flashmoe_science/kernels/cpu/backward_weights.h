// Weights P = exp(scale * S - lse) and gradients of the scores dS = P * (dP - delta) of one tile and block, queries in lanes.
//
// The difference is taken first, in one rounding, and is not rounded again on the way to powers of two: scores and lse may be
// large, the difference is small wherever the weight is not.
#pragma once

#include "backward_problem.h"
#include "softmax.h"

namespace {

// What turns the scores of a tile into weights and gradients; columns of W queries.
struct WeightInputs {
    const float *lse, *delta;
    float scale;
    bool gradients;  // else weights only
};

// N vectors, of neighbouring columns and then of the next key. With a mask only lanes from lane[i] on count: in the others
// both results are exact zeros, whatever is there.
template <int DEGREE, int N, int G, bool MASKED>
INLINE void weigh_vectors(
    const WeightInputs& inputs, const float* s, const float* g, ptrdiff_t ld, int column, const int* lane, F weight[N],
    F gradient[N]) {
    F t[N];
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) {
        const F minus_lse = sub(set1(0.0f), load(inputs.lse + (column + i % G) * W));
        t[i] = madd(load(s + (i / G) * ld + (i % G) * W), set1(inputs.scale), minus_lse);
        if constexpr (MASKED && !NO_MASK) t[i] = keep_from(t[i], lane[i]);
    }
    weights_of<DEGREE, N, true>(t, weight);
    if (!inputs.gradients) return;
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) {
        const F delta = load(inputs.delta + (column + i % G) * W);
        gradient[i] = mul(weight[i], sub(load(g + (i / G) * ld + (i % G) * W), delta));
        if constexpr (MASKED && !NO_MASK) {
            const F kept = keep_from(set1(0.0f), lane[i]);
            gradient[i] = select_equal(kept, set1(0.0f), gradient[i], set1(0.0f));
        }
    }
}

// In place of the scores `s` and of the gradients of the weights `g`, for keys [0, keys) and G columns from `column` on.
// `lane`: the first lane that sees key 0; the next key is seen from the next lane on.
template <int G, bool MASKED>
void weigh_floats(const WeightInputs& inputs, float* s, float* g, ptrdiff_t ld, int keys, int column, int lane) {
    constexpr int N = 4;
    constexpr int ROWS = N / G;
    s += column * W;
    g += column * W;
    F weight[N], gradient[N];
    int k = 0;
    for (; k + ROWS <= keys; k += ROWS, s += ROWS * ld, g += ROWS * ld) {
        int lanes[N];
        for (int i = 0; i < N; ++i) lanes[i] = lane + k + i / G;
        weigh_vectors<6, N, G, MASKED>(inputs, s, g, ld, column, lanes, weight, gradient);
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) {
            store(s + (i / G) * ld + (i % G) * W, weight[i]);
            if (inputs.gradients) store(g + (i / G) * ld + (i % G) * W, gradient[i]);
        }
    }
    for (; k < keys; ++k, s += ld, g += ld) {
        int lanes[G];
        for (int i = 0; i < G; ++i) lanes[i] = lane + k;
        weigh_vectors<6, G, G, MASKED>(inputs, s, g, ld, column, lanes, weight, gradient);
        for (int i = 0; i < G; ++i) {
            store(s + i * W, weight[i]);
            if (inputs.gradients) store(g + i * W, gradient[i]);
        }
    }
}

// N keys of sum_weights.
template <int DEGREE, int N, bool MASKED>
INLINE void add_weighted(
    const WeightInputs& inputs, const float* s, const float* g, ptrdiff_t ld, F minus_lse, int lane, F& total, F& sum) {
    F t[N], weight[N];
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) {
        t[i] = madd(load(s + i * ld), set1(inputs.scale), minus_lse);
        if constexpr (MASKED && !NO_MASK) t[i] = keep_from(t[i], lane + i);
    }
    weights_of<DEGREE, N, true>(t, weight);
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) {
        F weighted = mul(weight[i], load(g + i * ld));
        if constexpr (MASKED && !NO_MASK)
            weighted = select_equal(keep_from(set1(0.0f), lane + i), set1(0.0f), weighted, set1(0.0f));
        total = add(total, weighted);
        sum = add(sum, weight[i]);
    }
}

// Of a column whose queries see the block's first `keys` keys and no other: the sums of P and of P * dP; lanes as for
// weigh_floats.
struct WeightSums {
    F weights, weighted;
};

template <int DEGREE, bool MASKED>
WeightSums sum_weights(
    const WeightInputs& inputs, const float* s, const float* g, ptrdiff_t ld, int keys, int column, int lane) {
    constexpr int N = 4;
    const F minus_lse = sub(set1(0.0f), load(inputs.lse + column * W));
    F total = set1(0.0f), sum = set1(0.0f);
    s += column * W;
    g += column * W;
    int k = 0;
    for (; k + N <= keys; k += N, s += N * ld, g += N * ld)
        add_weighted<DEGREE, N, MASKED>(inputs, s, g, ld, minus_lse, lane + k, total, sum);
    for (; k < keys; ++k, s += ld, g += ld)
        add_weighted<DEGREE, 1, MASKED>(inputs, s, g, ld, minus_lse, lane + k, total, sum);
    return {sum, total};
}

#if HAS_BF16
// Where weigh_pairs writes, all rounded to bf16: weights and gradients [key][ld], and gradients as pairs of keys [key / 2][ld].
struct PairOutputs {
    BFloat16 *weights, *gradients;
    float* key_pairs;
};

// weigh_floats for bf16 products. An odd last key is paired with zeros.
template <int G, bool MASKED>
void weigh_to_pairs(
    const WeightInputs& inputs, const PairOutputs& to, const float* s, const float* g, ptrdiff_t ld, int keys, int column,
    int lane) {
    const auto finish = [&](const F* weight, const F* gradient, int k, int rows) __attribute__((always_inline)) {
        for (int i = 0; i < rows * G; ++i) {
            const ptrdiff_t at = (k + i / G) * ld + (column + i % G) * W;
            store_rounded(to.weights + at, weight[i]);
            if (inputs.gradients) store_rounded(to.gradients + at, gradient[i]);
        }
        if (!inputs.gradients) return;
        for (int i = 0; i < G; ++i) {
            const F second = rows == 2 ? gradient[G + i] : set1(0.0f);
            store(to.key_pairs + k / 2 * ld + (column + i) * W, pack_pairs(gradient[i], second));
        }
    };
    s += column * W;
    g += column * W;
    F weight[2 * G], gradient[2 * G];
    int k = 0;
    for (; k + 2 <= keys; k += 2, s += 2 * ld, g += 2 * ld) {
        int lanes[2 * G];
        for (int i = 0; i < 2 * G; ++i) lanes[i] = lane + k + i / G;
        weigh_vectors<3, 2 * G, G, MASKED>(inputs, s, g, ld, column, lanes, weight, gradient);
        finish(weight, gradient, k, 2);
    }
    if (k < keys) {
        int lanes[G];
        for (int i = 0; i < G; ++i) lanes[i] = lane + k;
        weigh_vectors<3, G, G, MASKED>(inputs, s, g, ld, column, lanes, weight, gradient);
        finish(weight, gradient, k, 1);
    }
}
#endif

}  // namespace

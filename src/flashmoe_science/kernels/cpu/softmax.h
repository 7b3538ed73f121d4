// Online softmax over one block of scores S[key][query], queries in lanes: all of it is vertical.
//
// Scores are kept unscaled; `scale` is |softmax_scale| * log2(e), so that weights are 2^(scale * (s - max)): exactly 1
// for the largest, and finite as long as the scores are. Where nothing but minus infinity was seen, 0 takes the maximum's
// place, so that weights are 0 and not 2^(infinity - infinity).
#pragma once

#include "exp2.h"

// What can be left out of the attention kernel to see what it costs. The result is then wrong on purpose; without ABLATE
// the compiled code is the same as if none of this were there.
#ifndef ABLATE
#define ABLATE 0
#endif

constexpr bool NO_EXPONENTIALS = ABLATE == 1;
constexpr bool NO_MASK = ABLATE == 2;
constexpr bool NO_LOADS = ABLATE == 3;  // of keys and values from memory: the first block of them stands for all

// Per query of a tile: the running maximum of the unscaled scores, the running sum of weights, and the factor
// 2^(scale * (old max - new max)) that this block applies to what was accumulated before it.
struct Running {
    float* maximum;
    float* sum;
    float* rescale;
};

// Takes the block's maxima of G vectors into the running ones, and leaves what is to be subtracted from the block's scores
// in their place. Where a maximum did not move the factor is exactly 1: an error there would compound over the blocks.
template <int G>
INLINE void raise_maxima(const Running& running, int column, float* block_max, float scale) {
    F old_max[G], new_max[G], base[G], t[G], factor[G];
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
        const int at = (column + g) * W;
        old_max[g] = load(running.maximum + at);
        new_max[g] = max(load(block_max + at), old_max[g]);
        base[g] = select_equal(new_max[g], set1(-__builtin_inff()), set1(0.0f), new_max[g]);
        t[g] = mul(sub(old_max[g], base[g]), set1(scale));
    }
    exp2_to_zero<6, G>(t, factor);
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
        const int at = (column + g) * W;
        store(running.maximum + at, new_max[g]);
        store(running.rescale + at, select_equal(old_max[g], new_max[g], set1(1.0f), factor[g]));
        store(block_max + at, base[g]);
    }
}

INLINE void add_to_sum(const Running& running, int at, F total) {
    store(running.sum + at, madd(load(running.sum + at), load(running.rescale + at), total));
}

// Weights 2^t of N vectors, or e^t; see exp2_to_zero.
template <int DEGREE, int N, bool NATURAL = false>
INLINE void weights_of(const F t[N], F weight[N]) {
    if constexpr (NO_EXPONENTIALS) {
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) weight[i] = t[i];
    } else {
        exp2_to_zero<DEGREE, N, NATURAL>(t, weight);
    }
}

// Weights in place of scores for ROWS keys and G vectors: ROWS * G independent chains.
template <int G, int ROWS>
INLINE void weigh_rows(float* s, ptrdiff_t ld, float scale, const F base[G], F total[G]) {
    F t[ROWS * G], weight[ROWS * G];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS * G; ++i)
        t[i] = mul(sub(load(s + (i / G) * ld + (i % G) * W), base[i % G]), set1(scale));
    weights_of<6, ROWS * G>(t, weight);
#pragma GCC unroll 16
    for (int i = 0; i < ROWS * G; ++i) {
        total[i % G] = add(total[i % G], weight[i]);
        store(s + (i / G) * ld + (i % G) * W, weight[i]);
    }
}

// Weights in place of the scores of keys [0, keys), for G vectors of queries from `column` on.
template <int G>
static void weigh(
    float* s, ptrdiff_t ld, int keys, int column, const float* base_of, const Running& running, float scale) {
    // No more vectors at a time than columns of a product: with more, the registers of AVX2 would spill.
    constexpr int ROWS = MAX_COLUMNS / G;
    F base[G], total[G];
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
        base[g] = load(base_of + (column + g) * W);
        total[g] = set1(0.0f);
    }
    s += column * W;
    int k = 0;
    for (; k + ROWS <= keys; k += ROWS, s += ROWS * ld) weigh_rows<G, ROWS>(s, ld, scale, base, total);
    for (; k < keys; ++k, s += ld) weigh_rows<G, 1>(s, ld, scale, base, total);
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) add_to_sum(running, (column + g) * W, total[g]);
}

#if HAS_BF16
// Two rows of scores become one of bf16 pairs. Without a second row the pair's other half is zero.
template <int G, bool BOTH>
INLINE void weigh_two_rows(
    const float* s, float* pairs, ptrdiff_t ld, float scale, const F base[G], F total[G]) {
    const F ones = _mm512_castsi512_ps(_mm512_set1_epi32(0x3f803f80));
    F t[2 * G], weight[2 * G];
#pragma GCC unroll 8
    for (int i = 0; i < 2 * G; ++i)
        t[i] = BOTH || i < G ? mul(sub(load(s + (i / G) * ld + (i % G) * W), base[i % G]), set1(scale))
                             : set1(-__builtin_inff());
    weights_of<3, 2 * G>(t, weight);
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
        const F pair = pack_pairs(weight[g], weight[G + g]);
        total[g] = dot_pairs(total[g], pair, ones);
        store(pairs + g * W, pair);
    }
}

// weigh() for bf16 weights: rows 2i and 2i+1 of the scores become row i of `pairs`, rounded. The sum is that
// of the rounded weights, so that numerator and denominator agree.
template <int G>
static void weigh_pairs(
    const float* s, float* pairs, ptrdiff_t ld, int keys, int column, const float* base_of,
    const Running& running, float scale) {
    F base[G], total[G];
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
        base[g] = load(base_of + (column + g) * W);
        total[g] = set1(0.0f);
    }
    s += column * W;
    pairs += column * W;
    int k = 0;
    for (; k + 2 <= keys; k += 2, s += 2 * ld, pairs += ld)
        weigh_two_rows<G, true>(s, pairs, ld, scale, base, total);
    if (k < keys) weigh_two_rows<G, false>(s, pairs, ld, scale, base, total);
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) add_to_sum(running, (column + g) * W, total[g]);
}
#endif

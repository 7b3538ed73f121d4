// What lies between a product of query and key and its weight: the cap of scores, and its slope.
//
// WINDOW: rows see keys from one on, too. SOFTCAP: a score s counts as cap x tanh(s / cap).
#pragma once
#include "backward/parameters.cuh"
#include "softmax.cuh"
#include "types.cuh"

#ifndef WINDOW
#define WINDOW 0
#endif
#ifndef SOFTCAP
#define SOFTCAP 0
#endif

// What masks give a score that counts for nothing.
__device__ __forceinline__ float hidden_score(const BackwardParameters& p) {
    return p.scale_log2 < 0.0f ? POSITIVE_INFINITY : NEGATIVE_INFINITY;
}

// The weight of a score as the product leaves it, or as a mask does. `lse`: the row's log-sum-exp to base 2.
__device__ __forceinline__ float weight_of_score(float score, float lse, const BackwardParameters& p) {
    if (!SOFTCAP) return exponential(fmaf(score, p.scale_log2, -lse));
    // cap x tanh(x / cap) = cap - 2 cap / (1 + e^(2 x / cap)), in units of log2: tanh.approx has a relative error of 2^-11.
    const float e = exp2_approx(score * p.softcap_rate);
    const float weight = exponential(fmaf(-2.0f * p.softcap_log2, reciprocal(1.0f + e), p.softcap_log2) - lse);
    return score == hidden_score(p) ? 0.0f : weight;
}

// dS of one score: `gradient` is dP - delta. The cap's slope, 1 - tanh^2, comes from the weight, so that it need not be held.
__device__ __forceinline__ float gradient_of_score(float weight, float gradient, float lse, const BackwardParameters& p) {
    if (!SOFTCAP) return gradient * weight;
    const float tanh = (log2_approx(weight) + lse) * p.softcap_inverse;
    return weight == 0.0f ? 0.0f : gradient * weight * fmaf(-tanh, tanh, 1.0f);
}

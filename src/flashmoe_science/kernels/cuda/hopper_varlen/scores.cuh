// What happens to the scores of sequences of any lengths between the products: caps and masks.
#pragma once

#include "hopper_varlen/parameters.cuh"

namespace hopper {

// cap x tanh(x / cap) = cap - 2 cap / (1 + e^(2 x / cap)), in units of log2.
template <int N>
__device__ __forceinline__ void cap_scores(float (&s)[N], const Parameters& p) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        s[i] = fmaf(-2.f * p.softcap_log2, reciprocal(1.f + exp2_approx(s[i] * p.softcap_rate)), p.softcap_log2);
    }
}

// Sets the scores of keys before those that may be seen to -inf. `low`, `high`: the first key, counted from this lane's first
// column on, that each of its two rows sees.
template <int N>
__device__ __forceinline__ void mask_before(float (&s)[N], int low, int high) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            if (2 * i + j < low) s[i + j] = NEGATIVE_INFINITY;
            if (2 * i + j < high) s[i + 2 + j] = NEGATIVE_INFINITY;
        }
    }
}

#if TREE
// Sets the scores of keys that a tree hides from this lane's two rows to -inf. `first`: the lane's first column, counted from the
// key of the sequence's first query.
template <int N>
__device__ __forceinline__ void mask_tree(float (&s)[N], uint64 low, uint64 high, int first) {
    uint64 of_low = 0, of_high = 0;  // of 64 columns
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        const int column = 2 * i % 64;
        if (column == 0) of_low = hidden_from(low, first + 2 * i), of_high = hidden_from(high, first + 2 * i);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            if (of_low >> (column + j) & 1) s[i + j] = NEGATIVE_INFINITY;
            if (of_high >> (column + j) & 1) s[i + 2 + j] = NEGATIVE_INFINITY;
        }
    }
}
#endif

}  // namespace hopper

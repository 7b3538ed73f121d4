// Online softmax on wgmma accumulators (Milakov and Gimelshein 2018; Dao 2023). A thread holds two rows.
#pragma once

#include "ablation.cuh"
#include "quad.cuh"
#include "types.cuh"

namespace hopper {

// Scores become probabilities relative to a reference: exp2(score * scale - reference). Any reference gives the same
// quotient in the end, as long as nothing overflows; so the first block's maximum serves until a row's probabilities
// grow past LIMIT, and most blocks need no maximum at all (`try_step`). Weights of up to 2^15 leave bf16 values room up to
// about 2^113 / keys. FlashAttention-4's lazy rescaling still takes each block's maximum, a fifth of the instructions.
struct Softmax {
    static constexpr float LIMIT = 32768.f;  // the probabilities must fit fp16

    float reference[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY};  // in log2; -inf: no key seen yet
    float sum[2] = {0.f, 0.f};                        // this lane's share

    // Takes the block's maximum into the reference. `correction`: by what earlier results are to be multiplied.
    template <int N>
    __device__ __forceinline__ void step(float (&s)[N], float scale_log2, float (&correction)[2]) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            float even = s[2 * row];
            float odd = s[2 * row + 1];
#pragma unroll
            for (int i = 4; i < N; i += 4) {
                even = max_nan(even, s[i + 2 * row]);
                odd = max_nan(odd, s[i + 2 * row + 1]);
            }
            const float maximum = over_quad(max_nan(even, odd), max_nan);
            const float next = max_nan(reference[row], maximum * scale_log2);
            // A row that has seen no key keeps -inf; zero instead avoids inf - inf.
            const float base = next == NEGATIVE_INFINITY ? 0.f : next;
            correction[row] = exp2_approx(reference[row] - base);
            reference[row] = next;
            sum[row] = fmaf(sum[row], correction[row], exponentiate(s, scale_log2, base, row));
        }
    }

    // Keeps the reference; false, with `s` spoilt, where a row of this warp has outgrown it (or seen no key yet).
    template <int N>
    __device__ __forceinline__ bool try_step(float (&s)[N], float scale_log2) {
        const float low = exponentiate(s, scale_log2, reference[0], 0);
        const float high = exponentiate(s, scale_log2, reference[1], 1);
        if (!__all_sync(0xffffffff, low < LIMIT && high < LIMIT)) return false;  // NaN fails too
        sum[0] += low;
        sum[1] += high;
        return true;
    }

    // Exponentiates a row's scores in place, returns their sum.
    template <int N>
    static __device__ __forceinline__ float exponentiate(float (&s)[N], float scale_log2, float base, int row) {
        float even = 0.f;
        float odd = 0.f;
#pragma unroll
        for (int i = 2 * row; i < N; i += 4) {
            s[i] = exponential(fmaf(s[i], scale_log2, -base));
            s[i + 1] = exponential(fmaf(s[i + 1], scale_log2, -base));
            even += s[i];
            odd += s[i + 1];
        }
        return even + odd;
    }
};

// Sets the scores that may not be seen to -inf. `low`, `high`: how many keys, from this lane's first column on, each of
// its two rows sees.
template <int N>
__device__ __forceinline__ void mask(float (&s)[N], int low, int high) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            if (2 * i + j >= low) s[i + j] = NEGATIVE_INFINITY;
            if (2 * i + j >= high) s[i + 2 + j] = NEGATIVE_INFINITY;
        }
    }
}

}  // namespace hopper

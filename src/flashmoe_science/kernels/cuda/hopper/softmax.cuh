// Online softmax on wgmma accumulators (Milakov and Gimelshein 2018; Dao 2023). A thread holds two rows.
#pragma once

#include "ptx/integers.cuh"

namespace hopper {

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

__device__ __forceinline__ float exp2_approximate(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two floats as one register of the 16-bit type, the first in the low half.
__device__ __forceinline__ u32 pack(float low, float high) {
    u32 packed;
#if BFLOAT16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#endif
    return packed;
}

// Reduces over the four lanes that share a row.
template <typename F>
__device__ __forceinline__ float over_quad(float x, F combine) {
    x = combine(x, __shfl_xor_sync(0xffffffff, x, 1));
    return combine(x, __shfl_xor_sync(0xffffffff, x, 2));
}

struct Softmax {
    float maximum[2] = {-infinity(), -infinity()};  // of the raw scores
    float sum[2] = {0.f, 0.f};                  // this lane's share, relative to the maximum

    // Turns scores into exp2((score - maximum) * scale) in place; returns by what earlier results are to be scaled.
    template <int N>
    __device__ __forceinline__ void step(float (&s)[N], float scale_log2, float (&correction)[2]) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            float even = maximum[row];
            float odd = s[2 * row];
#pragma unroll
            for (int i = 0; i < N; i += 4) {
                even = fmaxf(even, s[i + 2 * row]);
                odd = fmaxf(odd, s[i + 2 * row + 1]);
            }
            const float next = over_quad(fmaxf(even, odd), [](float a, float b) { return fmaxf(a, b); });
            // A row that has seen no key keeps -inf; zero instead avoids inf - inf.
            const float offset = next == -infinity() ? 0.f : next * scale_log2;
            correction[row] = exp2_approximate(maximum[row] * scale_log2 - offset);
            maximum[row] = next;
            float sum_even = 0.f;
            float sum_odd = 0.f;
#pragma unroll
            for (int i = 0; i < N; i += 4) {
                float& a = s[i + 2 * row];
                float& b = s[i + 2 * row + 1];
                a = exp2_approximate(fmaf(a, scale_log2, -offset));
                b = exp2_approximate(fmaf(b, scale_log2, -offset));
                sum_even += a;
                sum_odd += b;
            }
            sum[row] = fmaf(sum[row], correction[row], sum_even + sum_odd);
        }
    }
};

// Sets the scores that may not be seen to -inf. `column`: first column of this lane; `limit`: the first masked column
// of each of the lane's two rows.
template <int N>
__device__ __forceinline__ void mask(float (&s)[N], int column, int limit_low, int limit_high) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            if (2 * i + j >= limit_low - column) s[i + j] = -infinity();
            if (2 * i + j >= limit_high - column) s[i + 2 + j] = -infinity();
        }
    }
}

}  // namespace hopper

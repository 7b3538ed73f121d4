// What the kernels for few rows have in common: how a warp's products lie in its lanes, and how partial results of softmax
// are combined.
#pragma once
#include "ptx/vector.cuh"

namespace {

// A maximum that may be subtracted: exp2(-inf - 0) is 0 where exp2(-inf - -inf) would be NaN.
__device__ __forceinline__ float finite_maximum(float x) { return x == NEGATIVE_INFINITY ? 0.0f : x; }

__device__ __forceinline__ uint32 word(const Chunk& x, int i) {
    return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

// Lanes with the same t hold different keys of the same queries: they are four `Apart`.
template <int Apart = 4>
__device__ __forceinline__ float max_over_keys(float x) {
#pragma unroll
    for (int mask = Apart; mask < 8 * Apart; mask *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, mask));
    return x;
}

template <int Apart = 4>
__device__ __forceinline__ float sum_over_keys(float x) {
#pragma unroll
    for (int mask = Apart; mask < 8 * Apart; mask *= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
    return x;
}

// Quad q of a lane: four consecutive dims of one query, in the order in which the partial results lie in memory.
template <int DimGroups>
struct QuadOf {
    int row_tile, group, column, half;

    __device__ __forceinline__ explicit QuadOf(int q)
        : row_tile(q / (4 * DimGroups)), group(q / 4 % DimGroups), column(q / 2 % 2), half(q % 2) {}

    __device__ __forceinline__ int row(int lane) const { return 8 * row_tile + 2 * (lane % 4) + column; }
    __device__ __forceinline__ int dim(int lane) const { return 64 * group + 8 * (lane / 4) + 4 * half; }
};

__device__ __forceinline__ void accumulate(float4& sum, float weight, const float4& x) {
    sum.x = fmaf(weight, x.x, sum.x);
    sum.y = fmaf(weight, x.y, sum.y);
    sum.z = fmaf(weight, x.z, sum.z);
    sum.w = fmaf(weight, x.w, sum.w);
}

// Softmax statistics of a set of keys, in units of log2: weights are exp2(score - maximum).
struct Statistics {
    float maximum, sum;
};

// Combines the statistics of several disjoint sets of keys; weights[i] rescales the results of set i.
template <int Count>
__device__ __forceinline__ Statistics combine(const float2* sets, int stride, float (&weights)[Count]) {
    float2 set[Count];
    float maximum = NEGATIVE_INFINITY;
#pragma unroll
    for (int i = 0; i < Count; ++i) {
        set[i] = sets[i * stride];
        maximum = fmaxf(maximum, set[i].x);
    }
    const float shift = finite_maximum(maximum);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < Count; ++i) {
        weights[i] = exp2_approx(set[i].x - shift);
        sum = fmaf(weights[i], set[i].y, sum);
    }
    return {maximum, sum};
}

}  // namespace

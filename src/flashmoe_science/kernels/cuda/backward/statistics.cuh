// What both passes need to know of a query row: its log-sum-exp to base 2, and delta.
#pragma once
#include "ptx/element.cuh"
#include "ptx/vector.cuh"
#include "quad.cuh"
#include "types.cuh"

// Sum of the products of eight pairs of elements.
__device__ __forceinline__ float dot(const Chunk& x, const Chunk& y, float sum) {
    const uint32 a[4] = {x.x, x.y, x.z, x.w};
    const uint32 b[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 left = unpack(a[i]);
        const float2 right = unpack(b[i]);
        sum = fmaf(left.x, right.x, sum);
        sum = fmaf(left.y, right.y, sum);
    }
    return sum;
}

// Plus infinity for a row without keys, whose weights then come out as zero.
__device__ __forceinline__ float to_log2(float lse) {
    constexpr float log2_e = 1.4426950408889634f;
    return lse == NEGATIVE_INFINITY ? POSITIVE_INFINITY : lse * log2_e;
}

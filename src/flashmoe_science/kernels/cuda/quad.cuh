// Reductions over the four lanes of a warp that share a row of an mma or wgmma accumulator.
#pragma once

template <typename Combine>
__device__ __forceinline__ float over_quad(float x, Combine combine) {
    x = combine(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return combine(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    return over_quad(x, [](float a, float b) { return a + b; });
}

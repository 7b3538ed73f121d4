// Reductions over groups of WIDTH neighbouring lanes of a warp, all of whose lanes take part.
//
// NATIVE_REDUX (macro): 1 uses redux.sync for whole warps (sm_80 and later).
#pragma once
#include "types.cuh"

template <int WIDTH, typename V, typename Combine>
__device__ __forceinline__ V over_lanes(V x, Combine combine) {
#pragma unroll
    for (int distance = WIDTH / 2; distance > 0; distance /= 2)
        x = combine(x, __shfl_xor_sync(0xffffffffu, x, distance));
    return x;
}

template <int WIDTH>
__device__ __forceinline__ uint32 most(uint32 x) {
#if NATIVE_REDUX
    if (WIDTH == 32) {
        uint32 y;
        asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
        return y;
    }
#endif
    return over_lanes<WIDTH>(x, [](uint32 a, uint32 b) { return a > b ? a : b; });
}

template <int WIDTH>
__device__ __forceinline__ uint32 least(uint32 x) {
    return ~most<WIDTH>(~x);
}

__device__ __forceinline__ int total_of_warp(int x) {
#if NATIVE_REDUX
    int y;
    asm volatile("redux.sync.add.s32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
    return y;
#else
    return over_lanes<32>(x, [](int a, int b) { return a + b; });
#endif
}

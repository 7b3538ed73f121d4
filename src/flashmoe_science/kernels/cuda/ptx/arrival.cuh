// Results in global memory that blocks of one grid hand to each other; nobody has to wait for another.
//
// Warps write, each arrives once, and the one that is told that it is the last reads what all have written (PTX ISA,
// "Memory Consistency Model": __syncwarp orders the lanes, the atomic operation releases and acquires for the GPU).
#pragma once
#include "types.cuh"

// One lane of a warp, after its __syncwarp: how many have arrived before. The `all`th sets the counter back to zero.
__device__ __forceinline__ uint32 arrive(uint32* counter, uint32 all) {
    uint32 before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(all - 1) : "memory");
    return before;
}

// One lane, after it has arrived: whether the `all`th has come within so many looks, and its own counter has nobody else's arrivals.
__device__ __forceinline__ bool all_came(const uint32* counter, int looks) {
    for (int i = 0; i < looks; ++i) {
        uint32 now;
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
        if (now == 0) return true;
    }
    return false;
}

// Sets bits, without waiting for what they were.
__device__ __forceinline__ void set_bits(uint32* word, uint32 bits) {
    asm volatile("red.relaxed.gpu.global.or.b32 [%0], %1;" ::"l"(word), "r"(bits) : "memory");
}

__device__ __forceinline__ uint32 load_word(const uint32* word) {
    uint32 x;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(word) : "memory");
    return x;
}

__device__ __forceinline__ void store_partial(float4* address, const float4& x) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};"
                 ::"l"(address), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
}

__device__ __forceinline__ void store_partial(float2* address, const float2& x) {
    asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(address), "f"(x.x), "f"(x.y) : "memory");
}

// After the last arrival. Not from the L1 cache, which other multiprocessors do not write.
__device__ __forceinline__ float4 load_partial(const float4* address) {
    float4 x;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(address) : "memory");
    return x;
}

__device__ __forceinline__ float2 load_partial(const float2* address) {
    float2 x;
    asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "l"(address) : "memory");
    return x;
}

// Turns: one block after another works on something.
//
// Waits until it is the turn of `value`.
__device__ __forceinline__ void await_turn(const uint32* turn, uint32 value) {
    uint32 now;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
    } while (now != value);
}

__device__ __forceinline__ void pass_turn(uint32* turn, uint32 value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(turn), "r"(value) : "memory");
}

// What blocks add up in turn, without waiting for what they add to.
//
// Orders nothing: who finds its turn may add to what others have written, as no addition is begun before the value is there.
__device__ __forceinline__ uint32 look_at_turn(const uint32* turn) {
    uint32 now;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
    return now;
}

#if __CUDA_ARCH__ >= 900
#define ADDS_IN_MEMORY 1
#else
#define ADDS_IN_MEMORY 0  // four floats at once: they are loaded, added and stored
#endif

#if ADDS_IN_MEMORY
__device__ __forceinline__ void add_partial(float4* address, float4 x) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                 ::"l"(address), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
}
#endif

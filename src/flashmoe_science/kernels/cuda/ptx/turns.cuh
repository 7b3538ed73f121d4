// What blocks add up in turn (ptx/arrival.cuh), without waiting for what they add to.
#pragma once
#include "ptx/arrival.cuh"

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

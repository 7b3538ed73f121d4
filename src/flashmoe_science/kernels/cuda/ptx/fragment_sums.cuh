// Accumulator fragments of a warp in global memory, 128 floats each, to which one warp after another adds. How a fragment's
// floats lie is for these functions alone to know: as the additions of an architecture are quickest.
#pragma once
#include "types.cuh"

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void store_fragment(float* sums, int lane, const float (&x)[4]) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};"
                 ::"l"(sums + 4 * lane), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}

__device__ __forceinline__ void add_to_fragment(float* sums, int lane, const float (&x)[4]) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                 ::"l"(sums + 4 * lane), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}

// Not from the L1 cache, which other multiprocessors do not write.
__device__ __forceinline__ void load_fragment(float (&x)[4], const float* sums, int lane) {
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "l"(sums + 4 * lane) : "memory");
}
#else
__device__ __forceinline__ void store_fragment(float* sums, int lane, const float (&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("st.global.f32 [%0], %1;" ::"l"(sums + 32 * i + lane), "f"(x[i]) : "memory");
}

__device__ __forceinline__ void add_to_fragment(float* sums, int lane, const float (&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(sums + 32 * i + lane), "f"(x[i]) : "memory");
    }
}

__device__ __forceinline__ void load_fragment(float (&x)[4], const float* sums, int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(x[i]) : "l"(sums + 32 * i + lane) : "memory");
    }
}
#endif

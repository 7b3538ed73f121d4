// The greater of two floats, where fmaxf would do something else.
#pragma once
#include "types.cuh"

// Not fmaxf, which drops a NaN: a NaN score must reach its whole row, through the row's maximum.
__device__ __forceinline__ float max_nan(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

// Transposes an 8x8 matrix of 16-bit elements held by a warp, lane l holding elements (l / 4, 2 (l % 4) + {0, 1}).
#pragma once
#include "types.cuh"

__device__ __forceinline__ uint32 transpose_matrix(uint32 x) {
    uint32 y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

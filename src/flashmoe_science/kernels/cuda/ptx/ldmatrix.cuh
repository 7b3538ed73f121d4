// 8x8 matrices of 16-bit elements: four at a time from and to shared memory, lane 8i+r giving the address of row r of matrix i.
#pragma once
#include "types.cuh"

__device__ __forceinline__ void load_matrices(uint32 (&m)[4], uint32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(uint32 (&m)[4], uint32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address) : "memory");
}

// Of a matrix held by a warp, lane l holding elements (l / 4, 2 (l % 4) + {0, 1}).
__device__ __forceinline__ uint32 transpose_matrix(uint32 x) {
    uint32 y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// From accumulator fragments (sm_90).
__device__ __forceinline__ void store_matrices(uint32 address, uint32 a, uint32 b, uint32 c, uint32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
}

// The same of the transposed matrices.
__device__ __forceinline__ void store_matrices_transposed(uint32 address, uint32 a, uint32 b, uint32 c, uint32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}

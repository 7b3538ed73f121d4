// Four 8x8 matrices of 16-bit elements from accumulator fragments to shared memory (sm_90). Lane i gives the address of
// row i % 8 of matrix i / 8.
#pragma once

#include "types.cuh"

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

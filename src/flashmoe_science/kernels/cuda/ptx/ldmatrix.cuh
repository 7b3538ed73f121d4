// Four 8x8 matrices of 16-bit elements from shared memory; lane 8i+r gives the address of row r of matrix i.
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

// Indices and sizes, read anew wherever they are asked for: what is derived from them need not be held in registers meanwhile.
#pragma once
#include "types.cuh"

__device__ __forceinline__ int thread_index() {
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

__device__ __forceinline__ int block_index() {
    int x;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
    return x;
}

__device__ __forceinline__ int grid_size() {
    int x;
    asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(x));
    return x;
}

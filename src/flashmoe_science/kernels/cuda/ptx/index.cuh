// A 32-bit index from global memory, through the cache for data that no thread of the grid writes.
#pragma once
#include "types.cuh"

// Issued where it stands: the compiler moves a plain load down to where its result is used, and waits for it there.
__device__ __forceinline__ int load_index(const int* address) {
    int x;
    asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(x) : "l"(address) : "memory");
    return x;
}

#pragma once
#include "types.cuh"

// Asks for a line. It may be written meanwhile: the second-level cache is the one that all see.
__device__ __forceinline__ void prefetch_l2(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

#pragma once
#include "types.cuh"

// Asks for a line, which may be written meanwhile.
__device__ __forceinline__ void prefetch_l2(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// Vector loads (ptx/global.cuh) that leave nothing in L1.
#pragma once
#include "ptx/vector.cuh"

// Unlike `load_once`, of what the kernel before may still write until this one waits for it.
__device__ __forceinline__ Chunk load_past_l1(const char* address) {
    Chunk c;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(c.x), "=r"(c.y), "=r"(c.z), "=r"(c.w) : "l"(address));
    return c;
}

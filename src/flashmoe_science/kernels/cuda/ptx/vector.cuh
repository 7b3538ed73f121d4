// Vector loads and stores of shared and global memory.
#pragma once
#include "types.cuh"

struct Chunk {
    uint32 x, y, z, w;
};

__device__ __forceinline__ Chunk load_shared(uint32 address) {
    Chunk c;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(c.x), "=r"(c.y), "=r"(c.z), "=r"(c.w) : "r"(address) : "memory");
    return c;
}

__device__ __forceinline__ void store_shared(uint32 address, const Chunk& c) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
                 ::"r"(address), "r"(c.x), "r"(c.y), "r"(c.z), "r"(c.w) : "memory");
}

__device__ __forceinline__ void store_shared(uint32 address, uint32 value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void store_global(char* address, const Chunk& c) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 ::"l"(address), "r"(c.x), "r"(c.y), "r"(c.z), "r"(c.w) : "memory");
}

__device__ __forceinline__ void store_global(char* address, uint32 value) {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

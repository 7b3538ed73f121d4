// Vector loads and stores of global memory that stay in program order among themselves.
#pragma once
#include "ptx/vector.cuh"

__device__ __forceinline__ Chunk load_global(const char* address) {
    Chunk c;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(c.x), "=r"(c.y), "=r"(c.z), "=r"(c.w) : "l"(address));
    return c;
}

struct HalfChunk {
    uint32 x, y;
};

__device__ __forceinline__ HalfChunk load_global_half(const char* address) {
    HalfChunk c;
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(c.x), "=r"(c.y) : "l"(address));
    return c;
}

// What one thread reads, once, and nobody writes meanwhile.
__device__ __forceinline__ Chunk load_once(const char* address) {
    Chunk c;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(c.x), "=r"(c.y), "=r"(c.z), "=r"(c.w) : "l"(address));
    return c;
}

__device__ __forceinline__ void store_global(char* address, uint32 low, uint32 high) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(address), "r"(low), "r"(high) : "memory");
}

__device__ __forceinline__ float2 load_pair(const float* address) {
    float2 x;
    asm volatile("ld.global.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "l"(address));
    return x;
}

__device__ __forceinline__ void store_pair(float* address, float2 x) {
    asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(address), "f"(x.x), "f"(x.y) : "memory");
}

// It leaves nothing in L1. Unlike `load_once`, of what the kernel before may still write until this one waits for it.
__device__ __forceinline__ Chunk load_past_l1(const char* address) {
    Chunk c;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(c.x), "=r"(c.y), "=r"(c.z), "=r"(c.w) : "l"(address));
    return c;
}

// Asks for a line, which may be written meanwhile.
__device__ __forceinline__ void prefetch_l2(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// Through the cache for data that no thread of the grid writes. Issued where it stands: the compiler moves a plain load down to where its result is used, and waits for it there.
__device__ __forceinline__ int load_index(const int* address) {
    int x;
    asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(x) : "l"(address) : "memory");
    return x;
}

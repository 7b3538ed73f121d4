// Single 16-bit elements in global memory, float32 in registers.
#pragma once
#include "types.cuh"

__device__ __forceinline__ float load_element(const uint16* address) {
    const uint16 bits = *address;
    float x;
#if ELEMENT_BF16
    asm("{\n.reg .b16 zero;\nmov.b16 zero, 0;\nmov.b32 %0, {zero, %1};\n}" : "=f"(x) : "h"(bits));
#else
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
#endif
    return x;
}

// Rounded to nearest even.
__device__ __forceinline__ void store_element(char* address, float x) {
    asm volatile("st.global.u16 [%0], %1;" ::"l"(address), "h"(static_cast<uint16>(pack(x, 0.0f))) : "memory");
}

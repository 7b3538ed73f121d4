// 16-bit elements, float32 in registers: single ones in global memory, and pairs.
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

// Two in one register.
__device__ __forceinline__ float2 unpack(uint32 pair) {
    float2 x;
#if ELEMENT_BF16
    x.x = __int_as_float(static_cast<int>(pair << 16));
    x.y = __int_as_float(static_cast<int>(pair & 0xffff0000u));
#else
    asm("{\n.reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.f32.f16 %0, low;\n"
        "cvt.f32.f16 %1, high;\n}"
        : "=f"(x.x), "=f"(x.y) : "r"(pair));
#endif
    return x;
}

// Two 16-bit elements in one register as two floats.
#pragma once
#include "types.cuh"

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

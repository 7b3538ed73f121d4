// Element types and the few conversions that the kernels need. No toolkit header is included anywhere.
//
// ELEMENT_BF16 (macro): 1 for bfloat16, 0 for float16.
// NATIVE_CP_ASYNC (macro): 1 uses cp.async (sm_80 and later), 0 copies through registers (sm_75).
// MMA_K (macro): 16 for m16n8k16 (sm_80 and later), 8 for m16n8k8 (sm_75, float16 only).
#pragma once

using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;
using int64 = long long;

constexpr int kElementBytes = 2;
constexpr int kChunkBytes = 16;                               // one cp.async, one ldmatrix row
constexpr int kChunkElements = kChunkBytes / kElementBytes;

// A compile-time choice as a function argument.
template <bool Value>
struct Flag {
    static constexpr bool value = Value;
};

#define NEGATIVE_INFINITY __int_as_float(0xff800000)
#define POSITIVE_INFINITY __int_as_float(0x7f800000)

// Two floats as one register of two 16-bit elements, `low` in the low half, rounded to nearest even.
__device__ __forceinline__ uint32 pack(float low, float high) {
    uint32 packed;
#if ELEMENT_BF16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#elif MMA_K == 16
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#else
    asm("{\n.reg .b16 l, h;\n"
        "cvt.rn.f16.f32 l, %1;\n"
        "cvt.rn.f16.f32 h, %2;\n"
        "mov.b32 %0, {l, h};\n}"
        : "=r"(packed) : "f"(low), "f"(high));
#endif
    return packed;
}

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Not fmaxf, which drops a NaN: a NaN score must reach its whole row, through the row's maximum.
__device__ __forceinline__ float max_nan(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

__device__ __forceinline__ uint32 shared_address(const void* pointer) {
    return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

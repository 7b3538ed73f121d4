// FP8 (e4m3) as elements that are multiplied, and bfloat16 as float16 where those are float16.
//
// NATIVE_FP8 (macro): 1: an instruction widens (sm_89 and later), to float16; else bits are moved, and the code for NaN becomes 480.
// QUERY_BF16 (macro): 1: queries and results are bfloat16, 0: float16.
#pragma once
#include "types.cuh"

// Of two codes in the high bytes of the halves of `x`, whatever the low bytes hold. A code, moved to where sign, exponent and
// mantissa of a wider type are, is its number but for the difference of the exponents' biases: one multiplication by a power of
// two, which makes subnormal numbers right too.
__device__ __forceinline__ uint32 move_fp8(uint32 x) {
    uint32 wide;
#if ELEMENT_BF16
    const uint32 moved = (x & 0x7f007f00) >> 4 | (x & 0x80008000);
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(wide) : "r"(moved), "r"(0x7b807b80), "r"(0x80008000));  // * 2^120 - 0
#else
    const uint32 moved = (x & 0x7f007f00) >> 1 | (x & 0x80008000);
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(wide) : "r"(moved), "r"(0x5c005c00));  // * 2^8
#endif
    return wide;
}

// Codes 0 and 1 of the four in `x`.
__device__ __forceinline__ uint32 widen_low(uint32 x) {
#if NATIVE_FP8 && !ELEMENT_BF16
    uint32 wide;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}" : "=r"(wide) : "r"(x));
    return wide;
#else
    return move_fp8(__byte_perm(x, 0, 0x1000));
#endif
}

// And 2 and 3.
__device__ __forceinline__ uint32 widen_high(uint32 x) {
#if NATIVE_FP8 && !ELEMENT_BF16
    uint32 wide;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, high;\n}" : "=r"(wide) : "r"(x));
    return wide;
#else
    return move_fp8(__byte_perm(x, 0, 0x3020));
#endif
}

// Two elements of a query.
__device__ __forceinline__ uint32 query_as_half(uint32 pair) {
#if QUERY_BF16 && !ELEMENT_BF16
    return pack(__int_as_float(static_cast<int>(pair << 16)), __int_as_float(static_cast<int>(pair & 0xffff0000u)));
#else
    return pair;
#endif
}

// Two elements of a result.
__device__ __forceinline__ uint32 pack_result(float low, float high) {
#if QUERY_BF16 && !ELEMENT_BF16
    uint32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
#else
    return pack(low, high);
#endif
}

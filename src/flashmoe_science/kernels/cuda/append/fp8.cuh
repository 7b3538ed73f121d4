// Numbers in float32 to codes of e4m3, rounded to nearest even, in integer arithmetic that every GPU has.
#pragma once
#include "types.cuh"

constexpr float kLargestFp8 = 448.0f;

// What is beyond the largest becomes the largest; NaN stays NaN.
__device__ __forceinline__ uint32 fp8_of(float x) {
    const uint32 bits = __float_as_uint(x), sign = bits >> 24 & 0x80;
    const float magnitude = fminf(fabsf(x), kLargestFp8);
    if (x != x) return sign | 0x7f;
    // Below the smallest normal number, 2^-6, codes count multiples of 2^-9, and so does the last bit of 2^14 + x.
    if (magnitude < 0.015625f) return sign | (__float_as_uint(magnitude + 16384.0f) & 0xf);
    const uint32 m = __float_as_uint(magnitude);
    return sign | (((m + 0x7ffff + (m >> 20 & 1)) >> 20) - (120 << 3));
}

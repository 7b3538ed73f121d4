#pragma once
#include "types.cuh"
// By the definition of e4m3.
inline float fp8_value(uint32 code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    if ((code & 127) == 127) return __int_as_float(0x7fc00000);
    const float size = exponent == 0 ? ldexpf(mantissa, -9) : ldexpf(8 + mantissa, exponent - 10);
    return code & 128 ? -size : size;
}
inline uint32 widen_low(uint32 x) { return pack(fp8_value(x & 255), fp8_value(x >> 8 & 255)); }
inline uint32 widen_high(uint32 x) { return widen_low(x >> 16); }
inline uint32 bf16_of(float x) {
    const uint32 bits = __float_as_uint(x);
    return x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline uint32 query_as_half(uint32 pair) { return QUERY_BF16 && !ELEMENT_BF16 ? pack(__int_as_float(pair << 16), __int_as_float(pair & 0xffff0000u)) : pair; }
inline uint32 pack_result(float low, float high) { return QUERY_BF16 && !ELEMENT_BF16 ? bf16_of(low) | bf16_of(high) << 16 : pack(low, high); }

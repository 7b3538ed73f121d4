// Types of elements: the 16-bit formats as storage, and their conversion in integer arithmetic that any compiler
// vectorises.
#pragma once

#include <stdint.h>
#include <string.h>

template <class T>
constexpr T smaller(T a, T b) { return a < b ? a : b; }
template <class T>
constexpr T larger(T a, T b) { return a > b ? a : b; }

enum ElementType : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

// Of three functions, the one for a type.
template <class F>
F for_element(int64_t type, F of_float32, F of_bfloat16, F of_float16) {
    return type == FLOAT32 ? of_float32 : type == BFLOAT16 ? of_bfloat16 : of_float16;
}

struct Half {
    uint16_t bits;
};

struct BFloat16 {
    uint16_t bits;
};

static inline float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float widen(float x) { return x; }

static inline float widen(BFloat16 x) { return float_of((uint32_t)x.bits << 16); }

static inline float widen(Half x) {
    const uint32_t sign = (uint32_t)(x.bits & 0x8000u) << 16;
    const uint32_t magnitude = (uint32_t)(x.bits & 0x7fffu) << 13;
    // Moves the exponent's bias from 15 to 127 and makes subnormals normal in one multiplication.
    const uint32_t finite = bits_of(float_of(magnitude) * 0x1p112f);
    const uint32_t special = magnitude >= 0x0f800000u ? 0x7f800000u : 0u;
    return float_of(sign | finite | special);
}

static inline void narrow(float* out, float x) { *out = x; }

static inline void narrow(BFloat16* out, float x) {
    const uint32_t bits = bits_of(x);
    const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    out->bits = (uint16_t)((x != x ? (bits | 0x400000u) : rounded) >> 16);
}

static inline void narrow(Half* out, float x) {
    const uint32_t bits = bits_of(x);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t half;
    if (magnitude > 0x7f800000u) {
        half = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
    } else if (magnitude >= 0x47800000u) {
        half = 0x7c00u;
    } else if (magnitude < 0x38800000u) {
        // A subnormal: adding 0.5 lets the adder shift and round to a multiple of 2^-24.
        half = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
    } else {
        half = (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1u)) >> 13;
    }
    out->bits = (uint16_t)(sign | half);
}

static inline unsigned is_nonfinite(float x) { return (bits_of(x) & 0x7f800000u) == 0x7f800000u; }
static inline unsigned is_nonfinite(BFloat16 x) { return (x.bits & 0x7f80u) == 0x7f80u; }
static inline unsigned is_nonfinite(Half x) { return (x.bits & 0x7c00u) == 0x7c00u; }

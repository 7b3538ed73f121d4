/* The element type that this compilation is for, and its conversions, without the toolkit's headers.
 *
 * The lab defines CUDADENT42_ELEMENT (see attention.h) and compiles a source once for each dtype. A kernel may as well use
 * __half and __nv_bfloat16: `toolkit_headers = true` in its TOML file lets it include cuda_fp16.h.
 */
#ifndef CUDADENT42_ELEMENT_H
#define CUDADENT42_ELEMENT_H

#include "cudadent42/attention.h"

#ifdef __CUDACC__
#define CUDADENT42_INLINE __device__ __forceinline__
#else
#define CUDADENT42_INLINE static inline
#endif

#if CUDADENT42_ELEMENT == CUDADENT42_FP32

typedef float cudadent42_element;
CUDADENT42_INLINE float cudadent42_load(const cudadent42_element *from) { return *from; }
CUDADENT42_INLINE void cudadent42_store(cudadent42_element *to, float value) { *to = value; }

#else

typedef unsigned short cudadent42_element;

CUDADENT42_INLINE float cudadent42_from_bits(unsigned int bits) {
    union {
        unsigned int bits;
        float value;
    } both;
    both.bits = bits;
    return both.value;
}

CUDADENT42_INLINE unsigned int cudadent42_to_bits(float value) {
    union {
        float value;
        unsigned int bits;
    } both;
    both.value = value;
    return both.bits;
}

#if CUDADENT42_ELEMENT == CUDADENT42_BF16

CUDADENT42_INLINE float cudadent42_load(const cudadent42_element *from) {
    return cudadent42_from_bits((unsigned int)*from << 16);
}

/* To the nearest, ties to even; NaN stays NaN. */
CUDADENT42_INLINE void cudadent42_store(cudadent42_element *to, float value) {
    unsigned int bits = cudadent42_to_bits(value);
    *to = value != value ? 0x7fc0 : (cudadent42_element)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#elif defined(__CUDACC__)

CUDADENT42_INLINE float cudadent42_load(const cudadent42_element *from) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(*from));
    return value;
}

CUDADENT42_INLINE void cudadent42_store(cudadent42_element *to, float value) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(*to) : "f"(value));
}

#else

CUDADENT42_INLINE float cudadent42_load(const cudadent42_element *from) {
    unsigned int half = *from, sign = (half & 0x8000) << 16, rest = half & 0x7fff;
    /* A subnormal or normal half is its bits at the top of a float, 2^112 too small. */
    float magnitude = rest < 0x7c00 ? cudadent42_from_bits(rest << 13) * 0x1p112f
                                    : cudadent42_from_bits(0x7f800000 | (rest & 0x3ff) << 13);
    return cudadent42_from_bits(cudadent42_to_bits(magnitude) | sign);
}

/* To the nearest, ties to even; beyond the largest half to infinity; NaN stays NaN. */
CUDADENT42_INLINE void cudadent42_store(cudadent42_element *to, float value) {
    unsigned int bits = cudadent42_to_bits(value), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff, half;
    if (rest > 0x7f800000) {
        half = 0x7e00;
    } else if (rest >= 0x477ff000) { /* 65520, half way from the largest half to the next */
        half = 0x7c00;
    } else if (rest < 0x38800000) { /* subnormal: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits */
        half = cudadent42_to_bits(cudadent42_from_bits(rest) + 0.5f) - 0x3f000000;
    } else {
        half = (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13;
    }
    *to = (cudadent42_element)(sign | half);
}

#endif
#endif
#endif

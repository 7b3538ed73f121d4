// Scalar products of weight rows of 4 bits with few token rows of 16-bit types, in integers: for processors that multiply
// bytes faster than they widen weights and multiply fp32 numbers.
//
// A token is taken in runs of elements that have a unit. In units of 2^e, where 2^e is 2^-21 of the power of two of its
// largest, most runs are integers below 2^22 as they are: bf16 has eight significant bits, fp16 eleven. Each integer is three
// signed bytes, its digits, which are multiplied with the numbers of the weights byte by byte. So a run's product is exact.
// A run that is no such integers is multiplied in fp32, as quantized.h does.
#pragma once

#include "quantized.h"

constexpr int DIGITS = 3;
// Integers are below 2^INTEGER_BITS.
constexpr int INTEGER_BITS = 22;
// Largest magnitudes of a run lie within 2^-UNIT_RANGE and 2^UNIT_RANGE: so no product with its unit is subnormal.
constexpr int UNIT_RANGE = 80;

// 2^n for n in -126 .. 127.
INLINE float power(int n) {
    const int bits = (n + 127) << 23;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

#if defined(__AVX512VNNI__) && defined(__AVX512F__)
#define HAS_INTEGER_ROWS 1
#include "integer_rows_vnni.h"
#elif defined(__AVX2__) && !defined(__AVX512F__)
#define HAS_INTEGER_ROWS 1
#include "integer_rows_avx2.h"
#else
#define HAS_INTEGER_ROWS 0
#endif

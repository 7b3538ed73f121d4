// The vector type that the kernels are written in: one of three implementations with the same operations.
//
//   F                  a vector of W floats
//   load, store        W floats, any alignment
//   set1               one float in every lane
//   madd(a, b, c)      a * b + c (fused where the machine can)
//   max(a, b)          the larger; b where either is NaN
//   select_equal       per lane: a == b ? x : y
//   keep_from(x, j)    x in lanes j and up, minus infinity below
//   times_power        the last step of exp2, see exp2.h: x * 2^n, n as it is in rounded = n + ROUND_MAGIC; 0 where t is
//                      below LOWEST, x where x is NaN
//   sum_lanes(x)       lane i: the sum over the lanes of x[i], of W vectors
//   highest_lane(x)    the largest of the lanes, none of which is NaN
//   load_pairs(p, n)   each lane two neighbouring bf16 numbers, n in all, an even number; zero in the other lanes
//   low_of_pairs(x), high_of_pairs(x)  the first and the second number of each lane
//
// MAX_COLUMNS and rows_for() give the register blocking of gemm.h: as many accumulators as the register file
// holds beside MAX_COLUMNS operand vectors and one broadcast. WIDE_COLUMNS is more where a shape with fewer rows is better.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "numbers.h"

#define INLINE static inline __attribute__((always_inline))

// Whether there are instructions for bf16, or what stands for them: bf16.h.
#if defined(__AVX512BF16__) || defined(EMULATE_BF16)
#define HAS_BF16 1
#else
#define HAS_BF16 0
#endif

// What is added to a number to round it; the sum's low bits are the number and, where an implementation of times_power
// wants it, the exponent's bias.
#define ROUND_BASE 12582912.0f
// 2 to the power of this is zero in fp32, to the nearest.
constexpr float LOWEST = -150.0f;

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include "vector_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "vector_avx2.h"
#else
#include "vector_portable.h"
#endif

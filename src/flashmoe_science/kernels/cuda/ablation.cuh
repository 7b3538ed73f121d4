// What can be left out of an attention kernel to see what it costs. The result is then wrong on purpose; without ABLATE
// the compiled code is the same as if none of this were there.
#pragma once

#include "types.cuh"

#ifndef ABLATE
#define ABLATE 0
#endif

constexpr bool NO_EXPONENTIALS = ABLATE == 1;
constexpr bool NO_MASK = ABLATE == 2;
// Of what a block walks over, keys and values or queries and output gradients: once the stages in shared memory have been filled.
constexpr bool NO_LOADS = ABLATE == 3;
constexpr bool NO_SUMS = ABLATE == 4;  // of a query's gradient in global memory, with the wait for the turn to add to them

// To base 2.
__device__ __forceinline__ float exponential(float x) { return NO_EXPONENTIALS ? x : exp2_approx(x); }

// The exponentials of attention kernels.
#pragma once

#include "ablation.cuh"
#include "types.cuh"

// To base 2.
__device__ __forceinline__ float exponential(float x) { return NO_EXPONENTIALS ? x : exp2_approx(x); }

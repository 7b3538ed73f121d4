// Loads of Hopper's backward kernels that are left out (NO_LOADS, ablation.cuh).
#pragma once

#include "ablation.cuh"
#include "ptx/mbarrier.cuh"

// Whether a stage keeps what an earlier step has loaded; then it is full at once. `step`: how many steps came before, in a ring
// of `stages`.
__device__ __forceinline__ bool keeps_stage(uint32 full, uint32 step, uint32 stages) {
    if (!NO_LOADS || step < stages) return false;
    ptx::mbarrier_arrive(full);
    return true;
}

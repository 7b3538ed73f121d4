// Warpgroups: register reallocation, election (sm_90).
#pragma once

#include "ptx/named_barrier.cuh"
#include "types.cuh"

namespace ptx {

template <int REGISTERS>
__device__ __forceinline__ void give_up_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void claim_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// True in one lane of a converged warp.
__device__ __forceinline__ bool elect_lane() {
    uint32 elected;
    asm volatile(
        "{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(elected));
    return elected != 0;
}

}  // namespace ptx

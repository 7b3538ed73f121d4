// What a warp is done with, told to whoever waits for it.
#pragma once

#include "ptx/mbarrier.cuh"
#include "racecheck.cuh"

namespace backward {

constexpr int RELEASES_OF_WARP = RACECHECK ? 32 : 1;  // arrivals of a warp; see `release`
constexpr int RELEASES = 4 * RELEASES_OF_WARP;        // of a warpgroup

__device__ __forceinline__ void release(uint32 barrier) {
    __syncwarp();
    if (RACECHECK || threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
}

}  // namespace backward

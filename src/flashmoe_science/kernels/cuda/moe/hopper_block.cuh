// A block of the Hopper kernels of grouped products.
#pragma once

#include "moe/hopper_shared.cuh"
#include "ptx/bulk.cuh"
#include "ptx/dependent_launch.cuh"
#include "ptx/warpgroup.cuh"

namespace moe {

// A producer warpgroup and two consumers. `prefetch_maps`, `produce` and `consume` are of the kernel.
template <class P>
__device__ __forceinline__ void work(const P& parameters, uint32 raw) {
    // Dynamic shared memory is only guaranteed to start on 16 bytes; the launch asks for 1024 more.
    const Shared shared{(raw + 1023) & ~1023u};

    const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x / 32), 0);
    if (warp == 0 && ptx::elect_lane()) {
        prefetch_maps(parameters);
        initialise(shared);
    }
    meet();
    if (GATHER) wait_for_predecessor();  // else the producer does, later
    allow_successor();

    if (warp < 4) {
        ptx::give_up_registers<PRODUCER_REGISTERS>();
        produce(parameters, shared, warp);
    } else {
        ptx::claim_registers<CONSUMER_REGISTERS>();
        consume(parameters, shared, warp / 4 - 1);
    }
    if constexpr (CLUSTER == 2) meet();
}

}  // namespace moe

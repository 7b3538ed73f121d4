// What a block does: four warps of producers, and the warpgroups that consume.
#pragma once

#include "hopper_varlen/consumer.cuh"
#include "hopper_varlen/producer.cuh"
#include "ptx/warpgroup.cuh"

namespace hopper {

// All threads of a block, the `index`-th of so many that share the tiles; `raw`: where dynamic shared memory begins.
__device__ __forceinline__ void go_through_tiles(const Parameters& parameters, unsigned char* raw, int index, int blocks) {
    // Dynamic shared memory is only guaranteed to start on 16 bytes; the launch asks for 1024 more.
    const Shared shared{(shared_address(raw) + 1023) & ~1023u};

    const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x / 32), 0);
    const int warpgroup = warp / 4;
    if (warp == 0 && ptx::elect_lane()) {
        ptx::prefetch_map(parameters.query);
#if !GATHER
        ptx::prefetch_map(parameters.key);
        ptx::prefetch_map(parameters.value);
#endif
        initialise(shared);
    }
    __syncthreads();

    if (warpgroup == 0) {
        ptx::give_up_registers<PRODUCER_REGISTERS>();
        if (warp == 0) {
            produce_keys(parameters, shared);
        } else if (warp == 1) {
            produce_values(parameters, shared);
        } else if (warp == 2) {
#if LAST_ROWS
            produce_last_rows(parameters, shared);
#else
            for (Queries queries; queries.produce(parameters, shared);) {
            }
#endif
        } else {
            hand_out_tiles(parameters, shared, index, blocks);
        }
    } else {
        ptx::claim_registers<CONSUMER_REGISTERS>();
        consume(parameters, shared, warpgroup - 1);
    }
}

}  // namespace hopper

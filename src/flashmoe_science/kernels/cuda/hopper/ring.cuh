// Rings of buffers with a pair of mbarriers each, between the producers and the consumers of a persistent Hopper kernel:
// `full` once the data is there, `empty` once it has been used.
#pragma once

#include "ptx/mbarrier.cuh"
#include "ptx/vector.cuh"

namespace hopper {

// A place in a ring of COUNT buffers, and the parity of its current round.
template <int COUNT>
struct Ring {
    int stage = 0;
    uint32 parity = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == COUNT) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// Marks something that the whole warp has read as free.
__device__ __forceinline__ void release(uint32 barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
}

// Four integers in shared memory, on 16 bytes: a tile of work, as it is published.
__device__ __forceinline__ void store_tile(uint32 address, int first, int second, int third, int fourth) {
    store_shared(address, Chunk{static_cast<uint32>(first), static_cast<uint32>(second), static_cast<uint32>(third),
                                static_cast<uint32>(fourth)});
}

__device__ __forceinline__ void load_tile(uint32 address, int& first, int& second, int& third, int& fourth) {
    const Chunk four = load_shared(address);
    first = static_cast<int>(four.x);
    second = static_cast<int>(four.y);
    third = static_cast<int>(four.z);
    fourth = static_cast<int>(four.w);
}

}  // namespace hopper

// Barriers among the blocks of a cluster (sm_90 and later): arriving at another block's mbarrier, with or without data, and meeting
// all of them.
#pragma once

#include "types.cuh"

namespace ptx {

__device__ __forceinline__ uint32 cluster_rank() {
    uint32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// The address, in the block of the given rank, of what lies at `address` in this block's shared memory.
__device__ __forceinline__ uint32 in_block(uint32 address, uint32 rank) {
    uint32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

// `barrier`: from `in_block`. Orders no memory among blocks: a release at cluster scope would be a fence of all memory.
__device__ __forceinline__ void mbarrier_arrive_at(uint32 barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Stores 4 bytes in another block and completes its barrier there by as many; both addresses from `in_block`.
__device__ __forceinline__ void post(uint32 address, uint32 barrier, int value) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.s32 [%0], %1, [%2];" ::"r"(address), "r"(value),
                 "r"(barrier)
                 : "memory");
}

// All threads of all blocks that have not ended.
__device__ __forceinline__ void cluster_sync() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Stores 16 or 8 bytes in another block and completes its barrier there by as many; both addresses from `in_block`.
__device__ __forceinline__ void post(uint32 address, uint32 barrier, const float4& x) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
                 "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void post(uint32 address, uint32 barrier, const float2& x) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(address), "f"(x.x),
                 "f"(x.y), "r"(barrier)
                 : "memory");
}

// `mbarrier_wait` for what other blocks have posted: it may then be read.
__device__ __forceinline__ void mbarrier_wait_for_posts(uint32 barrier, uint32 parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

}  // namespace ptx

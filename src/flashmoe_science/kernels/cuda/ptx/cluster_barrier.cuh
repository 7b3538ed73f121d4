// Barriers among the blocks of a cluster (sm_90 and later): arriving at another block's mbarrier, and meeting all of them.
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

// `barrier`: from `in_block`. What this thread wrote before is visible to who waits with cluster scope.
__device__ __forceinline__ void mbarrier_arrive_at(uint32 barrier) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// As mbarrier_wait, where other blocks arrive too.
__device__ __forceinline__ void mbarrier_wait_cluster(uint32 barrier, uint32 parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// `address`: from `in_block`.
__device__ __forceinline__ void store_at(uint32 address, int value) {
    asm volatile("st.shared::cluster.s32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// All threads of all blocks that have not ended.
__device__ __forceinline__ void cluster_sync() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

}  // namespace ptx

// Thread-block clusters (sm_90 and later): the cluster barrier, split into its two halves so that work can be put
// between them, and stores into another block's shared memory.
#pragma once

namespace cluster {

__device__ __forceinline__ unsigned rank() {
    unsigned value;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(value));
    return value;
}

// Arrival that publishes nothing: only tells the peers that this block runs, so its shared memory may be written.
__device__ __forceinline__ void arrive_started() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// Arrival that makes this thread's earlier stores visible to every thread that waits.
__device__ __forceinline__ void arrive_release() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Address, in the block of the given rank, of the variable that lies at `local` in this block.
__device__ __forceinline__ unsigned peer_address(const void* local, unsigned rank) {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(local));
    unsigned peer;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer) : "r"(address), "r"(rank));
    return peer;
}

__device__ __forceinline__ void store(unsigned address, float4 x) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};"
                 :: "r"(address), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
}

__device__ __forceinline__ void store(unsigned address, float2 x) {
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" :: "r"(address), "f"(x.x), "f"(x.y) : "memory");
}

}  // namespace cluster

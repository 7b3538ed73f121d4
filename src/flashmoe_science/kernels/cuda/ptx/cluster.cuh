// Thread-block clusters (sm_90 and later): messages from one block into the shared memory of another.
//
// A mailbox is an mbarrier that counts the bytes that arrive. Its block opens it, then every block of the cluster
// tells the others that it is ready (announce) and, before it posts, waits until they are. A message is a vector
// store that adds its bytes to the receiver's mailbox, so neither side needs a cluster barrier or a memory fence after it.
#pragma once
#include "types.cuh"

namespace cluster {

__device__ __forceinline__ uint32 rank() {
    uint32 value;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(value));
    return value;
}

// Opens a mailbox that is full after `bytes`. One thread, before it announces.
__device__ __forceinline__ void open_mailbox(uint64* mailbox, uint32 bytes) {
    const uint32 address = shared_address(mailbox);
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes) : "memory");
}

// All threads: this block runs and its mailbox is open.
__device__ __forceinline__ void announce() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }

// All threads: every block of the cluster has announced.
__device__ __forceinline__ void wait_for_peers() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Address, in the block of the given rank, of the variable that lies at `local` in this block.
__device__ __forceinline__ uint32 peer_address(const void* local, uint32 rank) {
    uint32 peer;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer) : "r"(shared_address(local)), "r"(rank));
    return peer;
}

__device__ __forceinline__ void post(uint32 address, uint32 mailbox, float4 x) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                 ::"r"(address), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(mailbox) : "memory");
}

__device__ __forceinline__ void post(uint32 address, uint32 mailbox, float2 x) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];"
                 ::"r"(address), "f"(x.x), "f"(x.y), "r"(mailbox) : "memory");
}

// Waits until the mailbox is full; what was posted may then be read.
__device__ __forceinline__ void wait_for_mail(uint64* mailbox) {
    asm volatile(
        "{\n.reg .pred full;\n"
        "wait:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 full, [%0], 0;\n"
        "@!full bra wait;\n}"
        ::"r"(shared_address(mailbox)) : "memory");
}

}  // namespace cluster

// Vectors of floats for other blocks of a cluster (sm_90 and later): see cluster_barrier.cuh.
#pragma once

#include "types.cuh"

namespace ptx {

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

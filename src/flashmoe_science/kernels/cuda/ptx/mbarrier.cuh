// mbarrier: a shared-memory barrier that counts arrivals and, for TMA, bytes (PTX ISA, "mbarrier").
//
// A barrier's phase flips when all expected arrivals and bytes are in. `wait(bar, parity)` returns once the phase of
// that parity has completed: a consumer starts at parity 0; a producer that waits for free space starts at 1, which
// passes at once on a fresh barrier.
#pragma once

#include "types.cuh"

namespace ptx {

__device__ __forceinline__ void mbarrier_init(uint32 barrier, uint32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the async proxy; __syncthreads() must follow.
__device__ __forceinline__ void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_expect_bytes(uint32 barrier, uint32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives once all cp.async of this thread so far have landed. Counts among the expected arrivals like any other.
__device__ __forceinline__ void mbarrier_arrive_after_copies(uint32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void mbarrier_wait(uint32 barrier, uint32 parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

}  // namespace ptx

// Copies and the eviction order of L2 (PTX ISA, "createpolicy"; sm_80 and later).
#pragma once
#include "types.cuh"

// For what is read once and should not push out what is read again.
__device__ __forceinline__ uint64 evict_first_policy() {
    uint64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
    return policy;
}

// `copy_chunk` under a policy.
__device__ __forceinline__ void copy_chunk(uint32 shared, const char* global, bool valid, uint64 policy) {
    asm volatile(
        "{\n.reg .pred ignore;\n"
        "setp.eq.u32 ignore, %2, 0;\n"
        "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, ignore, %3;\n}"
        ::"r"(shared), "l"(global), "r"(static_cast<uint32>(valid)), "l"(policy) : "memory");
}

// 16-byte asynchronous copies from global to shared memory, with zero fill.
#pragma once
#include "types.cuh"

// Copies 16 bytes, or writes 16 zero bytes and reads nothing where `valid` is false.
__device__ __forceinline__ void copy_chunk(uint32 shared, const char* global, bool valid) {
#if NATIVE_CP_ASYNC
    asm volatile(
        "{\n.reg .pred ignore;\n"
        "setp.eq.u32 ignore, %2, 0;\n"
        "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, ignore;\n}"
        ::"r"(shared), "l"(global), "r"(static_cast<uint32>(valid)) : "memory");
#else
    uint32 x = 0, y = 0, z = 0, w = 0;
    if (valid) {
        asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x), "=r"(y), "=r"(z), "=r"(w) : "l"(global));
    }
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
                 ::"r"(shared), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
#endif
}

// Closes the group of copies issued since the last call.
__device__ __forceinline__ void copy_commit() {
#if NATIVE_CP_ASYNC
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most `Pending` of this thread's groups are in flight.
template <int Pending>
__device__ __forceinline__ void copy_wait() {
#if NATIVE_CP_ASYNC
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
#endif
}

// An eviction order of L2 (PTX ISA, "createpolicy"; sm_80 and later): for what is read once and should not push out what is read again.
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

// Bulk copies of contiguous bytes between global and shared memory, by the asynchronous proxy (PTX ISA, "cp.async.bulk",
// "cp.reduce.async.bulk"). Addresses and sizes are multiples of 16 bytes.
#pragma once

#include "types.cuh"

namespace ptx {

// Global to shared; completes `barrier` by `bytes`.
__device__ __forceinline__ void bulk_load(uint32 destination, const void* source, uint32 bytes, uint32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
                 "l"(source), "r"(bytes), "r"(barrier)
                 : "memory");
}

// Shared to global, in the thread's current bulk group.
__device__ __forceinline__ void bulk_store(void* destination, uint32 source, uint32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination), "r"(source), "r"(bytes)
                 : "memory");
}

// Adds floats in shared memory to floats in global memory, each rounded to nearest even.
__device__ __forceinline__ void bulk_add(void* destination, uint32 source, uint32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(destination), "r"(source),
                 "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until this thread's bulk groups have read their sources, so that those may be overwritten.
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Waits until this thread's bulk groups are complete: what they wrote is visible to it.
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Orders this thread's ordinary accesses of shared (or global) memory before later ones of the asynchronous proxy, and back.
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

}  // namespace ptx

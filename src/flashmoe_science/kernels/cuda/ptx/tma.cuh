// The tensor memory accelerator: boxes of a tensor to shared memory (PTX ISA, "cp.async.bulk.tensor").
#pragma once

#include "types.cuh"

namespace ptx {

// CUtensorMap, opaque here. Encoded on the host; passed by value in a __grid_constant__ parameter.
struct alignas(64) TensorMap {
    uint64 opaque[16];
};

// L2 eviction priorities, as createpolicy encodes them for a whole access.
constexpr uint64 EVICT_FIRST = 0x12F0000000000000ull;
constexpr uint64 EVICT_LAST = 0x14F0000000000000ull;

__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64>(&map)) : "memory");
}

// Loads the box whose first element is (x, y, z, w), fastest dimension first; out of bounds reads as zero. Completes
// `barrier` by the box's full size in bytes.
__device__ __forceinline__ void tma_load(const TensorMap& map, uint32 destination, uint32 barrier, uint64 policy, int x, int y,
                                         int z, int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(destination),
        "l"(reinterpret_cast<uint64>(&map)), "r"(barrier), "l"(policy), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}

// The same for tensors of 2 to 5 dimensions, under L2's usual policy.
__device__ __forceinline__ void tma_load(const TensorMap& map, uint32 destination, uint32 barrier, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            destination),
        "l"(reinterpret_cast<uint64>(&map)), "r"(barrier), "r"(x), "r"(y)
        : "memory");
}

__device__ __forceinline__ void tma_load(const TensorMap& map, uint32 destination, uint32 barrier, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(destination),
        "l"(reinterpret_cast<uint64>(&map)), "r"(barrier), "r"(x), "r"(y), "r"(z)
        : "memory");
}

__device__ __forceinline__ void tma_load(const TensorMap& map, uint32 destination, uint32 barrier, int x, int y, int z, int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(destination),
        "l"(reinterpret_cast<uint64>(&map)), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}

__device__ __forceinline__ void tma_load(const TensorMap& map, uint32 destination, uint32 barrier, int x, int y, int z, int w,
                                         int v) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(destination),
        "l"(reinterpret_cast<uint64>(&map)), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v)
        : "memory");
}

// In the thread's current bulk group; nothing is written out of bounds.
__device__ __forceinline__ void tma_store(const TensorMap& map, uint32 source, int x, int y, int z, int w) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
                     reinterpret_cast<uint64>(&map)),
                 "r"(source), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}

}  // namespace ptx

// Boxes of a tensor (ptx/tma.cuh) into the shared memory of both blocks of a cluster of two, at the same place, with the same
// effect on the barrier of each.
#pragma once

#include "ptx/tma.cuh"

namespace ptx {

__device__ __forceinline__ void tma_load_to_both(const TensorMap& map, uint32 destination, uint32 barrier, int x, int y,
                                                 int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%4, %5, %6}], [%2], %3;" ::"r"(destination),
        "l"(reinterpret_cast<uint64>(&map)), "r"(barrier), "h"(static_cast<uint16>(3)), "r"(x), "r"(y), "r"(z)
        : "memory");
}

__device__ __forceinline__ void tma_load_to_both(const TensorMap& map, uint32 destination, uint32 barrier, int x, int y,
                                                 int z, int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(destination),
        "l"(reinterpret_cast<uint64>(&map)), "r"(barrier), "h"(static_cast<uint16>(3)), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}

__device__ __forceinline__ void tma_load_to_both(const TensorMap& map, uint32 destination, uint32 barrier, int x, int y,
                                                 int z, int w, int v) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3;" ::"r"(destination),
        "l"(reinterpret_cast<uint64>(&map)), "r"(barrier), "h"(static_cast<uint16>(3)), "r"(x), "r"(y), "r"(z),
        "r"(w), "r"(v)
        : "memory");
}

}  // namespace ptx

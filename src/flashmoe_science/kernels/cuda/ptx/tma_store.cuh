// TMA: boxes of shared memory to a tensor.
#pragma once

#include "ptx/tma.cuh"

namespace ptx {

// In the thread's current bulk group; nothing is written out of bounds.
__device__ __forceinline__ void tma_store(const TensorMap& map, uint32 source, int x, int y, int z, int w) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
                     reinterpret_cast<uint64>(&map)),
                 "r"(source), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}

}  // namespace ptx

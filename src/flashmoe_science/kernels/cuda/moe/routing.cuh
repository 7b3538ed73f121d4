// Routing: slots (token * top_k + j) sorted by expert, ascending within an expert, and where each expert's begin.
//
// A stable counting sort. A block takes a run of slots, a warp a run of those, 32 at a time: lanes with the same expert find
// each other and take consecutive places. With more than one block, `moe_count` first counts each block's slots of each
// expert. Ids outside [0, experts) are left out. No atomics decide an order.
//
// Compile-time configuration: CAPACITY (of experts, a power of two), WARPS, LOADS (slots of a thread), IDS64, DEPENDENT
// (ptx/dependent_launch.cuh).
#pragma once
#include "types.cuh"

#if DEPENDENT
#include "ptx/dependent_launch.cuh"
#endif

namespace routing {

constexpr int THREADS = WARPS * 32;
constexpr int CHUNK = THREADS * LOADS;
constexpr uint32 ALL = 0xffffffff;
constexpr int TICKETS = 8;

struct Parameters {
    const void* ids;
    int* expert_offsets;  // experts + 1
    int* sorted_slots;    // as many as there are valid ids are written
    int* counts;          // (blocks, experts): slots of an expert in a block's chunk; unused by a single block
    int* tickets;         // as many counters to set to zero
    int slots;
    int experts;
};

__device__ __forceinline__ void begin() {
#if DEPENDENT
    wait_for_predecessor();
    allow_successor();
#endif
}

// The expert of a slot, or -1 where it is not to be sorted.
__device__ __forceinline__ int expert_of(const Parameters& p, int64 slot) {
    if (slot >= p.slots) return -1;
#if IDS64
    const int64 id = static_cast<const int64*>(p.ids)[slot];
#else
    const int id = static_cast<const int*>(p.ids)[slot];
#endif
    return id >= 0 && id < p.experts ? static_cast<int>(id) : -1;
}

}  // namespace routing

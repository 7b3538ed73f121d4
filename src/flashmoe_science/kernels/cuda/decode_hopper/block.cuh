// What a block does: a warp finds its share, warps write rows without keys, and all go through the segments.
#pragma once

#include "decode_hopper/consumer.cuh"
#include "decode_hopper/producer.cuh"
#include "ptx/dependent_launch.cuh"
#include "ptx/warpgroup.cuh"

namespace {

// In shared memory.
struct Work {
    Segment* segments;   // [kSlots]
    Meeting* meetings;   // [kSlots]
    Cursor* cursor;
    float2 (*statistics)[kConsumers];  // [kRows]
};

// All threads of a block, one of so many workers; `raw`: where dynamic shared memory begins.
__device__ __forceinline__ void go_through_share(const Parameters& p, const Maps& maps, unsigned char* raw, const Work& work,
                                                 int workers) {
    // Dynamic shared memory is only guaranteed to start on 16 bytes; the launch asks for 1024 more.
    const uint32 start = shared_address(raw), skipped = (1024 - start % 1024) % 1024;
    const Shared shared{start + skipped};
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
#if PAGES < 2
        ptx::prefetch_map(maps.key);
        ptx::prefetch_map(maps.value);
#endif
        initialise(shared);
    }
#if PARTS > 1
    __syncwarp();
    cluster::announce();  // that the barriers are there
#endif
#if DEPENDENT
    if (!warm_up(p)) return;
    wait_for_predecessor();
#endif
    if (warp == kConsumerWarps) begin_share(p, Team(p, workers), *work.cursor, work.segments[0], lane);
    else if (warp > 0 && warp < WARPS) write_rows_without_keys(p, warp, lane, PARTS * workers);
    __syncthreads();
#if PARTS > 1
    cluster::wait_for_peers();
#endif
    if (warp >= kConsumerWarps) {
        ptx::give_up_registers<kProducerRegisters>();
        const int loader = warp - kConsumerWarps;
        if (loader < kLoadingWarps) produce(p, maps, shared, *work.cursor, work.segments, work.meetings, loader, lane);
    } else {
        ptx::claim_registers<kConsumerRegisters>();
        consume(p, shared, reinterpret_cast<const char*>(raw) + skipped, work.segments, work.meetings, work.statistics);
    }
#if PARTS > 1
    ptx::cluster_sync();  // others may still tell this block's barrier that they have read
#endif
}

}  // namespace

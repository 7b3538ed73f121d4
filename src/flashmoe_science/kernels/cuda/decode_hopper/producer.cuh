// The warps that load keys and values, by TMA (boxes.cuh) or row by row (rows.cuh). The first of them also finds the block's segments
// and publishes them.
#pragma once

#include "decode_hopper/shared.cuh"
#if PAGES == 2
#include "decode_hopper/rows.cuh"
#else
#include "decode_hopper/boxes.cuh"
#endif

namespace {

// All lanes of the warps that load. The first segment is there.
__device__ __forceinline__ void produce(const Parameters& p, const Maps& maps, const Shared& shared, Cursor& cursor,
                                        Segment* segments, Meeting* meetings, int warp, int lane) {
    hopper::Ring<STAGES> ring;
    for (int s = 0;; ++s) {
        const int slot = s % kSlots, next = (s + 1) % kSlots;
        const Segment& segment = segments[slot];
        if (warp > 0) {
            if (s > 0) ptx::mbarrier_wait(shared.segment_full(slot), s / kSlots % 2);
        } else if (lane == 0) {
            ptx::mbarrier_arrive(shared.segment_full(slot));
        }
        if (segment.passes == 0) return;
        Loader loader(p, maps, segment, warp, lane);
        const int tiles = tiles_of_segment(segment);
        for (int number = 0; number < tiles; ++number, ring.advance())
            loader.load(p, shared, segment, number, ring.stage, ring.parity, lane);
        if (warp > 0) {
            hopper::release(shared.segment_empty(slot));
        } else {
            ptx::mbarrier_wait(shared.segment_empty(next), (s + 1) / kSlots % 2 ^ 1);
            if (lane == 0) {
                arrange(p, cursor, segment, meetings[slot]);  // consumers look once the next segment is there
                next_segment(p, cursor, segments[next]);
            }
            __syncwarp();
        }
    }
}

}  // namespace

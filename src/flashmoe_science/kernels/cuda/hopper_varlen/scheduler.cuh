// Which tile next. The grid is persistent: block b starts with tile b, then takes tickets.
//
// Tiles are numbered so that the dear ones come first: by class, of which each spans half an octave of blocks of keys; in a class
// by sequence, slice, and row from the last one up. Tiles of a slice and a class come together, so that what they read of the
// same keys comes from L2. Nothing is prepared: each block counts the tiles of the classes itself, 32 sequences at a time,
// and goes on from where its last tile was.
#pragma once

#include "hopper_varlen/shared.cuh"
#include "ptx/redux.cuh"

namespace hopper {

constexpr uint32 ALL_LANES = 0xffffffff;

// The most blocks of keys that tiles of a class see: 1, 1, 2, 3, 4, 6, 8, 12, 16, ...
__device__ __forceinline__ int class_bound(int index) { return ((2 + (index & 1)) << (index >> 1)) >> 1; }

__device__ __forceinline__ int sum_to_lane(int x, int lane) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(ALL_LANES, x, distance);
        if (lane >= distance) x += other;
    }
    return x;
}

// Of one warp. What is kept while blocks of keys are loaded is little: producers have few registers.
struct Scheduler {
    int index = 0;   // of the class
    int group = 0;   // of 32 sequences
    int before = 0;  // tiles of the classes and groups before

    __device__ __forceinline__ explicit Scheduler(const Parameters& p) {
        int most = 0;
        for (int i = threadIdx.x % 32; i <= p.batch; i += 32) most = max(most, Sequence(p, i).most_blocks(p));
        most = over_lanes<32>(most, [](int a, int b) { return max(a, b); });
        while (class_bound(index) < most) ++index;
    }

    // By a whole warp: publishes tile `number`, or the end; numbers must not fall. False at the end: `before` is then how many
    // tiles there are.
    __device__ __forceinline__ bool publish(const Parameters& p, const Shared& shared, Ring<TILE_SLOTS>& slot, int number) {
        const int lane = threadIdx.x % 32;
        const int groups = p.batch / 32 + 1;
        Sequence sequence(p, 32 * group + lane);
        while (index >= 0) {
            // Of the lane's sequence: its tiles of the class [low, high) of each slice.
            const int high = sequence.tiles_within(p, class_bound(index));
            const int low = index == 0 ? 0 : sequence.tiles_within(p, class_bound(index - 1));
            const int own = (high - low) * p.slices;
            const int up_to = before + sum_to_lane(own, lane);
            const int all = __shfl_sync(ALL_LANES, up_to, 31);
            if (number < all) {
                ptx::mbarrier_wait(shared.tile_empty(slot.stage), slot.parity ^ 1);
                const int within = number - (up_to - own);
                if (within >= 0 && within < own) {
                    const int slice = within / (high - low);
                    store_tile(shared, slot.stage, sequence.tile(p, slice, high - 1 - (within - slice * (high - low))));
                    ptx::mbarrier_arrive(shared.tile_full(slot.stage));
                }
                __syncwarp();  // the warp reads it without waiting at the barrier
                return true;
            }
            before = all;
            if (++group == groups) {
                group = 0;
                --index;
            }
            if (groups > 1) sequence = Sequence(p, 32 * group + lane);
        }
        ptx::mbarrier_wait(shared.tile_empty(slot.stage), slot.parity ^ 1);
        if (lane == 0) {
            store_tile(shared, slot.stage, Tile{-1, 0, 0, 0, 0, 0, 0, 0});
            ptx::mbarrier_arrive(shared.tile_full(slot.stage));
        }
        return false;
    }
};

// Every block draws a ticket for each tile that it gets, so `tiles` are drawn in all; whoever has the last one sets the counter
// back for the next launch.
__device__ __forceinline__ void give_back(const Parameters& p, int ticket, int tiles) {
    if (ticket == tiles - 1) atomicExch(p.ticket, 0);
}

}  // namespace hopper

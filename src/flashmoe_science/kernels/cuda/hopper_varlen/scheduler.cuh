// Which tile next. Blocks are persistent: block b starts with tile b, then takes tickets.
//
// Tiles are numbered so that the dear ones come first: by class, of which each spans half an octave of blocks of keys; in a class
// by sequence, slice, and row from the last one up. Under a causal mask short sequences of more than a tile come after the others,
// by sections: neighbours whose keys and values fit L2 together, each by class. Each block counts the tiles itself, 32 sequences
// at a time, and goes on from where its last tile was.
#pragma once

#include "hopper_varlen/shared.cuh"
#include "ptx/redux.cuh"

namespace hopper {

constexpr uint32 ALL_LANES = 0xffffffff;

constexpr bool SECTIONS = CAUSAL && !LEFT_WINDOW && SECTION_MIB > 0;
constexpr int SHORT_KEYS = 2048;  // at most, of a sequence in a section; where there are more, a class has tiles enough
constexpr uint32 SECTION_KIB = SECTIONS ? 1024 * SECTION_MIB : 1;
constexpr int BLOCK_KIB = (KEY_BYTES + VALUE_BYTES) / 1024;

// The most blocks of keys that tiles of a class see: 1, 2, 3, 4, 6, 8, 12, 16, ...
__device__ __forceinline__ int class_bound(int index) { return ((3 - (index & 1)) << ((index + 1) >> 1)) >> 1; }

__device__ __forceinline__ int sum_to_lane(int x, int lane) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(ALL_LANES, x, distance);
        if (lane >= distance) x += other;
    }
    return x;
}

__device__ __forceinline__ int most_of_lanes(int x) {
    return over_lanes<32>(x, [](int a, int b) { return max(a, b); });
}

// Of one warp.
struct Scheduler {
    int index;         // of the class; -1: there is no more
    int group = 0;     // of 32 sequences, of which a lane has one
    int section = -1;  // of the group; -1: of all groups, what belongs to no section
    int last = -1;     // section of the group
    int before = 0;    // tiles before those of this class
    int own;           // the section of the lane's sequence
    Sequence sequence;

    __device__ __forceinline__ explicit Scheduler(const Parameters& p) : sequence(p, threadIdx.x % 32) {
        int most = 0;
        for (int i = threadIdx.x % 32; i <= p.batch; i += 32) {
            const Sequence each(p, i);
            if (!is_short(p, each)) most = max(most, each.most_blocks(p));
        }
        index = class_of(most_of_lanes(most));
        own = is_short(p, sequence) ? 0 : -1;
        if (index < 0) next_section(p);
    }

    // By a whole warp: publishes tile `number`, or the end; numbers must not fall. False at the end: `before` is then how many
    // tiles there are.
    __device__ __forceinline__ bool publish(const Parameters& p, const Shared& shared, Ring<SLOTS>& slot, int number) {
        const int lane = threadIdx.x % 32;
        while (index >= 0) {
            // Of the lane's sequence: its tiles of the class [low, high) of each slice.
            const bool counts = own == section;
            const int high = counts ? sequence.tiles_within(p, class_bound(index)) : 0;
            const int low = counts && index > 0 ? sequence.tiles_within(p, class_bound(index - 1)) : 0;
            const int tiles = (high - low) * p.slices;
            const int up_to = before + sum_to_lane(tiles, lane);
            const int all = __shfl_sync(ALL_LANES, up_to, 31);
            if (number < all) {
                ptx::mbarrier_wait(shared.tile_empty(slot.stage), slot.parity ^ 1);
                const int within = number - (up_to - tiles);
                if (within >= 0 && within < tiles) {
                    const int slice = within / (high - low);
                    store_tile(shared, slot.stage, sequence.tile(p, slice, high - 1 - (within - slice * (high - low))));
                    ptx::mbarrier_arrive(shared.tile_full(slot.stage));
                }
                slot.advance();
                return true;
            }
            before = all;
            advance(p);
        }
        ptx::mbarrier_wait(shared.tile_empty(slot.stage), slot.parity ^ 1);
        if (lane == 0) {
            store_tile(shared, slot.stage, Tile{-1, 0, 0, 0, 0, 0, 0, 0});
            ptx::mbarrier_arrive(shared.tile_full(slot.stage));
        }
        return false;
    }

private:
    // The class whose tiles see so many blocks at most; -1 for none.
    static __device__ __forceinline__ int class_of(int blocks) {
        int index = -1;
        if (blocks > 0) ++index;
        while (index >= 0 && class_bound(index) < blocks) ++index;
        return index;
    }

    static __device__ __forceinline__ bool is_short(const Parameters& p, const Sequence& sequence) {
        return SECTIONS && sequence.keys <= SHORT_KEYS && sequence.tiles(p) > 1;
    }

    __device__ __forceinline__ int groups(const Parameters& p) const { return p.batch / 32 + 1; }

    // To the next class.
    __device__ __forceinline__ void advance(const Parameters& p) {
        if (section >= 0 || ++group == groups(p)) {
            --index;
            if (section < 0) group = 0;
        }
        if (section < 0 && groups(p) > 1) {
            sequence = Sequence(p, 32 * group + threadIdx.x % 32);
            own = is_short(p, sequence) ? 0 : -1;
        }
        if (index < 0) next_section(p);
    }

    // To the first class of the next section that has sequences.
    __device__ __forceinline__ void next_section(const Parameters& p) {
        if (!SECTIONS) return;
        if (section < 0) group = -1, section = 0;
        const int lane = threadIdx.x % 32;
        while (index < 0) {
            if (++section > last) {
                if (++group >= groups(p)) return;
                section = 0;
                sequence = Sequence(p, 32 * group + lane);
                const bool has = is_short(p, sequence);
                const int kib = has ? (sequence.keys + BLOCK_N - 1) / BLOCK_N * BLOCK_KIB * (p.slices / p.group) : 0;
                const uint32 from = static_cast<uint32>(sum_to_lane(kib, lane) - kib);
                own = has ? static_cast<int>(from / SECTION_KIB) : -1;
                last = most_of_lanes(own);
            }
            index = class_of(most_of_lanes(own == section ? sequence.most_blocks(p) : 0));
        }
    }
};

// Every block draws a ticket for each tile that it gets, so `tiles` are drawn in all; whoever has the last one sets the counter
// back for the next launch.
__device__ __forceinline__ void give_back(const Parameters& p, int ticket, int tiles) {
    if (ticket == tiles - 1) atomicExch(p.ticket, 0);
}

}  // namespace hopper

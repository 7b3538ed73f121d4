// Blocks of keys row by row, for pages that no box of TMA fits: all lanes of a warp copy them by cp.async, 16 bytes each.
//
// These copies belong to the generic proxy and wgmma reads by the other one, so consumers fence after they have waited for a block.
#pragma once

#include "hopper_varlen/pages.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"

namespace hopper {

// Rows [FIRST, FIRST + COUNT) of each block.
template <int FIRST, int COUNT>
struct Rows : Pages<FIRST, COUNT> {
    using Base = Pages<FIRST, COUNT>;
    const char* start[Base::OF_LANE];  // of the lane's rows of the block; null: zeros

    // Finds a block's rows of keys or of values, whose pages were looked up.
    __device__ __forceinline__ void find(const Parameters& p, const RowMap& map, int block, int lane) {
        const char* const of_head = map.start + this->head * map.head;
#pragma unroll
        for (int i = 0; i < Base::OF_LANE; ++i) {
            const int page = this->page[i], slot = Base::slot_of(p, block * BLOCK_N + FIRST + 32 * i + lane);
            start[i] = page == OUTSIDE ? nullptr : of_head + page * map.page + slot * map.token;
        }
    }

    // And looks the next block up, whose pages so come while this one is copied.
    __device__ __forceinline__ void find(const Parameters& p, const RowMap& map, const Tile& tile, int block, int begin, int lane) {
        find(p, map, block, lane);
        this->look_up(p, tile, block - 1, begin, lane);
    }

    __device__ __forceinline__ void find_next(const Parameters&, const Tile&, int, int, int) {}

    // By a whole warp: begins to copy what was found. `barrier` is told once all is there. Columns behind a row's last become zeros.
    template <int PANELS>
    __device__ __forceinline__ void load(const Parameters&, const RowMap& map, const Tile&, int, uint32 destination, uint32 barrier,
                                         int lane) const {
        constexpr int PANEL_CHUNKS = panel::ROW_BYTES / kChunkBytes;  // a panel's row is copied by so many neighbouring lanes
        constexpr int ROWS_AT_ONCE = 32 / PANEL_CHUNKS;
        constexpr int STEPS = PANELS == 1 ? 8 : PANELS == 2 ? 4 : 2;  // whose addresses are under way together, as registers allow
        const int chunk = lane % PANEL_CHUNKS, row = lane / PANEL_CHUNKS;
        const uint32 even = panel::chunk_address<BLOCK_N>(destination, FIRST + row, chunk);  // a permutation has eight rows
        const uint32 odd = panel::chunk_address<BLOCK_N>(destination, FIRST + row + ROWS_AT_ONCE, chunk);
#pragma unroll
        for (int i = 0; i < Base::OF_LANE; ++i) {
            static_assert(FIRST % 8 == 0 && COUNT % (STEPS * ROWS_AT_ONCE) == 0, "whole steps of whole permutations");
#pragma unroll 1
            for (int first = 0; first < min(32, COUNT - 32 * i); first += STEPS * ROWS_AT_ONCE) {
                const char* from[STEPS];
#pragma unroll
                for (int k = 0; k < STEPS; ++k) {
                    from[k] = reinterpret_cast<const char*>(
                        __shfl_sync(ALL_LANES, reinterpret_cast<uint64>(start[i]), first + k * ROWS_AT_ONCE + row));
                }
#pragma unroll
                for (int k = 0; k < STEPS; ++k) {
                    const bool there = from[k] != nullptr;
                    const char* const source = from[k] + chunk * kChunkBytes;
                    const uint32 to = (k % 2 ? odd : even) + (32 * i + first + k / 2 * 2 * ROWS_AT_ONCE) * panel::ROW_BYTES;
#pragma unroll
                    for (int panel = 0; panel < PANELS; ++panel) {
                        copy_chunk(to + panel * BLOCK_PANEL_BYTES, source + panel * panel::ROW_BYTES,
                                   there && panel * PANEL_CHUNKS + chunk < map.chunks);
                    }
                }
            }
        }
        ptx::mbarrier_arrive_after_copies(barrier);
    }
};

}  // namespace hopper

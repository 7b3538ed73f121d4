// Blocks of keys by TMA: a box for each panel where they are packed, and for each page and panel else.
#pragma once

#include "hopper_varlen/pages.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"

namespace hopper {

#if TREE
constexpr bool ONE_LANE_ISSUES = false;  // what else the producers keep leaves no registers for that
#else
constexpr bool ONE_LANE_ISSUES = true;
#endif
// So many boxes of pages are told to the lane that issues at a time: few, as registers are.
constexpr int MOST_AT_ONCE = CONSUMERS == 3 ? 2 : 4;
constexpr int BOXES_AT_ONCE = BOXES < MOST_AT_ONCE ? BOXES : MOST_AT_ONCE;

// One lane issues the boxes of all: where several do, the compiler makes a loop over them, of which each round costs some 40 cycles.
struct Boxes : Pages<0, BOXES> {
    int next_page[BOXES_AT_ONCE];
    int next_slot[BOXES_AT_ONCE];  // of the box's first row in its page

    // By a whole warp: tells every lane of the block's boxes from `first` on.
    __device__ __forceinline__ void tell(const Parameters& p, int block, int first, int lane) {
        if (!PAGED || !ONE_LANE_ISSUES) return;
        const int slot = slot_of(p, block * BLOCK_N + lane * PAGE_ROWS);
#pragma unroll
        for (int i = 0; i < BOXES_AT_ONCE && first + i < BOXES; ++i) {
            next_page[i] = __shfl_sync(ALL_LANES, page[0], first + i);
            next_slot[i] = __shfl_sync(ALL_LANES, slot, first + i);
        }
    }

    __device__ __forceinline__ void find(const Parameters& p, const ptx::TensorMap&, const Tile&, int block, int, int lane) {
        tell(p, block, 0, lane);
    }

    __device__ __forceinline__ void find_next(const Parameters& p, const Tile& tile, int block, int begin, int lane) {
        look_up(p, tile, block - 1, begin, lane);
    }

    // By a whole warp, which has been told of the first boxes: issues the loads of a block, which complete `barrier`.
    template <int PANELS>
    __device__ __forceinline__ void load(const Parameters& p, const ptx::TensorMap& map, const Tile& tile, int block,
                                         uint32 destination, uint32 barrier, int lane) {
        if (!PAGED) {
            const int row = tile.keys > 0 ? tile.place + block * BLOCK_N : OUTSIDE;
            if (ptx::elect_lane()) {
                ptx::mbarrier_expect_bytes(barrier, PANELS * BLOCK_PANEL_BYTES);
#pragma unroll
                for (int panel = 0; panel < PANELS; ++panel) {
                    ptx::tma_load(map, destination + panel * BLOCK_PANEL_BYTES, barrier, ptx::EVICT_LAST,
                                  panel * panel::PANEL_COLUMNS, row, head, 0);
                }
            }
            return;
        }
        if (!ONE_LANE_ISSUES) {
            if (lane == 0) ptx::mbarrier_expect_bytes(barrier, PANELS * BLOCK_PANEL_BYTES);
            __syncwarp();
#pragma unroll  // written so, fewer registers than with one condition
            for (int i = 0; i < OF_LANE; ++i) {
                const int box = lane + 32 * i;
                const int key = block * BLOCK_N + box * PAGE_ROWS;
                if (box >= BOXES) break;
#pragma unroll
                for (int panel = 0; panel < PANELS; ++panel) {
                    ptx::tma_load(map, destination + panel * BLOCK_PANEL_BYTES + box * PAGE_ROWS * panel::ROW_BYTES, barrier,
                                  ptx::EVICT_LAST, panel * panel::PANEL_COLUMNS, slot_of(p, key), head, page[i]);
                }
            }
            return;
        }
#pragma unroll 1  // fewer registers
        for (int first = 0; first < BOXES; first += BOXES_AT_ONCE) {
            if (first > 0) tell(p, block, first, lane);
            if (ptx::elect_lane()) {
                if (first == 0) ptx::mbarrier_expect_bytes(barrier, PANELS * BLOCK_PANEL_BYTES);
#pragma unroll
                for (int i = 0; i < BOXES_AT_ONCE && first + i < BOXES; ++i) {
#pragma unroll
                    for (int panel = 0; panel < PANELS; ++panel) {
                        ptx::tma_load(map, destination + panel * BLOCK_PANEL_BYTES + (first + i) * PAGE_ROWS * panel::ROW_BYTES,
                                      barrier, ptx::EVICT_LAST, panel * panel::PANEL_COLUMNS, next_slot[i], head, next_page[i]);
                    }
                }
            }
        }
    }
};

}  // namespace hopper

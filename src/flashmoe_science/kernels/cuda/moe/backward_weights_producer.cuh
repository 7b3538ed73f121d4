// The producer warpgroup of the weights' gradients: its first warp draws tiles and loads sorted rows by TMA; all four warps
// gather the tokens' rows with cp.async into the layout that TMA's 128-byte swizzle would give.
#pragma once

#include "moe/hopper_epilogue.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/dependent_launch.cuh"
#include "ptx/warpgroup.cuh"

namespace moe {

constexpr int SORTED_PANELS = TOKENS / PANEL_COLUMNS;
static_assert(TOKENS % PANEL_COLUMNS == 0, "a tile is whole panels of the sorted rows");

struct WeightsParameters {
    ptx::TensorMap rows;   // the sorted rows, in boxes of 64 columns and 64 rows
    const char* tokens;    // the rows that slots stand for, `top_k` slots each
    void* output;          // SECOND: (experts, gathered, sorted), else (experts, sorted, gathered)
    const int* expert_offsets;
    const int* sorted_slots;
    int* ticket;  // zero at the start
    int experts;
    int gathered;  // columns of the tokens' rows
    int sorted;    // columns of the sorted rows
    int gathered_tiles;
    int sorted_tiles;
    int top_k;
    int part_size;  // sorted columns of the gate, or all if there is none
    int row_step;   // rows of w13 from a column of a part to the next one
    int part_step;  // rows of w13 from the first gate row to the first up row
};

__device__ __forceinline__ void prefetch_maps(const WeightsParameters& p) { ptx::prefetch_map(p.rows); }

struct WeightsTile {
    int expert;  // negative: there are no more tiles
    int gathered;
    int sorted;
    int first;
    int count;
};

// Tiles of an expert one after another, so that its rows stay in L2.
__device__ __forceinline__ WeightsTile located(const WeightsParameters& p, const Tile& published) {
    // Of Tile's fields, `weight_tile` is the number among the expert's.
    WeightsTile tile;
    tile.expert = __shfl_sync(0xffffffff, published.expert, 0);
    tile.gathered = published.weight_tile % p.gathered_tiles;
    tile.sorted = published.weight_tile / p.gathered_tiles;
    tile.first = published.first;
    tile.count = __shfl_sync(0xffffffff, published.count, 0);
    return tile;
}

struct WeightsDrawer {
    Ring<TILE_SLOTS> ring;
    Tickets tickets;

    // By the whole first warp.
    __device__ __forceinline__ Tile next(const WeightsParameters& p, const Shared& shared) {
        const int drawn = tickets.next(p.ticket, shared, 0);
        const int tiles = p.gathered_tiles * p.sorted_tiles;
        Tile tile{drawn / tiles, 0, 0, 0};
        if (tile.expert < p.experts) {
            tile.weight_tile = drawn - tile.expert * tiles;
            tile.first = __ldg(p.expert_offsets + tile.expert);
            tile.count = __ldg(p.expert_offsets + tile.expert + 1) - tile.first;
        } else {
            tile.expert = -1;
        }
        publish(shared, ring, tile);
        return tile;
    }
};

constexpr int ROWS_AT_ONCE = WARPGROUP / 8;  // eight threads copy 128 bytes of a row
constexpr int PASSES = INNER / ROWS_AT_ONCE;

// The slots of a stage's rows that this thread copies; -1: no such row. They become tokens once the next ones are on their way.
__device__ __forceinline__ void load_slots(const WeightsParameters& p, const WeightsTile& tile, int k, int (&slot)[PASSES]) {
#pragma unroll
    for (int i = 0; i < PASSES; ++i) {
        const int index = k + static_cast<int>(threadIdx.x) / 8 + i * ROWS_AT_ONCE;
        slot[i] = -1;
        if (index < tile.count) slot[i] = __ldg(p.sorted_slots + tile.first + index);
    }
}

__device__ __forceinline__ void produce(const WeightsParameters& p, const Shared& shared, int warp) {
    WeightsDrawer drawer;
    Ring<TILE_SLOTS> tiles;
    Ring<STAGES> ring;
    const int row = threadIdx.x / 8;
    const int chunk = threadIdx.x % 8;
    const uint32 place = row * ROW_BYTES + ((chunk ^ row % 8) << 4);
    const int64 row_bytes = 2 * p.gathered;
    while (true) {
        const WeightsTile tile = located(p, warp == 0 ? drawer.next(p, shared) : next_tile(shared, tiles));
        if (tile.expert < 0) return;
        const int inside = p.gathered - tile.gathered * WEIGHT_ROWS - chunk * 8;  // columns from this thread's first on
        const char* first = p.tokens + (tile.gathered * WEIGHT_ROWS + chunk * 8) * 2;
        int slot[PASSES];
        load_slots(p, tile, 0, slot);
        for (int k = 0; k < tile.count; k += INNER) {
            int later[PASSES];  // on their way while this stage is filled
            load_slots(p, tile, k + INNER, later);
            ptx::mbarrier_wait(shared.empty(ring.stage), ring.parity ^ 1);
            if (threadIdx.x == 0) {
                ptx::mbarrier_expect_bytes(shared.full(ring.stage), SORTED_PANELS * PANEL_BYTES);
                for (int panel = 0; panel < SORTED_PANELS; ++panel) {
                    ptx::tma_load(p.rows, shared.tokens(ring.stage) + panel * PANEL_BYTES, shared.full(ring.stage),
                                  tile.sorted * TOKENS + panel * PANEL_COLUMNS, tile.first + k);
                }
            }
            __syncwarp();
            const uint32 to = shared.weights(ring.stage) + place;
#pragma unroll
            for (int i = 0; i < PASSES; ++i) {
                const char* from = first + static_cast<int64>(slot[i] / p.top_k) * row_bytes;
                const int columns = slot[i] < 0 ? 0 : inside;
#pragma unroll
                for (int panel = 0; panel < PANELS; ++panel) {
                    copy_chunk(to + i * ROWS_AT_ONCE * ROW_BYTES + panel * PANEL_BYTES, from + panel * ROW_BYTES,
                               panel * PANEL_COLUMNS < columns);
                }
            }
            ptx::mbarrier_arrive_after_copies(shared.full(ring.stage));
            ring.advance();
#pragma unroll
            for (int i = 0; i < PASSES; ++i) slot[i] = later[i];
        }
    }
}

}  // namespace moe

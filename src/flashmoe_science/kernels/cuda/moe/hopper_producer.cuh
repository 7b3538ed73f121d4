// The producer warpgroup: its first warp draws tiles and loads weights by TMA; rows come by TMA too where they are sorted,
// else all four warps gather them with cp.async into the layout that TMA's 128-byte swizzle would give.
#pragma once

#include "moe/hopper_scheduler.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/dependent_launch.cuh"
#include "ptx/warpgroup.cuh"

namespace moe {

// The inner dimension of the backward pass's second product has two parts where there is a gate, each padded to stages.
constexpr int PARTS = BACKWARD && !GATHER && kGated ? 2 : 1;

__device__ __forceinline__ int part_inner(const Parameters& p) { return (p.inner + INNER - 1) / INNER * INNER; }
__device__ __forceinline__ int part_of(const Parameters& p, int k) { return PARTS == 2 && k >= part_inner(p) ? 1 : 0; }
__device__ __forceinline__ int inner_end(const Parameters& p) { return PARTS == 2 ? 2 * part_inner(p) : p.inner; }

__device__ __forceinline__ void prefetch_maps(const Parameters& p) {
    ptx::prefetch_map(p.weights);
    if (BACKWARD || !GATHER) ptx::prefetch_map(p.rows);
}

// Draws the block's next tile, by a ticket drawn one ahead, and publishes it. Called by the whole first warp.
struct Drawer {
    Cursor cursor;
    Ring<TILE_SLOTS> ring;
    Tickets tickets;
    int rank = rank_in_cluster();

    __device__ __forceinline__ Tile next(const Parameters& p, const Shared& shared) {
        const Tile tile = cursor.find(p, tickets.next(p.ticket, shared, rank), rank);
        publish(shared, ring, tile);
        return tile;
    }
};

__device__ __forceinline__ int padded(int count) { return max(LEAST, (count + STEP - 1) / STEP * STEP); }

// This block's share of the weights, for all blocks of the cluster.
__device__ __forceinline__ void load_weights(const Parameters& p, const Shared& shared, int stage, const Tile& tile, int k,
                                             int rank) {
    constexpr int ROWS = WEIGHT_ROWS / CLUSTER;
    const uint32 to = shared.weights(stage) + rank * (WEIGHT_BYTES / CLUSTER);
    const int share = tile.weight_tile * CLUSTER + rank;
    if constexpr (BACKWARD) {
        const int part = part_of(p, k);
        for (int panel = 0; panel < PANELS / CLUSTER; ++panel) {
            load_for_cluster(p.weights, to + panel * PANEL_BYTES, shared.full(stage), share * ROWS + panel * PANEL_COLUMNS,
                             k - part * part_inner(p), part, tile.expert);
        }
    } else if constexpr (kPaired) {
        load_for_cluster(p.weights, to, shared.full(stage), k, 0, 0, share * (ROWS / 32), tile.expert);
    } else {
        load_for_cluster(p.weights, to, shared.full(stage), k, share * ROWS, tile.expert);
    }
}

#if GATHER

constexpr int ROWS_AT_ONCE = WARPGROUP / 8;  // eight threads copy the 128 bytes of a row
constexpr int PASSES = TOKENS / ROWS_AT_ONCE;

#if BACKWARD
// What was kept of a panel's columns, gate and up: stages of their own, for the consumer that has the panel.
__device__ __forceinline__ void load_kept(const Parameters& p, const Shared& shared, int stage, const Tile& tile, int panel) {
    const int rows = padded(tile.count);
    const int column = tile.weight_tile * WEIGHT_ROWS + panel * PANEL_COLUMNS;
    ptx::mbarrier_expect_bytes(shared.full(stage), (kGated ? 2 : 1) * rows * ROW_BYTES);
    for (int row = 0; row < rows; row += STEP) {
        ptx::tma_load(p.rows, shared.weights(stage) + row * ROW_BYTES, shared.full(stage), column, tile.first + row);
        if (kGated) {
            ptx::tma_load(p.rows, shared.tokens(stage) + row * ROW_BYTES, shared.full(stage), p.columns + column,
                          tile.first + row);
        }
    }
    ptx::mbarrier_arrive(shared.full(stage));
}
#endif

__device__ __forceinline__ void produce(const Parameters& p, const Shared& shared, int warp) {
    Drawer drawer;
    Ring<TILE_SLOTS> tiles;
    Ring<STAGES> ring;
    const int row = threadIdx.x / 8;
    const int chunk = threadIdx.x % 8;
    const uint32 place = row * ROW_BYTES + ((chunk ^ row % 8) << 4);
    const int row_chunks = p.inner / 8;
    while (true) {
        const Tile tile = warp == 0 ? drawer.next(p, shared) : next_tile(shared, tiles);
        if (tile.count == NO_TILE) return;
        int token[PASSES];  // -1: no such row
#pragma unroll
        for (int i = 0; i < PASSES; ++i) {
            const int index = row + i * ROWS_AT_ONCE;
            token[i] = -1;
            if (index < tile.count) token[i] = __ldg(p.sorted_slots + tile.first + index) / p.top_k;
        }
        const int passes = padded(tile.count) / ROWS_AT_ONCE;
        for (int k = 0; k < inner_end(p); k += INNER) {
            ptx::mbarrier_wait(shared.empty(ring.stage), ring.parity ^ 1);
            if (threadIdx.x == 0) {
                ptx::mbarrier_expect_bytes(shared.full(ring.stage), WEIGHT_BYTES);
                load_weights(p, shared, ring.stage, tile, k, drawer.rank);
            }
            __syncwarp();
            const uint32 to = shared.tokens(ring.stage) + place;
            const int column = k / 8 + chunk;
            const bool inside = column < row_chunks;
            const char* from = p.tokens + column * 16;
            const int64 row_bytes = 2 * p.inner;
#pragma unroll
            for (int i = 0; i < PASSES; ++i) {
                if (i < passes) {
                    const bool valid = inside && token[i] >= 0;
                    copy_chunk(to + i * ROWS_AT_ONCE * ROW_BYTES, valid ? from + token[i] * row_bytes : p.tokens, valid);
                }
            }
            ptx::mbarrier_arrive_after_copies(shared.full(ring.stage));
            ring.advance();
        }
#if BACKWARD
        for (int turn = 0; turn < PANELS; ++turn) {
            ptx::mbarrier_wait(shared.empty(ring.stage), ring.parity ^ 1);
            if (threadIdx.x == 0) load_kept(p, shared, ring.stage, tile, panel_of_turn(turn));
            __syncwarp();
            if (threadIdx.x != 0) ptx::mbarrier_arrive(shared.full(ring.stage));
            ring.advance();
        }
#endif
    }
}

#else

__device__ __forceinline__ void load_rows(const Parameters& p, const Shared& shared, int stage, const Tile& tile, int k) {
    const int part = part_of(p, k);
    const int column = k - part * (part_inner(p) - p.inner);
    for (int row = 0; row < padded(tile.count); row += STEP) {
        ptx::tma_load(p.rows, shared.tokens(stage) + row * ROW_BYTES, shared.full(stage), column, tile.first + row);
    }
}

// Routing has ended long ago, so tiles can be drawn and weights loaded while the first product, whose rows are awaited,
// still runs on other multiprocessors: the first tile's stages get their weights first.
__device__ __forceinline__ void produce(const Parameters& p, const Shared& shared, int warp) {
    if (warp != 0) return;
    Drawer drawer;
    Ring<STAGES> ring;
    Tile tile = drawer.next(p, shared);
    const uint32 bytes = WEIGHT_BYTES + padded(tile.count) * ROW_BYTES;
    const int ahead = tile.count == NO_TILE ? 0 : min(inner_end(p), STAGES * INNER);
    if (threadIdx.x == 0) {
        for (int k = 0; k < ahead; k += INNER) {
            ptx::mbarrier_expect_bytes(shared.full(k / INNER), bytes);
            load_weights(p, shared, k / INNER, tile, k, drawer.rank);
        }
    }
    __syncwarp();
    wait_for_predecessor();
    if (threadIdx.x == 0) {
        for (int k = 0; k < ahead; k += INNER) load_rows(p, shared, k / INNER, tile, k);
    }
    __syncwarp();
    for (int k = 0; k < ahead; k += INNER) ring.advance();
    for (int first = ahead; tile.count != NO_TILE; first = 0) {
        for (int k = first; k < inner_end(p); k += INNER) {
            ptx::mbarrier_wait(shared.empty(ring.stage), ring.parity ^ 1);
            if (threadIdx.x == 0) {
                ptx::mbarrier_expect_bytes(shared.full(ring.stage), WEIGHT_BYTES + padded(tile.count) * ROW_BYTES);
                load_weights(p, shared, ring.stage, tile, k, drawer.rank);
                load_rows(p, shared, ring.stage, tile, k);
            }
            __syncwarp();
            ring.advance();
        }
        tile = drawer.next(p, shared);
    }
}

#endif

}  // namespace moe

// The producer warpgroup: its first warp draws tiles and loads weights by TMA; rows come by TMA too where they are sorted,
// else all four warps gather them with cp.async into the layout that TMA's 128-byte swizzle would give.
#pragma once

#include "moe/hopper_scheduler.cuh"
#include "ptx/dependent_launch.cuh"
#include "ptx/warpgroup.cuh"

namespace moe {

// Draws the next tile and publishes it. Called by the whole first warp. The first block of a cluster draws tickets, one
// ahead, and tells the second.
struct Drawer {
    Cursor cursor;
    Ring<TILE_SLOTS> ring;
    Ring<TICKET_SLOTS> told;
    int rank = CLUSTER == 1 ? 0 : ptx::cluster_rank();
    int ticket = blockIdx.x / CLUSTER;

    __device__ __forceinline__ int draw(const Parameters& p, const Shared& shared) {
        int drawn;
        if (rank == 0) {
            drawn = __shfl_sync(0xffffffff, ticket, 0);
            if constexpr (CLUSTER == 2) {
                ptx::mbarrier_wait(shared.ticket_empty(told.stage), told.parity ^ 1);
                if (threadIdx.x == 0) {
                    ptx::post(ptx::in_block(shared.ticket(told.stage), 1), ptx::in_block(shared.ticket_full(told.stage), 1),
                              drawn);
                }
            }
            if (threadIdx.x == 0) ticket = atomicAdd(p.ticket, 1) + static_cast<int>(gridDim.x / CLUSTER);
        } else {
            if (threadIdx.x == 0) ptx::mbarrier_expect_bytes(shared.ticket_full(told.stage), sizeof(int));
            __syncwarp();
            ptx::mbarrier_wait(shared.ticket_full(told.stage), told.parity);
            asm volatile("ld.shared.s32 %0, [%1];" : "=r"(drawn) : "r"(shared.ticket(told.stage)) : "memory");
            __syncwarp();
            if (threadIdx.x == 0) ptx::mbarrier_arrive_at(ptx::in_block(shared.ticket_empty(told.stage), 0));
        }
        told.advance();
        return drawn;
    }

    __device__ __forceinline__ Tile next(const Parameters& p, const Shared& shared) {
        const Tile tile = cursor.find(p, draw(p, shared), rank);
        ptx::mbarrier_wait(shared.tile_empty(ring.stage), ring.parity ^ 1);
        if (threadIdx.x == 0) publish(shared, ring, tile);
        ring.advance();
        return tile;
    }
};

__device__ __forceinline__ int padded(int width) { return max(LEAST, (width + STEP - 1) / STEP * STEP); }

// The next tile is drawn, and its slots are fetched, while stages of this one are full, not when they have run dry.
__device__ __forceinline__ int step_to_look_ahead(const Parameters& p) {
    return min(STAGES, (p.inner + INNER - 1) / INNER) * INNER - INNER;
}

// This block's share of the weights, for all blocks of the cluster.
__device__ __forceinline__ void load_weights(const Parameters& p, const Shared& shared, int stage, const Tile& tile, int k,
                                             int rank) {
    constexpr int rows = WEIGHT_ROWS / CLUSTER;
    const uint32 to = shared.weights(stage) + rank * (WEIGHT_BYTES / CLUSTER);
    const int part = tile.weight_tile * CLUSTER + rank;
    if constexpr (kGated) {
        ptx::tma_load<CLUSTER>(p.weights, to, shared.full(stage), k, 0, 0, part * (rows / 32), tile.expert);
    } else {
        ptx::tma_load<CLUSTER>(p.weights, to, shared.full(stage), k, part * rows, tile.expert);
    }
}

#if GATHER

constexpr int ROWS_AT_ONCE = WARPGROUP / 8;  // eight threads copy the 128 bytes of a row
constexpr int PASSES = TOKENS / ROWS_AT_ONCE;
constexpr int SHARES = (PASSES + 7) / 8;  // the eight threads of a row share its numbers out: of pass i, thread i % 8 has it

__device__ __forceinline__ void copy_or_zero(uint32 shared, const char* global, bool valid) {
    asm volatile(
        "{\n.reg .pred ignore;\n"
        "setp.eq.u32 ignore, %2, 0;\n"
        "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, ignore;\n}" ::"r"(shared),
        "l"(global), "r"(static_cast<uint32>(valid))
        : "memory");
}

__device__ __forceinline__ void produce(const Parameters& p, const Shared& shared, int warp) {
    Drawer drawer;
    Ring<TILE_SLOTS> tiles;
    Ring<STAGES> ring;
    const int row = threadIdx.x / 8;
    const int chunk = threadIdx.x % 8;
    const uint32 place = row * ROW_BYTES + ((chunk ^ row % 8) << 4);
    const int row_chunks = p.inner / 8;
    const int64 row_bytes = 2 * p.inner;
    Tile tile;
    int slot[SHARES];  // -1: no such row
    const auto take_tile = [&] {
        tile = warp == 0 ? drawer.next(p, shared) : next_tile(shared, tiles);
#pragma unroll
        for (int i = 0; i < SHARES; ++i) {
            const int index = row + (8 * i + chunk) * ROWS_AT_ONCE;
            slot[i] = -1;
            if (index < tile.count) slot[i] = __ldg(p.sorted_slots + tile.first + index);
        }
    };
    take_tile();
    while (tile.width != 0) {
        const Tile current = tile;
        int token[SHARES];
#pragma unroll
        for (int i = 0; i < SHARES; ++i) token[i] = slot[i] < 0 ? -1 : slot[i] / p.top_k;
        const int passes = padded(current.width) / ROWS_AT_ONCE;
        const int look_ahead = step_to_look_ahead(p);
        for (int k = 0; k < p.inner; k += INNER) {
            ptx::mbarrier_wait(shared.empty(ring.stage), ring.parity ^ 1);
            if (threadIdx.x == 0) {
                ptx::mbarrier_expect_bytes(shared.full(ring.stage), WEIGHT_BYTES);
                load_weights(p, shared, ring.stage, current, k, drawer.rank);
            }
            __syncwarp();
            const uint32 to = shared.tokens(ring.stage) + place;
            const int column = k / 8 + chunk;
            const bool inside = column < row_chunks;
            const char* from = p.tokens + column * 16;
#pragma unroll
            for (int i = 0; i < PASSES; ++i) {
                if (i < passes) {
                    const int t = __shfl_sync(0xffffffff, token[i / 8], i % 8, 8);
                    const bool valid = inside && t >= 0;
                    copy_or_zero(to + i * ROWS_AT_ONCE * ROW_BYTES, valid ? from + t * row_bytes : p.tokens, valid);
                }
            }
            ptx::mbarrier_arrive_after_copies(shared.full(ring.stage));
            ring.advance();
            if (k == look_ahead) take_tile();
        }
    }
}

#else

__device__ __forceinline__ void load_rows(const Parameters& p, const Shared& shared, int stage, const Tile& tile, int k) {
    for (int row = 0; row < padded(tile.width); row += STEP) {
        ptx::tma_load(p.rows, shared.tokens(stage) + row * ROW_BYTES, shared.full(stage), k, tile.first + row);
    }
}

// Routing has ended long ago, so tiles can be drawn and weights loaded while the first product, whose rows are awaited,
// still runs on other multiprocessors: the first tile's stages get their weights first.
__device__ __forceinline__ void produce(const Parameters& p, const Shared& shared, int warp) {
    if (warp != 0) return;
    Drawer drawer;
    Ring<STAGES> ring;
    Tile tile = drawer.next(p, shared);
    const uint32 bytes = WEIGHT_BYTES + padded(tile.width) * ROW_BYTES;
    const int ahead = tile.width == 0 ? 0 : min(p.inner, STAGES * INNER);
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
    const int look_ahead = step_to_look_ahead(p);
    for (int first = ahead; tile.width != 0; first = 0) {
        Tile next;
        if (first > look_ahead) next = drawer.next(p, shared);
        for (int k = first; k < p.inner; k += INNER) {
            ptx::mbarrier_wait(shared.empty(ring.stage), ring.parity ^ 1);
            if (threadIdx.x == 0) {
                ptx::mbarrier_expect_bytes(shared.full(ring.stage), WEIGHT_BYTES + padded(tile.width) * ROW_BYTES);
                load_weights(p, shared, ring.stage, tile, k, drawer.rank);
                load_rows(p, shared, ring.stage, tile, k);
            }
            __syncwarp();
            ring.advance();
            if (k == look_ahead) next = drawer.next(p, shared);
        }
        tile = next;
    }
}

#endif

}  // namespace moe

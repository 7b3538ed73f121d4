// The producer warpgroup: a warp each hands out tiles and loads keys, loads values, loads queries.
#pragma once

#include "ablation.cuh"
#include "hopper/shared.cuh"
#include "ptx/tma.cuh"

namespace hopper {

// `again`: the buffer holds an earlier block already.
__device__ __forceinline__ void load_block(const ptx::TensorMap& map, uint32 destination, uint32 full, int row, int head,
                                           int batch, bool again) {
    if (NO_LOADS && again) {
        ptx::mbarrier_arrive(full);
        return;
    }
    ptx::mbarrier_expect_bytes(full, KEY_BYTES);
#pragma unroll
    for (int panel = 0; panel < KEY_PANELS; ++panel) {
        ptx::tma_load(map, destination + panel * BLOCK_PANEL_BYTES, full, ptx::EVICT_LAST, panel * panel::PANEL_COLUMNS,
                      row, head, batch);
    }
}

// The next tile of a producer that only reads them; false at the end. Called by a whole warp.
__device__ __forceinline__ bool next_tile(const Shared& shared, Ring<TILE_SLOTS>& slot, Tile& tile) {
    ptx::mbarrier_wait(shared.tile_full(slot.stage), slot.parity);
    tile = read_tile(shared, slot.stage);
    release(shared.tile_empty(slot.stage));
    slot.advance();
    return tile.m_block >= 0;
}

// One lane: hands out tiles and keeps the key ring full.
__device__ __forceinline__ void produce_keys(const Parameters& p, const Shared& shared) {
    Ring<K_STAGES> key;
    Ring<TILE_SLOTS> slot;
    int loaded = 0;
    int index = first_tile();
    while (true) {
        const Tile tile = tile_at(p, index);
        publish_tile(shared, slot, tile);
        if (tile.m_block < 0) break;
        // Drawn now and looked at after the loads, so that they do not wait for it.
        const int ticket = atomicAdd(p.ticket, 1);
        const int head = tile.head / p.group;
#pragma unroll 1
        for (int block = tile.n_blocks - 1; block >= 0; --block) {
            ptx::mbarrier_wait(shared.key_empty(key.stage), key.parity ^ 1);
            load_block(p.key, shared.key(key.stage), shared.key_full(key.stage), block * BLOCK_N, head, tile.batch,
                       loaded++ >= K_STAGES);
            key.advance();
        }
        index = redeem(p, ticket);
    }
}

// One warp, of which one lane issues: keeps the value ring full.
__device__ __forceinline__ void produce_values(const Parameters& p, const Shared& shared) {
    Ring<V_STAGES> value;
    Ring<TILE_SLOTS> slot;
    int loaded = 0;
    Tile tile;
    while (next_tile(shared, slot, tile)) {
        if (threadIdx.x % 32 == 0) {
            const int head = tile.head / p.group;
#pragma unroll 1
            for (int block = tile.n_blocks - 1; block >= 0; --block) {
                ptx::mbarrier_wait(shared.value_empty(value.stage), value.parity ^ 1);
                load_block(p.value, shared.value(value.stage), shared.value_full(value.stage), block * BLOCK_N, head,
                           tile.batch, loaded++ >= V_STAGES);
                value.advance();
            }
        }
        __syncwarp();
    }
}

// One warp, of which one lane issues: the query rows of each consumer as soon as its buffer is free.
__device__ __forceinline__ void produce_queries(const Parameters& p, const Shared& shared) {
    Ring<Q_STAGES> ring;
    Ring<TILE_SLOTS> slot;
    Tile tile;
    while (next_tile(shared, slot, tile)) {
        if (threadIdx.x % 32 == 0) {
#pragma unroll
            for (int consumer = 0; consumer < CONSUMERS; ++consumer) {
                ptx::mbarrier_wait(shared.query_empty(ring.stage, consumer), ring.parity ^ 1);
                const uint32 full = shared.query_full(ring.stage, consumer);
                ptx::mbarrier_expect_bytes(full, QUERY_BYTES);
#pragma unroll
                for (int panel = 0; panel < KEY_PANELS; ++panel) {
                    ptx::tma_load(p.query, shared.query(ring.stage, consumer) + panel * QUERY_PANEL_BYTES, full,
                                  ptx::EVICT_FIRST, panel * panel::PANEL_COLUMNS,
                                  tile.m_block * BLOCK_M + consumer * ROWS, tile.head, tile.batch);
                }
            }
        }
        __syncwarp();
        ring.advance();
    }
}

}  // namespace hopper

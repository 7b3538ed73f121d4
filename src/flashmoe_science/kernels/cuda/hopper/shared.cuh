// Shared memory of the Hopper kernel: rings of tiles with their barriers, and the slots in which tiles of work are
// published.
#pragma once

#include "hopper/parameters.cuh"
#include "hopper/ring.cuh"
#include "hopper/scheduler.cuh"
#include "mma/descriptor.cuh"

namespace hopper {

constexpr uint32 QUERY_PANEL_BYTES = ROWS * panel::ROW_BYTES;
constexpr uint32 QUERY_BYTES = PANELS * QUERY_PANEL_BYTES;  // of one consumer
constexpr uint32 KEY_PANEL_BYTES = BLOCK_N * panel::ROW_BYTES;
constexpr uint32 KEY_BYTES = PANELS * KEY_PANEL_BYTES;
constexpr int TILE_SLOTS = 2;
constexpr int CONSUMER_WARPS = 4 * CONSUMERS;

// Where everything lies in shared memory. Addresses are 32 bits: generic pointers would cost the producers, which keep
// few registers, twice as many.
struct Shared {
    uint32 base;  // a multiple of 1024, so that the swizzle depends on the row alone

    static constexpr uint32 KEYS = Q_STAGES * CONSUMERS * QUERY_BYTES;
    static constexpr uint32 VALUES = KEYS + K_STAGES * KEY_BYTES;
    static constexpr uint32 TILES = VALUES + V_STAGES * KEY_BYTES;
    static constexpr uint32 QUERY_BARRIERS = TILES + TILE_SLOTS * 16;
    static constexpr uint32 KEY_BARRIERS = QUERY_BARRIERS + Q_STAGES * CONSUMERS * 16;
    static constexpr uint32 VALUE_BARRIERS = KEY_BARRIERS + K_STAGES * 16;
    static constexpr uint32 TILE_BARRIERS = VALUE_BARRIERS + V_STAGES * 16;
    static constexpr uint32 BYTES = TILE_BARRIERS + TILE_SLOTS * 16;

    // Tiles.
    __device__ uint32 query(int stage, int consumer) const { return base + (stage * CONSUMERS + consumer) * QUERY_BYTES; }
    __device__ uint32 key(int stage) const { return base + KEYS + stage * KEY_BYTES; }
    __device__ uint32 value(int stage) const { return base + VALUES + stage * KEY_BYTES; }
    __device__ uint32 tile(int slot) const { return base + TILES + slot * 16; }

    // Barriers: `full` once the data is there, `empty` once it has been used.
    __device__ uint32 query_full(int stage, int consumer) const {
        return base + QUERY_BARRIERS + (stage * CONSUMERS + consumer) * 16;
    }
    __device__ uint32 query_empty(int stage, int consumer) const { return query_full(stage, consumer) + 8; }
    __device__ uint32 key_full(int stage) const { return base + KEY_BARRIERS + stage * 16; }
    __device__ uint32 key_empty(int stage) const { return key_full(stage) + 8; }
    __device__ uint32 value_full(int stage) const { return base + VALUE_BARRIERS + stage * 16; }
    __device__ uint32 value_empty(int stage) const { return value_full(stage) + 8; }
    __device__ uint32 tile_full(int slot) const { return base + TILE_BARRIERS + slot * 16; }
    __device__ uint32 tile_empty(int slot) const { return tile_full(slot) + 8; }
};
static_assert(Shared::BYTES + 1024 <= 232448, "more shared memory than a block may have");

__device__ __forceinline__ void initialise(const Shared& shared) {
    for (int stage = 0; stage < Q_STAGES; ++stage) {
        for (int consumer = 0; consumer < CONSUMERS; ++consumer) {
            ptx::mbarrier_init(shared.query_full(stage, consumer), 1);
            ptx::mbarrier_init(shared.query_empty(stage, consumer), 4);
        }
    }
    for (int stage = 0; stage < K_STAGES; ++stage) {
        ptx::mbarrier_init(shared.key_full(stage), 1);
        ptx::mbarrier_init(shared.key_empty(stage), CONSUMER_WARPS);
    }
    for (int stage = 0; stage < V_STAGES; ++stage) {
        ptx::mbarrier_init(shared.value_full(stage), 1);
        ptx::mbarrier_init(shared.value_empty(stage), CONSUMER_WARPS);
    }
    for (int slot = 0; slot < TILE_SLOTS; ++slot) {
        ptx::mbarrier_init(shared.tile_full(slot), 1);
        ptx::mbarrier_init(shared.tile_empty(slot), CONSUMER_WARPS + 2);
    }
    ptx::mbarrier_init_fence();
}

// The tile that the key producer published in a slot.
__device__ __forceinline__ Tile read_tile(const Shared& shared, int slot) {
    Tile tile;
    load_tile(shared.tile(slot), tile.m_block, tile.head, tile.batch, tile.n_blocks);
    return tile;
}

__device__ __forceinline__ void publish_tile(const Shared& shared, Ring<TILE_SLOTS>& ring, const Tile& tile) {
    ptx::mbarrier_wait(shared.tile_empty(ring.stage), ring.parity ^ 1);
    store_tile(shared.tile(ring.stage), tile.m_block, tile.head, tile.batch, tile.n_blocks);
    ptx::mbarrier_arrive(shared.tile_full(ring.stage));
    ring.advance();
}

}  // namespace hopper

// Shared memory of the Hopper attention kernels: rings of tiles with their barriers, and the slots in which tiles of work
// are published.
//
// Macros: HEAD_DIM, VALUE_DIM, CONSUMERS, BLOCK_N, K_STAGES, V_STAGES, Q_STAGES.
#pragma once

#include "hopper/ring.cuh"
#include "hopper/shape.cuh"
#include "mma/descriptor.cuh"

namespace hopper {

constexpr int KEY_PANELS = (HEAD_DIM + 63) / 64;
constexpr int VALUE_PANELS = (VALUE_DIM + 63) / 64;
constexpr uint32 QUERY_PANEL_BYTES = ROWS * panel::ROW_BYTES;
constexpr uint32 QUERY_BYTES = KEY_PANELS * QUERY_PANEL_BYTES;  // of one consumer
constexpr uint32 BLOCK_PANEL_BYTES = BLOCK_N * panel::ROW_BYTES;
constexpr uint32 KEY_BYTES = KEY_PANELS * BLOCK_PANEL_BYTES;
constexpr uint32 VALUE_BYTES = VALUE_PANELS * BLOCK_PANEL_BYTES;
constexpr int TILE_SLOTS = 2;
constexpr int CONSUMER_WARPS = 4 * CONSUMERS;
constexpr uint32 MOST_BYTES = 232448 - 1024;  // that a block may have, less what rounding its start up may take

// Where everything lies. A tile of work is published as TILE_BYTES. Addresses are 32 bits: generic pointers would cost the
// producers, which keep few registers, twice as many.
template <uint32 TILE_BYTES>
struct Buffers {
    uint32 base;  // a multiple of 1024, so that the swizzle depends on the row alone

    static constexpr uint32 KEYS = Q_STAGES * CONSUMERS * QUERY_BYTES;
    static constexpr uint32 VALUES = KEYS + K_STAGES * KEY_BYTES;
    static constexpr uint32 TILES = VALUES + V_STAGES * VALUE_BYTES;
    static constexpr uint32 QUERY_BARRIERS = TILES + TILE_SLOTS * TILE_BYTES;
    static constexpr uint32 KEY_BARRIERS = QUERY_BARRIERS + Q_STAGES * CONSUMERS * 16;
    static constexpr uint32 VALUE_BARRIERS = KEY_BARRIERS + K_STAGES * 16;
    static constexpr uint32 TILE_BARRIERS = VALUE_BARRIERS + V_STAGES * 16;
    static constexpr uint32 BYTES = TILE_BARRIERS + TILE_SLOTS * 16;

    // Tiles.
    __device__ uint32 query(int stage, int consumer) const { return base + (stage * CONSUMERS + consumer) * QUERY_BYTES; }
    __device__ uint32 key(int stage) const { return base + KEYS + stage * KEY_BYTES; }
    __device__ uint32 value(int stage) const { return base + VALUES + stage * VALUE_BYTES; }
    __device__ uint32 tile(int slot) const { return base + TILES + slot * TILE_BYTES; }

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

constexpr uint32 TILE_READERS = CONSUMER_WARPS + 2;  // each tells when it has read a tile of work

// By one thread, with a fence after it. `arrivals`: that make a block of keys or values full.
template <uint32 TILE_BYTES>
__device__ __forceinline__ void initialise_barriers(const Buffers<TILE_BYTES>& shared, uint32 arrivals = 1,
                                                    uint32 readers = TILE_READERS) {
    for (int stage = 0; stage < Q_STAGES; ++stage) {
        for (int consumer = 0; consumer < CONSUMERS; ++consumer) {
            ptx::mbarrier_init(shared.query_full(stage, consumer), 1);
            ptx::mbarrier_init(shared.query_empty(stage, consumer), 4);
        }
    }
    for (int stage = 0; stage < K_STAGES; ++stage) {
        ptx::mbarrier_init(shared.key_full(stage), arrivals);
        ptx::mbarrier_init(shared.key_empty(stage), CONSUMER_WARPS);
    }
    for (int stage = 0; stage < V_STAGES; ++stage) {
        ptx::mbarrier_init(shared.value_full(stage), arrivals);
        ptx::mbarrier_init(shared.value_empty(stage), CONSUMER_WARPS);
    }
    for (int slot = 0; slot < TILE_SLOTS; ++slot) {
        ptx::mbarrier_init(shared.tile_full(slot), 1);
        ptx::mbarrier_init(shared.tile_empty(slot), readers);
    }
}

}  // namespace hopper

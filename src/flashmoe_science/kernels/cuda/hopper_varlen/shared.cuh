// Shared memory of the Hopper kernel for sequences of any lengths: a tile of work is eight numbers, and there are barriers for
// what a producer mends before it hands it on.
#pragma once

#include "hopper/buffers.cuh"
#include "hopper_varlen/work.cuh"

namespace hopper {

constexpr int SLOTS = 4;  // of tiles of work
constexpr uint32 TILE_BYTES = 32;
// That make a block of keys or values full: of TMA's one issuer, or of all that copy.
constexpr int BLOCK_ARRIVALS = GATHER ? (LAST_ROWS > 0 ? 64 : 32) : 1;
constexpr uint32 READERS = TILE_READERS + (LAST_ROWS > 0 ? 1 : 0);

struct Shared : Buffers<SLOTS / TILE_SLOTS * TILE_BYTES> {
    static constexpr uint32 LANDED_BARRIERS = TILE_BARRIERS + SLOTS * 16;
    static constexpr uint32 BYTES = LANDED_BARRIERS + 24;

    __device__ uint32 tile(int slot) const { return base + TILES + slot * TILE_BYTES; }

    // Barriers: `landed` once the data is there to be mended.
    __device__ uint32 values_landed() const { return base + LANDED_BARRIERS; }
    __device__ uint32 queries_landed() const { return base + LANDED_BARRIERS + 8; }
    // The producer of keys has read the newest tile, which so needs no arrival of it to be empty.
    __device__ uint32 tile_begun() const { return base + LANDED_BARRIERS + 16; }
};
static_assert(Shared::BYTES <= MOST_BYTES, "more shared memory than a block may have");

__device__ __forceinline__ void initialise(const Shared& shared) {
    initialise_barriers(shared, BLOCK_ARRIVALS, READERS);
    for (int slot = TILE_SLOTS; slot < SLOTS; ++slot) {
        ptx::mbarrier_init(shared.tile_full(slot), 1);
        ptx::mbarrier_init(shared.tile_empty(slot), READERS);
    }
    ptx::mbarrier_init(shared.values_landed(), BLOCK_ARRIVALS);
    ptx::mbarrier_init(shared.queries_landed(), 1);
    ptx::mbarrier_init(shared.tile_begun(), 1);
    ptx::mbarrier_init_fence();
}

__device__ __forceinline__ void store_tile(const Shared& shared, int slot, const Tile& tile) {
    store_tile(shared.tile(slot), tile.first_row, tile.slice, tile.first_block, tile.last_block);
    store_tile(shared.tile(slot) + 16, tile.query_start, tile.tokens, tile.keys, tile.place);
}

// The tile that was published in a slot.
__device__ __forceinline__ Tile read_tile(const Shared& shared, int slot) {
    Tile tile;
    load_tile(shared.tile(slot), tile.first_row, tile.slice, tile.first_block, tile.last_block);
    load_tile(shared.tile(slot) + 16, tile.query_start, tile.tokens, tile.keys, tile.place);
    return tile;
}

}  // namespace hopper

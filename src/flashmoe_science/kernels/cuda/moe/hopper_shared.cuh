// Shared memory of the Hopper kernel of grouped products: a ring of operand tiles, their barriers, a ring of tiles to do.
#pragma once

#include "hopper/ring.cuh"
#include "moe/hopper_parameters.cuh"

namespace moe {

using hopper::release;
using hopper::Ring;

// A product to do: 256 rows of an expert's weight with up to TOKENS of the rows sorted to it.
struct Tile {
    int expert;
    int weight_tile;
    int first;  // position of the first row
    int count;  // of rows; zero: there are no more tiles
};

constexpr int TILE_SLOTS = 2;
constexpr int TILE_BYTES = 16;
constexpr uint32 WEIGHT_BYTES = WEIGHT_ROWS * ROW_BYTES;
constexpr uint32 TOKEN_BYTES = TOKENS * ROW_BYTES;

// Which panel's kept columns come in which turn: the consumers', two each, by turns.
__device__ __forceinline__ int panel_of_turn(int turn) { return turn % 2 * 2 + turn / 2; }

struct Shared {
    uint32 base;  // on 1024 bytes

    static constexpr uint32 TOKEN_TILES = STAGES * WEIGHT_BYTES;
    static constexpr uint32 BARRIERS = TOKEN_TILES + STAGES * TOKEN_BYTES;
    static constexpr uint32 TILE_BARRIERS = BARRIERS + STAGES * 16;
    static constexpr uint32 TILES = TILE_BARRIERS + TILE_SLOTS * 16;
    static constexpr uint32 BYTES = TILES + TILE_SLOTS * TILE_BYTES;

    __device__ uint32 weights(int stage) const { return base + stage * WEIGHT_BYTES; }
    __device__ uint32 tokens(int stage) const { return base + TOKEN_TILES + stage * TOKEN_BYTES; }
    __device__ uint32 full(int stage) const { return base + BARRIERS + stage * 16; }
    __device__ uint32 empty(int stage) const { return full(stage) + 8; }
    __device__ uint32 tile_full(int slot) const { return base + TILE_BARRIERS + slot * 16; }
    __device__ uint32 tile_empty(int slot) const { return tile_full(slot) + 8; }
    __device__ uint32 tile(int slot) const { return base + TILES + slot * TILE_BYTES; }
};
static_assert(Shared::BYTES + 1024 <= 232448, "more shared memory than a block may have");

__device__ __forceinline__ void initialise(const Shared& shared) {
    for (int stage = 0; stage < STAGES; ++stage) {
        ptx::mbarrier_init(shared.full(stage), GATHER ? 1 + WARPGROUP : 1);
        ptx::mbarrier_init(shared.empty(stage), CONSUMER_WARPS);
    }
    for (int slot = 0; slot < TILE_SLOTS; ++slot) {
        ptx::mbarrier_init(shared.tile_full(slot), 1);
        ptx::mbarrier_init(shared.tile_empty(slot), CONSUMER_WARPS + (GATHER ? 3 : 0));
    }
    ptx::mbarrier_init_fence();
}

// One thread, of the only warp that publishes.
__device__ __forceinline__ void publish(const Shared& shared, const Ring<TILE_SLOTS>& ring, const Tile& tile) {
    hopper::store_tile(shared.tile(ring.stage), tile.expert, tile.weight_tile, tile.first, tile.count);
    ptx::mbarrier_arrive(shared.tile_full(ring.stage));
}

// The next tile, by a whole warp that only reads them.
__device__ __forceinline__ Tile next_tile(const Shared& shared, Ring<TILE_SLOTS>& ring) {
    ptx::mbarrier_wait(shared.tile_full(ring.stage), ring.parity);
    Tile tile;
    hopper::load_tile(shared.tile(ring.stage), tile.expert, tile.weight_tile, tile.first, tile.count);
    release(shared.tile_empty(ring.stage));
    ring.advance();
    return tile;
}

}  // namespace moe

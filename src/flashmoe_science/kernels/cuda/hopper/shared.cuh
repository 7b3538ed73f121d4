// Shared memory of the Hopper kernel: a tile of work is four numbers.
#pragma once

#include "hopper/buffers.cuh"
#include "hopper/scheduler.cuh"

namespace hopper {

using Shared = Buffers<16>;
static_assert(Shared::BYTES <= MOST_BYTES, "more shared memory than a block may have");

__device__ __forceinline__ void initialise(const Shared& shared) {
    initialise_barriers(shared);
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

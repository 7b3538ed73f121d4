// A consumer warpgroup of the products by rows: tiles as they are published, each in the width that its rows need.
#pragma once

#include "moe/hopper_block.cuh"

namespace moe {

// Of the kernel: the product of a tile of up to N rows.
template <int N>
__device__ void consume_tile(const Parameters& p, const Shared& shared, const Tile& tile, Ring<STAGES>& ring, int consumer);

// The product of the narrowest width that holds the tile's rows.
template <int N>
__device__ __forceinline__ void consume_at_most(const Parameters& p, const Shared& shared, const Tile& tile,
                                                Ring<STAGES>& ring, int consumer) {
    if constexpr (N > LEAST) {
        if (tile.count <= N - STEP) return consume_at_most<N - STEP>(p, shared, tile, ring, consumer);
    }
    consume_tile<N>(p, shared, tile, ring, consumer);
}

__device__ __forceinline__ void consume(const Parameters& p, const Shared& shared, int consumer) {
    Ring<TILE_SLOTS> tiles;
    Ring<STAGES> ring;
    while (true) {
        Tile tile = next_tile(shared, tiles);
        tile.count = __shfl_sync(0xffffffff, tile.count, 0);
        if (tile.count == NO_TILE) return;
        consume_at_most<TOKENS>(p, shared, tile, ring, consumer);
    }
}

}  // namespace moe

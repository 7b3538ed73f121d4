// Which tile next. The grid is persistent: a block starts with the tile of its index, then takes tickets.
//
// Order: sections of heads whose keys and values fit L2; within a section the longest tiles (causal: the last rows)
// first, so that the short ones fill the end. Dynamic: a block that was slow takes fewer.
#pragma once

#include "hopper/parameters.cuh"

namespace hopper {

struct Tile {
    int m_block;  // -1: no more work
    int head;
    int batch;
    int n_blocks;  // key blocks that the mask leaves; one, wholly masked, where it leaves none
};

__device__ __forceinline__ Tile tile_at(const Parameters& p, int index) {
    if (index >= p.tiles) return {-1, 0, 0, 0};
    const int per_section = p.section * p.m_blocks;
    const int section = index / per_section;
    const int rest = index - section * per_section;
    const int first = section * p.section;
    const int heads = min(p.section, p.head_count - first);
    const int rank = rest / heads;
    const int flat = first + rest - rank * heads;
    Tile tile;
    tile.m_block = CAUSAL ? p.m_blocks - 1 - rank : rank;
    tile.batch = flat / p.num_heads;
    tile.head = flat - tile.batch * p.num_heads;
    int keys = p.seqlen_k;
    if (CAUSAL) keys = min(keys, (tile.m_block + 1) * BLOCK_M + p.seqlen_k - p.seqlen_q);
    tile.n_blocks = max(1, (keys + BLOCK_N - 1) / BLOCK_N);
    return tile;
}

// Where two blocks share a multiprocessor, those of the grid's second half begin at the other end of its tiles: beside
// the longest stands the shortest.
__device__ __forceinline__ int first_tile() {
    const int block = blockIdx.x, blocks = gridDim.x;
    const int first_half = blocks - blocks / 2;
    if (BLOCKS_PER_MULTIPROCESSOR == 1 || block < first_half) return block;
    return blocks - 1 - (block - first_half);
}

// The tile that a ticket stands for. Every block draws until it gets one past the end, so `tiles` are drawn in all;
// whoever has the last one sets the counter back for the next launch.
__device__ __forceinline__ int redeem(const Parameters& p, int ticket) {
    if (ticket == p.tiles - 1) atomicExch(p.ticket, 0);
    return ticket + static_cast<int>(gridDim.x);
}

}  // namespace hopper

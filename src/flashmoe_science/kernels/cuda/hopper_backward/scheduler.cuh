// Which key block and which query blocks a thread block works on.
//
// The grid is persistent: block b starts with tile b, then takes tickets. A section of heads goes through its key blocks
// in ascending order, all heads side by side: a tile only ever waits for tiles with lower tickets (see `write_pieces`), which
// somebody is working on, and under a causal mask the longest come first. Query blocks are walked from the last to the
// first, so that tiles that are begun together meet at the same rows.
#pragma once

#include "hopper_backward/parameters.cuh"

namespace backward {

struct Tile {
    int n_block;  // -1: no more work
    int head;   // of the keys
    int batch;
    int first;  // query block: the last that is walked
};

__device__ __forceinline__ Tile tile_of(const Parameters& p, int index) {
    if (index >= p.tiles) return {-1, 0, 0, 0};
    const int per_section = p.section * p.n_blocks;
    const int section = index / per_section;
    const int rest = index - section * per_section;
    const int begin = section * p.section;
    const int heads = min(p.section, p.head_count - begin);
    Tile tile;
    tile.n_block = rest / heads;
    const int flat = begin + rest - tile.n_block * heads;
    tile.batch = flat / p.num_kv_heads;
    tile.head = flat - tile.batch * p.num_kv_heads;
    tile.first = CAUSAL ? max(0, tile.n_block * BLOCK_N - (p.seqlen_k - p.seqlen_q)) / BLOCK_M : 0;
    return tile;
}

// Walks the query blocks of all query heads that share the tile's keys.
struct Walk {
    int m_block;
    int left;         // steps to go, this one included
    int row_head;     // batch * num_heads + query head

    __device__ __forceinline__ Walk(const Parameters& p, const Tile& tile) {
        const int group = p.num_heads / p.num_kv_heads;
        m_block = p.m_blocks - 1;
        left = group * (p.m_blocks - tile.first);
        row_head = tile.batch * p.num_heads + tile.head * group;
    }

    __device__ __forceinline__ void advance(const Parameters& p, const Tile& tile) {
        --left;
        if (--m_block < tile.first) {
            m_block = p.m_blocks - 1;
            ++row_head;
        }
    }
};

}  // namespace backward

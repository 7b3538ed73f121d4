// Which key block and which query blocks a thread block works on.
//
// The grid is persistent: block b starts with tile b, then takes tickets. STAGGERED, for short sequences: tiles of one head side
// by side, at no time two at the same rows, dealt out in turn. Otherwise a section of heads goes through its key blocks
// in ascending order, all heads side by side: a tile only ever waits for tiles with lower tickets (see `write_pieces`), which
// somebody is working on, as all blocks are on the GPU at once. Under a causal mask the longest come first. Query blocks are
// walked from the last to the first, so that tiles that are begun together meet at the same rows.
#pragma once

#include "hopper_backward/parameters.cuh"

namespace backward {

struct Tile {
    int n_block;  // -1: no more work
    int head;   // of the keys
    int batch;
    int first;  // query block; see Walk
};

// The first block of query rows that sees a block of keys.
__device__ __forceinline__ int first_m_block(const Parameters& p, int n_block) {
    return CAUSAL ? max(0, n_block * BLOCK_N - (p.seqlen_k - p.seqlen_q)) / BLOCK_M : 0;
}

// Behind the last that does. With a window 0, as the first, where none does.
__device__ __forceinline__ int end_m_block(const Parameters& p, int n_block) {
    if (!WINDOW) return p.m_blocks;
    const int row = (n_block + 1) * BLOCK_N - 1 - (p.seqlen_k - p.seqlen_q) + p.window_left;  // last to see the last key
    return min(p.m_blocks, max(0, row + BLOCK_M) / BLOCK_M);
}

// The first block of keys that a block of query rows sees.
__device__ __forceinline__ int first_n_block(const Parameters& p, int m_block) {
    return WINDOW ? max(0, m_block * BLOCK_M + p.seqlen_k - p.seqlen_q - p.window_left) / BLOCK_N : 0;
}

// How many blocks of keys a block of query rows sees.
__device__ __forceinline__ int seen_blocks(const Parameters& p, int m_block) {
    if (!CAUSAL) return p.n_blocks;
    const int end = min(p.n_blocks, ((m_block + 1) * BLOCK_M + p.seqlen_k - p.seqlen_q + BLOCK_N - 1) / BLOCK_N);
    return end - first_n_block(p, m_block);
}

// Where a staggered walk begins.
__device__ __forceinline__ int staggered_start(const Parameters& p, int n_block) { return n_block * p.m_blocks / p.n_blocks; }

__device__ __forceinline__ Tile tile_of(const Parameters& p, int index) {
    if (index >= p.tiles) return {-1, 0, 0, 0};
    const int section_heads = STAGGERED ? 1 : p.section;
    const int per_section = section_heads * p.n_blocks;
    const int section = index / per_section;
    const int rest = index - section * per_section;
    const int begin = section * section_heads;
    const int heads = min(section_heads, p.head_count - begin);
    Tile tile;
    tile.n_block = rest / heads;
    const int flat = begin + rest - tile.n_block * heads;
    tile.batch = flat / p.num_kv_heads;
    tile.head = flat - tile.batch * p.num_kv_heads;
    tile.first = STAGGERED ? staggered_start(p, tile.n_block) : first_m_block(p, tile.n_block);
    return tile;
}

// Which turn a block of keys has at a block of query rows.
__device__ __forceinline__ int turn_of(const Parameters& p, int n_block, int m_block) {
    if (!STAGGERED) return n_block - first_n_block(p, m_block);
    // Who comes first began at these rows, or last before them.
    const int turn = ((m_block + 1) * p.n_blocks + p.m_blocks - 1) / p.m_blocks - 1 - n_block;
    return turn < 0 ? turn + p.n_blocks : turn;
}

// Walks the query blocks of all query heads that share the tile's keys: from the last down to the first that sees them, or,
// staggered, from the tile's start up and around. With a window there may be none.
struct Walk {
    int m_block;
    int left;         // steps to go, this one included
    int row_head;     // batch * num_heads + query head

    __device__ __forceinline__ Walk(const Parameters& p, const Tile& tile) {
        const int group = p.num_heads / p.num_kv_heads;
        m_block = STAGGERED ? tile.first : end_m_block(p, tile.n_block) - 1;
        left = group * (STAGGERED ? p.m_blocks : end_m_block(p, tile.n_block) - tile.first);
        row_head = tile.batch * p.num_heads + tile.head * group;
    }

    __device__ __forceinline__ void advance(const Parameters& p, const Tile& tile) {
        --left;
        if (!STAGGERED) {
            if (--m_block >= tile.first) return;
            m_block = end_m_block(p, tile.n_block) - 1;
        } else {
            if (++m_block == p.m_blocks) m_block = 0;
            if (m_block != tile.first) return;
        }
        ++row_head;
    }
};

}  // namespace backward

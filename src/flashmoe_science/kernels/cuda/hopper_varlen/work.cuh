// The work of a batch whose lengths lie in device memory: tiles of BLOCK_M rows of a sequence and a slice, where a slice is a
// head, or a key head whose query heads share the tile: row r of a sequence is then token r / heads, head r % heads.
#pragma once

#include "hopper_varlen/parameters.cuh"
#include "ptx/global.cuh"

namespace hopper {

// A tile, as it is published in shared memory.
struct Tile {
    int first_row;    // of its sequence; -1: no more work
    int slice;
    int first_block;  // of keys, from the first to the last that some row sees; one, wholly masked, where there is none
    int last_block;
    int query_start;  // where the sequence's tokens begin
    int tokens;       // of the sequence
    int keys;         // of the sequence
    int place;        // packed: where the sequence's keys begin; in pages: the sequence

    // Token i of the sequence stands at position i + offset.
    __device__ __forceinline__ int offset() const { return keys - tokens; }
    __device__ __forceinline__ int rows(const Parameters& p) const { return tokens << p.heads_shift; }

#if TREE
    // The key of the sequence's first query, from where on rows have bits; or kNoTree.
    __device__ __forceinline__ int tree() const { return keys > 0 && tokens <= kTreeQueries ? offset() : kNoTree; }
#endif
};

#if CHUNK
// The first key of the chunk of a position that is not negative.
__device__ __forceinline__ int chunk_start(const Parameters& p, int position) {
    return static_cast<int>(__umulhi(2 * static_cast<uint32>(position), p.chunk_multiplier) >> p.chunk_shift) * p.chunk;
}
#endif

// The first key that a token sees. It rises with the token, as does the end.
__device__ __forceinline__ int first_key(const Parameters& p, int token, int offset) {
    int key = LEFT_WINDOW ? max(0, token + offset - p.window_left) : 0;
#if CHUNK
    if (token + offset >= 0) key = max(key, chunk_start(p, token + offset));
#endif
    return key;
}

// The first key after it that a token does not see; at most 0 where it sees none.
__device__ __forceinline__ int end_key(const Parameters& p, int token, int keys, int offset) {
    int end = CAUSAL ? min(keys, token + offset + p.window_right + 1) : keys;
#if CHUNK
    end = token + offset < 0 ? 0 : min(end, chunk_start(p, token + offset) + p.chunk);
#endif
    return end;
}

// What a warp's lane keeps of one sequence while it looks for tiles.
struct Sequence {
    int query_start = 0;
    int tokens = 0;
    int keys = 0;
    int place = 0;

    // p.batch stands for the rows behind the last sequence, later indices for nothing.
    __device__ __forceinline__ Sequence(const Parameters& p, int index) {
        if (index > p.batch) return;
        query_start = load_index(p.query_starts + index);
        if (index == p.batch) {
            tokens = p.tokens - query_start;
            return;
        }
        tokens = load_index(p.query_starts + index + 1) - query_start;
#if MIXED
        if (tokens * (p.group << p.heads_shift) <= MIXED) tokens = 0;  // other blocks' work
#endif
#if ONLY == 2
        if (tokens == 1) tokens = 0;  // another launch's
#endif
        place = index;
        if (!PAGED) place = load_index(p.key_starts + index);
        keys = p.key_counts != nullptr ? load_index(p.key_counts + index) : load_index(p.key_starts + index + 1) - place;
    }

    __device__ __forceinline__ int tiles(const Parameters& p) const {
        return ((tokens << p.heads_shift) + BLOCK_M - 1) / BLOCK_M;
    }

    // How many of its tiles, from the first on, see at most `blocks` blocks of keys, which is at least 1. More under a
    // window, where a tile's first blocks are left out: at most p.most_blocks.
    __device__ __forceinline__ int tiles_within(const Parameters& p, int blocks) const {
        if (blocks >= p.most_blocks || keys <= blocks * BLOCK_N) return tiles(p);
        if (!CAUSAL) return 0;
        // Tile r ends at token (r + 1) * BLOCK_M / heads; the last tile, which ends earlier, sees all keys.
        const int seen = max(0, min(tokens, blocks * BLOCK_N - (keys - tokens) - p.window_right));
        return (seen << p.heads_shift) / BLOCK_M;
    }

    __device__ __forceinline__ int most_blocks(const Parameters& p) const {
        return tokens == 0 ? 0 : min(max(1, (keys + BLOCK_N - 1) / BLOCK_N), p.most_blocks);
    }

    __device__ __forceinline__ Tile tile(const Parameters& p, int slice, int index) const {
        const int first_row = index * BLOCK_M;
        const int offset = keys - tokens;
        const int last_token = (min(first_row + BLOCK_M, tokens << p.heads_shift) - 1) >> p.heads_shift;
        const int last = max(0, end_key(p, last_token, keys, offset) - 1) / BLOCK_N;
        const int first = min(last, first_key(p, first_row >> p.heads_shift, offset) / BLOCK_N);
        return {first_row, slice, first, last, query_start, tokens, keys, place};
    }
};

}  // namespace hopper

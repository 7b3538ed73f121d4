// The rows of one sequence that a block works on, and the keys that they see. One warp looks them up; the block has them in
// shared memory, from where they are read anew when they are needed, so that they take no registers meanwhile.
#pragma once
#include "portable/tile_shape.cuh"
#include "varlen/parameters.cuh"
#if TREE
#include "tree.cuh"
#endif

// Rows of a tile are (token, head of a group) pairs with PACKED_HEADS, else tokens of one head.
struct TokenOfRow {
    int token;
    int head;  // in the group
};

__device__ __forceinline__ int rows_per_token(const VarlenParameters& p) {
    return PACKED_HEADS ? p.heads_per_kv_head : 1;
}

__device__ __forceinline__ TokenOfRow token_of(int row, const VarlenParameters& p) {
    if (!PACKED_HEADS) return {row, 0};
    const int token = __umulhi(2 * static_cast<uint32>(row), p.group_multiplier) >> p.group_shift;
    return {token, row - token * p.heads_per_kv_head};
}

struct WorkTile {
    int batch;
    int slice;      // query head, or key/value head with PACKED_HEADS
    int first_row;  // of the tile, in its sequence
    int rows;       // of the sequence; at most first_row if there is nothing to do
    int query_start, key_start;
    int seqlen_k;
    int offset;  // a token's position among the keys is token + offset
    int begin, end;    // keys that some row of the tile sees: [begin, end)
    int first_masked;  // blocks of keys from this one on need the mask, and so do those
    int first_clear;   // before this one
#if TREE
    int tree;       // the key of the sequence's first query, from where on rows have bits; or kNoTree
    uint64 unseen;  // of the queries' keys, those that no row of the sequence sees
#endif
};

// Tiles of all sequences have one number line. Those of sequence b begin at
//     base(b) = start(b) x rows per token / BLOCK_M + b,
// which leaves room for its last tile that is not full, so that no sum over the sequences before it is needed. Some
// numbers stand for no tile.
__device__ __forceinline__ int tile_base(int b, const VarlenParameters& p) {
    return p.query_starts[b] * rows_per_token(p) / BLOCK_M + b;
}

// The sequence of a tile: the last whose base is not above it. By a whole warp, 32 at a time. p.batch stands for the
// rows behind the last sequence.
__device__ __forceinline__ int sequence_of(int tile, int lane, const VarlenParameters& p) {
    int first = 0;
    int count = p.batch + 1;
    while (count > 1) {
        const int step = (count + 31) / 32;
        const int probe = lane * step;
        const bool before = probe < count && tile_base(first + probe, p) <= tile;
        const int hits = __popc(__ballot_sync(0xffffffffu, before));
        const int skipped = max(hits - 1, 0) * step;
        first += skipped;
        count = min(step, count - skipped);
    }
    return first;
}

// The first key that a row at this position sees, if any, and one past the last, but for the sequence's ends. Both rise with the
// position. Before a sequence's first key there is a chunk without keys.
__device__ __forceinline__ int begin_of_seen(int position, const VarlenParameters& p) {
    int begin = position - p.window_left;
#if CHUNK
    if (position >= 0) begin = max(begin, static_cast<int>((__umulhi(2 * static_cast<uint32>(position), p.chunk_multiplier) >> p.chunk_shift) * p.chunk));
#endif
    return begin;
}

__device__ __forceinline__ int end_of_seen(int position, const VarlenParameters& p) {
    int end = position + p.window_right + 1;
#if CHUNK
    end = position < 0 ? 0 : min(end, static_cast<int>(((__umulhi(2 * static_cast<uint32>(position), p.chunk_multiplier) >> p.chunk_shift) + 1) * p.chunk));
#endif
    return end;
}

// Keys [begin, end) that some row of rows [first, last] of a sequence sees. Rows rise with tokens, so the first row has
// the least bounds and the last the greatest.
struct VisibleKeys {
    int begin, end;

    __device__ __forceinline__ VisibleKeys(int first, int last, int offset, int seqlen_k, const VarlenParameters& p) {
        end = min(seqlen_k, end_of_seen(token_of(last, p).token + offset, p));
        begin = LEFT_WINDOW ? max(0, begin_of_seen(token_of(first, p).token + offset, p)) : 0;
    }
};

// By a whole warp; every lane gets it.
__device__ __forceinline__ WorkTile work_tile(int block, int lane, const VarlenParameters& p) {
    WorkTile work;
    const int section_tiles = p.slices_per_section * p.num_tiles;
    const int section = block / section_tiles;
    const int in_section = block % section_tiles;
    const int slices = min(p.slices_per_section, p.num_slices - section * p.slices_per_section);
    work.slice = section * p.slices_per_section + in_section % slices;
    // The last tiles of a sequence see the most keys under a causal mask: they come first.
    const int tile = p.num_tiles - 1 - in_section / slices;
    int tokens;
    int tile_in_sequence;
    if (p.query_starts == nullptr) {
        work.batch = tile / p.tiles_per_sequence;
        tile_in_sequence = tile % p.tiles_per_sequence;
        work.query_start = 0;
        tokens = p.seqlen_q;
    } else {
        work.batch = sequence_of(tile, lane, p);
        tile_in_sequence = tile - tile_base(work.batch, p);
        work.query_start = p.query_starts[work.batch];
        tokens = (work.batch < p.batch ? p.query_starts[work.batch + 1] : p.num_tokens) - work.query_start;
    }
    work.key_start = 0;
    work.seqlen_k = 0;
    if (work.batch < p.batch) {
        work.seqlen_k = p.seqlen_k;
        if (p.key_starts != nullptr) {
            work.key_start = p.key_starts[work.batch];
            work.seqlen_k = p.key_starts[work.batch + 1] - work.key_start;
        }
        if (p.key_counts != nullptr) work.seqlen_k = p.key_counts[work.batch];
    }
    work.rows = tokens * rows_per_token(p);
#if ONLY == 2
    if (tokens == 1 && work.batch < p.batch) work.rows = 0;  // another launch's
#endif
    work.first_row = tile_in_sequence * BLOCK_M;
    work.offset = work.seqlen_k - tokens;
    const int last_row = min(work.first_row + BLOCK_M, work.rows) - 1;
    const VisibleKeys visible(work.first_row, last_row, work.offset, work.seqlen_k, p);
    work.begin = visible.begin;
    work.end = visible.end;
    const int first_position = token_of(work.first_row, p).token + work.offset;
    const int last_position = token_of(last_row, p).token + work.offset;
    work.first_masked = max(0, min(work.seqlen_k, end_of_seen(first_position, p))) / BLOCK_N;
    work.first_clear = LEFT_WINDOW ? (max(0, begin_of_seen(last_position, p)) + BLOCK_N - 1) / BLOCK_N : 0;
#if TREE
    work.tree = kNoTree;
    work.unseen = 0;
    if (work.batch < p.batch && tokens <= kTreeQueries) {
        work.tree = work.offset;
        work.unseen = unseen_by_all(p.tree_mask + work.query_start, tokens, p.window_right, lane);
        work.first_masked = min(work.first_masked, max(0, work.offset) / BLOCK_N);
    }
#endif
    return work;
}


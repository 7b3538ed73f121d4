// What happens to scores between the product of query and keys and the softmax.
#pragma once
#include "portable/products.cuh"
#include "varlen/work_tile.cuh"

// Scores are in units of log2 when they are capped or biased, else as the product leaves them.
constexpr bool kScaled = SOFTCAP || ALIBI;

// cap x tanh(x / cap) = cap - 2 cap / (1 + e^(2 x / cap)): two operations of the special function unit, and an absolute
// error of some 2^-22 of the cap, where tanh.approx has a relative one of 2^-11.
__device__ __forceinline__ void cap_scores(Scores& scores, const VarlenParameters& p) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float e = exp2_approx(scores[m][n][i] * p.softcap_rate);
                scores[m][n][i] = fmaf(-2.0f * p.softcap_log2, reciprocal(1.0f + e), p.softcap_log2);
            }
        }
    }
}

// One row's part of a thread's scores.
struct ScoreRow {
    int position;  // of the row's token among the keys

    __device__ __forceinline__ ScoreRow(int m, int h, int lane_row, const volatile WorkTile& work,
                                        const VarlenParameters& p) {
        position = token_of(work.first_row + lane_row + m * 16 + h * 8, p).token + work.offset;
    }
};

// Minus slope x |position - key|, in log2 units. `column`: first key of the block; `lane_row`: the thread's first row of
// the tile; `slopes`: in log2 units, by row.
__device__ __forceinline__ void add_alibi(Scores& scores, int column, int lane_row, const float (&slopes)[kRowTiles][2],
                                          const volatile WorkTile& work, const VarlenParameters& p) {
    const int lane_column = column + 2 * (thread_index() % 4);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float distance = static_cast<float>(ScoreRow(m, h, lane_row, work, p).position - lane_column);
#pragma unroll
            for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float& score = scores[m][n][2 * h + i];
                    const float logit = SOFTCAP ? score : score * p.scale_log2;
                    score = fmaf(-slopes[m][h], fabsf(distance - static_cast<float>(n * 8 + i)), logit);
                }
            }
        }
    }
}

#if TREE
// Zeros in the rows of a tile of values whose keys no row of the sequence sees: zero times NaN is NaN. `column`: of the first.
__device__ __forceinline__ void clear_unseen(uint32 tile, int column, const volatile WorkTile& work) {
    constexpr int chunks = V::kRowBytes / kChunkBytes;
    for (int i = thread_index(); i < BLOCK_N * chunks; i += kThreads) {
        const int node = column + i / chunks - work.tree;
        if (node >= 0 && node < kTreeQueries && work.unseen >> node & 1) store_shared(tile + i * kChunkBytes, Chunk{0, 0, 0, 0});
    }
}
#endif

// Scores of keys that a row must not see become minus infinity.
__device__ __forceinline__ void mask(Scores& scores, int column, int lane_row, const volatile WorkTile& work,
                                     const VarlenParameters& p) {
    const int lane_column = column + 2 * (thread_index() % 4);
    const int seqlen_k = work.seqlen_k;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int position = ScoreRow(m, h, lane_row, work, p).position;
#if CHUNK
            const int end = min(seqlen_k, end_of_seen(position, p)) - lane_column;
            const int begin = begin_of_seen(position, p) - lane_column;
#else
            const int end = min(seqlen_k, position + p.window_right + 1) - lane_column;
            const int begin = position - p.window_left - lane_column;
#endif
#if TREE
            const bool of_tree = column + BLOCK_N > work.tree;
            const int row = min(work.first_row + lane_row + m * 16 + h * 8, work.rows - 1);
            const uint64 word = of_tree ? p.tree_mask[work.query_start + token_of(row, p).token] : 0;
            uint32 hidden = 0;  // of 32 columns
#endif
#pragma unroll
            for (int n = 0; n < kKeyTiles; ++n) {
#if TREE
                if (n % 4 == 0 && of_tree) hidden = static_cast<uint32>(hidden_from(word, lane_column + n * 8 - work.tree));
#endif
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    if (n * 8 + i >= end || (LEFT_WINDOW && n * 8 + i < begin)) {
                        scores[m][n][2 * h + i] = NEGATIVE_INFINITY;
                    }
#if TREE
                    if (hidden >> (n % 4 * 8 + i) & 1) scores[m][n][2 * h + i] = NEGATIVE_INFINITY;
#endif
                }
            }
        }
    }
}

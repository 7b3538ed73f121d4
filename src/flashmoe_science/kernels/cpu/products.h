// The products of one tile of queries with one block of keys, and what becomes of them: scores and their maxima, weights,
// output.
#pragma once

#include "paths.h"
#include "softmax.h"

namespace {

struct ScoreAndMaximumEpilogue {
    SumEpilogue scores;
    float* block_max;
    template <int R, int C>
    __attribute__((always_inline)) void store(int row, int column, F acc[R][C]) const {
        scores.store<R, C>(row, column, acc);
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
            F highest = load(block_max + (column + c) * W);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) highest = max(acc[r][c], highest);
            ::store(block_max + (column + c) * W, highest);
        }
    }
};

struct OutputEpilogue {
    float* out;
    ptrdiff_t ld;
    const float* rescale;  // null: what is there already stays as it is
    template <int R, int C>
    __attribute__((always_inline)) void store(int row, int column, F acc[R][C]) const {
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
            const F factor = rescale ? load(rescale + (column + c) * W) : set1(1.0f);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                float* to = out + (row + r) * ld + (column + c) * W;
                ::store(to, madd(load(to), factor, acc[r][c]));
            }
        }
    }
};

// Weights in place of the block's scores, for the vectors [first, last) of queries.
template <class Path>
void weigh_block(
    const Shared& w, const Running& running, int keys, int first, int last, int ld, float scale) {
    int column = first;
    for (; column + MAX_COLUMNS <= last; column += MAX_COLUMNS)
        raise_maxima<MAX_COLUMNS>(running, column, w.block_max, scale);
    for (; column < last; ++column) raise_maxima<1>(running, column, w.block_max, scale);
    if constexpr (Path::PAIRS) {
#if HAS_BF16
        for (; first + 2 <= last; first += 2)
            weigh_pairs<2>(w.scores, w.pairs, ld, keys, first, w.block_max, running, scale);
        if (first < last) weigh_pairs<1>(w.scores, w.pairs, ld, keys, first, w.block_max, running, scale);
#endif
    } else {
        if constexpr (MAX_COLUMNS == 4)
            for (; first + 4 <= last; first += 4)
                weigh<4>(w.scores, ld, keys, first, w.block_max, running, scale);
        for (; first + 2 <= last; first += 2)
            weigh<2>(w.scores, ld, keys, first, w.block_max, running, scale);
        if (first < last) weigh<1>(w.scores, ld, keys, first, w.block_max, running, scale);
    }
}

// Scores of keys [first_key, first_key + keys) of the block with the vectors [first, last) of the tile's
// queries; with block_max also their maxima. Products are summed in runs of at most `longest`.
template <class Path, int WIDEST = MAX_COLUMNS>
void score(
    const Shared& w, const float* queries, const KeyBlock& block, int first_key, int keys, int depth, int longest,
    int first, int last, int ld, float* block_max) {
    typedef typename Path::Product Product;
    float* const s = w.scores + first_key * ld;
    for (int at = 0; at < depth; at += longest) {
        const int part = smaller(depth - at, longest);
        const char* key = block.key + first_key * block.key_row + at * 4;
        const float* query = queries + at * ld;
        const SumEpilogue scores = {s, ld, at == 0};
        if (block_max != nullptr && at + part == depth)
            multiply<Product, WIDEST>(
                key, block.key_row, 4, keys, query, ld, part, first, last, ScoreAndMaximumEpilogue{scores, block_max});
        else
            multiply<Product, WIDEST>(key, block.key_row, 4, keys, query, ld, part, first, last, scores);
    }
}

}  // namespace

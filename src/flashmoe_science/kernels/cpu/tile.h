// One tile of queries against one block of keys.
#pragma once

#include <math.h>

#include "amx_tile.h"
#include "fetch.h"
#include "products.h"

namespace {

// How many keys of the block the vector of queries `column` sees at most (its last lane does); of one before the tile where
// `column` is below 0.
int visible(const Tile& tile, const KeyBlock& block, int column) {
    return (int)larger<int64_t>(0, smaller<int64_t>(tile.diagonal + (column + 1) * W - block.first, block.count));
}

// Queries of a whole tile.
int whole_tile(const Job& job) { return WIDE_COLUMNS > MAX_COLUMNS && job.wide ? WIDE_TILE_QUERIES : TILE_QUERIES; }

// Vectors of queries before the tile in the whole one that it is a part of: none, unless tiles are narrow for many threads.
int vectors_before(const Job& job, const Tile& tile) { return (int)(tile.first_row % whole_tile(job) / W); }

// Whether the mask cuts the block for any query of the whole tile: their bits do not depend on how they are divided.
bool is_on_diagonal(const Job& job, const Tile& tile, const KeyBlock& block) {
    return block.first + block.count - 1 > tile.diagonal - vectors_before(job, tile) * W;
}

// Masks the scores of a block on the diagonal and finds their maximum.
void mask_scores(const Tile& tile, const KeyBlock& block, float* s, ptrdiff_t ld, int columns, float* block_max) {
    for (int c = 0; c < columns; ++c) {
        F highest = set1(-__builtin_inff());
        const int64_t lane_of_block = block.first - tile.diagonal - c * W;
        const int keys = visible(tile, block, c);
        float* at = s + c * W;
        for (int k = 0; k < keys; ++k, at += ld) {
            F x = load(at);
            if (!NO_MASK && lane_of_block + k > 0) {
                x = keep_from(x, (int)(lane_of_block + k));
                store(at, x);
            }
            highest = max(x, highest);
        }
        store(block_max + c * W, highest);
    }
}

// The output of a block on the diagonal whose values are not all finite: only visible products, one by one.
template <class Path>
void add_visible_products(const Job& job, const Workspace& w, const Tile& tile, const KeyBlock& block, int ld) {
    typedef typename Path::Element Element;
    const int head_dim = (int)job.problem->head_dim;
    const ptrdiff_t row = job.problem->value_stride[2];
    for (int i = 0; i < tile.rows; ++i) {
        if (visible(tile, block, i / W) == 0) continue;
        const int keys = (int)larger<int64_t>(0, smaller<int64_t>(tile.diagonal + i + 1 - block.first, block.count));
        for (int d = 0; d < head_dim; ++d) {
            float total = 0.0f;
            for (int k = 0; k < keys; ++k) {
                float weight;
                if constexpr (Path::PAIRS) {
                    const BFloat16* pair = (const BFloat16*)(w.pairs + (k / 2) * ld + i);
                    weight = widen(pair[k % 2]);
                } else {
                    weight = w.scores[k * ld + i];
                }
                total += weight * widen(((const Element*)(block.raw_value + k * row))[d]);
            }
            float* out = tile.out + d * ld + i;
            *out = *out * w.rescale[i] + total;
        }
    }
}

#if HAS_AMX
// `attend` on the matrix unit. A block on the diagonal is computed whole, and masked.
template <class Path>
void attend_on_amx(const Job& job, const Workspace& w, const Tile& tile, const KeyBlock& block, int columns, int ld) {
    typedef typename Path::Element Element;
    const int head_dim = (int)job.problem->head_dim;
    const Running running = {tile.maximum, tile.sum, w.rescale};
    amx_score(w, tile.query, block, head_dim, columns, ld);
    if (!is_on_diagonal(job, tile, block)) {
        find_maxima(w.scores, ld, block.count, columns, w.block_max);
        weigh_block<Path>(w, running, block.count, 0, columns, ld, job.scale);
    } else {
        mask_scores(tile, block, w.scores, ld, columns, w.block_max);
        for (int c = 0; c < columns; ++c) {
            const int keys = visible(tile, block, c);
            if (keys > 0)
                weigh_block<Path>(w, running, keys, c, c + 1, ld, job.scale);
            else
                store(w.rescale + c * W, set1(1.0f));
            for (int pair = (keys + 1) / 2; pair < block.count / 2; ++pair)
                store(w.pairs + pair * ld + c * W, set1(0.0f));
        }
        if (has_nonfinite<Element>(block.raw_value, job.problem->value_stride[2], block.count, head_dim)) {
            add_visible_products<Path>(job, w, tile, block, ld);
            return;
        }
    }
    amx_add_outputs(w, tile.out, block, head_dim, columns, ld);
}
#endif

template <class Path>
void attend(const Job& job, const Workspace& w, const Tile& tile, const KeyBlock& block, int columns, int ld) {
#if HAS_AMX
    if constexpr (Path::PAIRS) {
        if (block.on_amx) {
            attend_on_amx<Path>(job, w, tile, block, columns, ld);
            return;
        }
    }
#endif
    typedef typename Path::Product Product;
    typedef typename Path::Element Element;
    const int head_dim = (int)job.problem->head_dim;
    const int depth = Path::PAIRS ? head_dim / 2 : head_dim;
    const Running running = {tile.maximum, tile.sum, w.rescale};
    const int longest = job.problem->seqlen_q <= FEW_ROWS ? MAX_DEPTH_FEW_ROWS
                        : block.count < FEW_KEYS         ? MAX_DEPTH_FEW_KEYS
                                                         : MAX_DEPTH;
    const bool diagonal = is_on_diagonal(job, tile, block);

    if (!diagonal) {
        for (int c = 0; c < columns; ++c) store(w.block_max + c * W, set1(-__builtin_inff()));
        score<Path, WIDE_COLUMNS>(w, tile.query, block, 0, block.count, depth, longest, 0, columns, ld, w.block_max);
        weigh_block<Path>(w, running, block.count, 0, columns, ld, job.scale);
    } else {
        // Rectangles: each further vector of queries sees W more keys.
        for (int c = 0, from = 0; c < columns; ++c) {
            const int to = visible(tile, block, c);
            if (to == from) continue;
            score<Path, WIDE_COLUMNS>(w, tile.query, block, from, to - from, depth, longest, c, columns, ld, nullptr);
            from = to;
        }
        mask_scores(tile, block, w.scores, ld, columns, w.block_max);
        for (int c = 0; c < columns; ++c) {
            const int keys = visible(tile, block, c);
            if (keys > 0) weigh_block<Path>(w, running, keys, c, c + 1, ld, job.scale);
        }
        if (has_nonfinite<Element>(block.raw_value, job.problem->value_stride[2], block.count, head_dim)) {
            add_visible_products<Path>(job, w, tile, block, ld);
            return;
        }
    }

    const float* weights = Path::PAIRS ? w.pairs : w.scores;
    const int step = Path::PAIRS ? 2 : 1;
    const float* rescale = w.rescale;
    // The same rectangles, those of vectors before the tile too: a sum of products ends where a rectangle does.
    for (int c = diagonal ? -vectors_before(job, tile) : 0, from = 0; c < columns && from < block.count; ++c) {
        const int to = diagonal ? up_to_multiple(visible(tile, block, c), step) : up_to_multiple(block.count, step);
        if (to == from) continue;
        multiply<Product, WIDE_COLUMNS>(
            block.value + from / step * block.value_row, 4, block.value_row, head_dim, weights + from / step * ld, ld,
            (to - from) / step, larger(c, 0), columns, OutputEpilogue{tile.out, ld, rescale});
        rescale = nullptr;
        from = to;
    }
}

// The same of wide tiles, with what the next products read on its way to the first-level cache meanwhile. A tile's queries and
// outputs come from the second level for each block. A neighbour on the core takes room in the first, and half of the
// instructions that can wait, so that loads are not early enough by themselves.

// Whether a tile takes attend_wide: a whole one whose scores are one sum in registers each.
bool attends_wide(const Job& job, const Tile& tile, const KeyBlock& block, int columns) {
    if constexpr (WIDE_COLUMNS > MAX_COLUMNS)
        return job.wide && columns == WIDE_COLUMNS && job.tile_queries == WIDE_TILE_QUERIES &&
               job.problem->head_dim <= MAX_DEPTH && block.count >= FEW_KEYS && !is_on_diagonal(job, tile, block);
    return false;
}

// An epilogue that asks for `row_bytes` from `at` on for each row of the product.
template <class Epilogue>
struct FetchingEpilogue {
    Epilogue epilogue;
    const char* at;
    ptrdiff_t row_bytes;
    template <int R, int C>
    __attribute__((always_inline)) void store(int row, int column, F acc[R][C]) const {
        epilogue.template store<R, C>(row, column, acc);
        for (ptrdiff_t i = 0; i < R * row_bytes; i += CACHE_LINE) fetch_line(at + row * row_bytes + i);
    }
};

// Rows of the next block of keys and of their values are asked for, into the second-level cache: the `part`th of `parts`.
void fetch_rows(const char* first, ptrdiff_t stride, int64_t row_bytes, int part, int parts) {
    for (int r = BLOCK_KEYS * part / parts; r < BLOCK_KEYS * (part + 1) / parts; ++r)
        for (int64_t i = 0; i < row_bytes; i += CACHE_LINE) fetch_line_for_later(first + r * stride + i);
}

// `next` is the tile whose turn comes then.
template <class Path>
void attend_wide(const Job& job, const Workspace& w, const Tile& tile, const KeyBlock& block, const Tile& next) {
    typedef typename Path::Product Product;
    constexpr ptrdiff_t ld = WIDE_TILE_QUERIES;
    constexpr ptrdiff_t ROW_BYTES = ld * sizeof(float);
    const int head_dim = (int)job.problem->head_dim;
    for (int c = 0; c < WIDE_COLUMNS; ++c) store(w.block_max + c * W, set1(-__builtin_inff()));
    const ScoreAndMaximumEpilogue scores = {{w.scores, ld, true}, w.block_max};
    column_panel<Product, WIDE_COLUMNS>(
        block.key, block.key_row, 4, block.count, tile.query, ld, head_dim, 0,
        FetchingEpilogue<ScoreAndMaximumEpilogue>{scores, (const char*)tile.out, head_dim * ROW_BYTES / BLOCK_KEYS});
    weigh_block<Path>(
        w, {tile.maximum, tile.sum, w.rescale}, block.count, 0, WIDE_COLUMNS, ld, job.scale);
    const OutputEpilogue output = {tile.out, ld, w.rescale};
    column_panel<Product, WIDE_COLUMNS>(
        block.value, 4, block.value_row, head_dim, w.scores, ld, block.count, 0,
        FetchingEpilogue<OutputEpilogue>{output, (const char*)next.query, ROW_BYTES});
}

// Where a tile's rows begin.
INLINE void find_rows(const Job& job, Tile& tile, const char* query, char* out) {
    const AttentionProblem& p = *job.problem;
    for (int i = 0; i < tile.rows; ++i) {
        const int64_t row = tile.first_row + i;
        const int64_t head = job.fold > 1 ? row / p.seqlen_q : 0;
        const int64_t position = row - head * p.seqlen_q;
        tile.query_row[i] = query + head * p.query_stride[1] + position * p.query_stride[2];
        tile.out_row[i] = out + head * p.out_stride[1] + position * p.out_stride[2];
    }
}

template <class Path>
void start_tile(const Job& job, Tile& tile, const char* query, char* out, int columns, int ld) {
    const AttentionProblem& p = *job.problem;
    const int head_dim = (int)p.head_dim;
    find_rows(job, tile, query, out);
    const int64_t offset = p.seqlen_k - p.seqlen_q;
    tile.diagonal = job.causal ? tile.first_row + offset : NO_DIAGONAL;
    tile.keys = larger<int64_t>(0, smaller<int64_t>(p.seqlen_k, tile.diagonal + tile.rows));
    memset(tile.out, 0, sizeof(float) * head_dim * ld);
    for (int i = 0; i < ld; ++i) {
        tile.maximum[i] = -__builtin_inff();
        tile.sum[i] = 0.0f;
    }
    if constexpr (Path::PAIRS) {
#if HAS_BF16
        load_query_pairs(tile.query_row, tile.rows, head_dim, job.query_factor, tile.query, ld, columns);
#endif
    } else {
        load_queries<typename Path::Element>(
            tile.query_row, tile.rows, head_dim, job.query_factor, tile.query, ld, columns);
    }
}

template <class Path>
void finish_tile(const Job& job, const Workspace& w, const Tile& tile, float* lse, int columns, int ld) {
    typedef typename Path::Element Element;
    float* const divisor = w.rescale;
    // The division's rounding is below that of a 16-bit result by a product too.
    constexpr bool DIVIDE = sizeof(Element) == sizeof(float);
    for (int c = 0; c < columns; ++c)
        store(divisor + c * W, DIVIDE ? load(tile.sum + c * W) : div(set1(1.0f), load(tile.sum + c * W)));
    // Rows before the diagonal reaches the first key see none.
    const int64_t empty = job.problem->seqlen_k == 0 ? tile.rows : -tile.diagonal;
    for (int i = 0; i < tile.rows && i < empty; ++i) divisor[i] = DIVIDE ? 1.0f : 0.0f;
    store_outputs<Element, DIVIDE>(
        tile.out, ld, divisor, tile.out_row, tile.rows, (int)job.problem->head_dim, columns);
    if (lse == nullptr) return;
    const double to_natural = (double)job.scale / LOG2_E;
    for (int i = 0; i < tile.rows; ++i) {
        const bool has_keys = i >= empty;
        lse[tile.first_row + i] =
            has_keys ? (float)(tile.maximum[i] * to_natural + log((double)tile.sum[i])) : -__builtin_inff();
    }
}

}  // namespace

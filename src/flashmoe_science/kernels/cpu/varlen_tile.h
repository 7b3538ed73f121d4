// One tile of query rows of a sequence against one block of its keys.
//
// As tile.h, with masks that are a first and a last key for each row, value rows of their own length, caps, slopes and sinks.
// A row's bits do not depend on the rows that share its tile: blocks begin at multiples of BLOCK_KEYS, keys that it does not
// see have weights that are exactly zero, and each row has a lane of its own.
#pragma once

#include <math.h>

#include "amx_tile.h"
#include "products.h"
#include "tanh.h"
#include "varlen_problem.h"

namespace {

// Of rows in lanes: unnormalised output, maximum, sum of weights. [value_dim][ld], [ld], [ld].
struct Sums {
    float *out, *maximum, *sum;
};

struct VarlenTile {
    int rows;
    float* query;                          // [head_dim][ld]
    Sums sums;
    Sums total;                            // of earlier parts, where they are summed one after another
    Span keys;                             // that any of its rows sees
    Span common;                           // that all of them see
    Span seen[TILE_QUERIES];               // from the first to the last; in between what its tree does not hide
    Tree tree[TILE_QUERIES];
    int64_t position[TILE_QUERIES];
    float slope[TILE_QUERIES];             // in units of scores
    float sink[TILE_QUERIES];              // natural; minus infinity: none
    const char* query_row[TILE_QUERIES];
    char* out_row[TILE_QUERIES];
    float* lse[TILE_QUERIES];
};

struct VarlenWorkspace : Shared {
    VarlenTile tile[MAX_TASK_TILES];
    Sums own[2 * MAX_TASK_TILES];          // this thread's, two for each tile
    char *gathered_key, *gathered_value;   // rows of a block that do not lie at one stride
};

// Nothing summed yet.
void clear(const Sums& sums, int64_t value_dim, int ld) {
    memset(sums.out, 0, sizeof(float) * value_dim * ld);
    for (int i = 0; i < ld; ++i) {
        sums.maximum[i] = -__builtin_inff();
        sums.sum[i] = 0.0f;
    }
}

void swap_sums(VarlenTile& tile) {
    const Sums sums = tile.sums;
    tile.sums = tile.total;
    tile.total = sums;
}

// Rows [first_row, first_row + tile.rows) of the heads that share a row space: heads one after another.
void describe_tile(const VarlenJob& job, const Sequence& sequence, int64_t head, int64_t first_row, VarlenTile& tile) {
    const VarlenProblem& p = *job.problem;
    const VarlenCall& call = *job.call;
    tile.keys = {INT64_MAX, 0};
    tile.common = {0, INT64_MAX};
    for (int i = 0; i < TILE_QUERIES; ++i) {
        tile.seen[i] = {0, 0};
        tile.tree[i] = NO_TREE;
        tile.position[i] = 0;
        tile.slope[i] = 0.0f;
    }
    for (int i = 0; i < tile.rows; ++i) {
        const int64_t row = first_row + i;
        const int64_t of_head = head + row / sequence.rows;
        const int64_t of_sequence = row % sequence.rows;
        const int64_t token = sequence.first_row + of_sequence;
        tile.query_row[i] = call.query + token * p.query_stride[0] + of_head * p.query_stride[1];
        tile.out_row[i] = call.out + token * p.out_stride[0] + of_head * p.out_stride[1];
        tile.lse[i] = call.lse ? call.lse + token * p.heads + of_head : nullptr;
        tile.sink[i] = call.sinks ? call.sinks[of_head] : -__builtin_inff();
        tile.position[i] = of_sequence + sequence.keys - sequence.rows;
        if (call.alibi_slopes)
            tile.slope[i] = call.alibi_slopes[sequence.index * call.alibi_row + of_head] * job.bias_factor;
        tile.seen[i] = visible_to(p, sequence, of_sequence);
        tile.tree[i] = tree_of(call, sequence, of_sequence, tile.seen[i]);
        const Span seen = tile.seen[i];
        tile.common = {
            larger(tile.common.first, seen.first), smaller(smaller(tile.common.last, seen.last), tile.tree[i].first)};
        if (seen.last > 0) tile.keys = {smaller(tile.keys.first, seen.first), larger(tile.keys.last, seen.last)};
    }
    if (tile.keys.last == 0) tile.keys = {0, 0};
}

// The queries of its rows, in lanes.
template <class Path>
void load_tile(const VarlenProblem& p, const VarlenTile& tile, int ld) {
    const int columns = up_to_multiple(tile.rows, W) / W;
    if constexpr (Path::PAIRS) {
#if HAS_BF16
        load_query_pairs(tile.query_row, tile.rows, (int)p.head_dim, 1.0f, tile.query, ld, columns);
#endif
    } else {
        load_queries<typename Path::Element>(
            tile.query_row, tile.rows, (int)p.head_dim, 1.0f, tile.query, ld, columns);
    }
}

// Products become scores, hidden ones minus infinity; their maxima.
template <bool CAP, bool BIAS, bool MASK>
void finish_scores(
    const VarlenJob& job, const VarlenTile& tile, const KeyBlock& block, float* s, int columns, int ld,
    float* block_max) {
    for (int c = 0; c < columns; ++c) {
        float low[W], high[W], position[W], of_tree[W];
        int64_t tree = INT64_MAX;
        for (int i = 0; i < W; ++i) {
            // Within the block: exact in fp32.
            const Span seen = tile.seen[c * W + i];
            const int64_t most = block.count;
            low[i] = (float)larger<int64_t>(0, smaller(most, seen.first - block.first));
            high[i] = (float)larger<int64_t>(0, smaller(most, seen.last - block.first));
            position[i] = (float)(tile.position[c * W + i] - block.first);
            tree = smaller(tree, tile.tree[c * W + i].first);
        }
        const F first = load(low), last = load(high), at = load(position), slope = load(tile.slope + c * W);
        F highest = set1(-__builtin_inff());
        float* row = s + c * W;
        for (int k = 0; k < block.count; ++k, row += ld) {
            F x = load(row);
            if constexpr (CAP) x = tanh_of(mul(x, set1(job.cap_factor)));
            if constexpr (BIAS) {
                const F ahead = sub(at, set1((float)k));
                x = sub(x, mul(slope, max(ahead, sub(set1(0.0f), ahead))));
            }
            if constexpr (MASK) {
                const F key = set1((float)k), next = set1((float)(k + 1));
                x = select_equal(max(key, first), key, x, set1(-__builtin_inff()));
                x = select_equal(max(next, last), last, x, set1(-__builtin_inff()));
                if (block.first + k >= tree) {
                    for (int i = 0; i < W; ++i) of_tree[i] = tile.tree[c * W + i].hides(block.first + k) ? 0.0f : 1.0f;
                    x = select_equal(load(of_tree), set1(1.0f), x, set1(-__builtin_inff()));
                }
            }
            store(row, x);
            highest = max(x, highest);
        }
        store(block_max + c * W, highest);
    }
}

template <bool CAP>
void finish_scores(
    const VarlenJob& job, const VarlenTile& tile, const KeyBlock& block, bool mask, float* s, int columns, int ld,
    float* block_max) {
    const bool bias = job.call->alibi_slopes != nullptr;
    if (bias && mask) return finish_scores<CAP, true, true>(job, tile, block, s, columns, ld, block_max);
    if (bias) return finish_scores<CAP, true, false>(job, tile, block, s, columns, ld, block_max);
    if (mask) return finish_scores<CAP, false, true>(job, tile, block, s, columns, ld, block_max);
    return finish_scores<CAP, false, false>(job, tile, block, s, columns, ld, block_max);
}

// The output of a block with hidden keys whose values are not all finite: only visible products, one by one.
template <class Path>
void add_seen_products(
    const VarlenJob& job, const Shared& w, const VarlenTile& tile, const KeyBlock& block, ptrdiff_t value_row, int ld) {
    typedef typename Path::Element Element;
    for (int i = 0; i < tile.rows; ++i) {
        const int first = (int)larger<int64_t>(0, tile.seen[i].first - block.first);
        const int last = (int)smaller<int64_t>(block.count, tile.seen[i].last - block.first);
        for (int d = 0; d < job.problem->value_dim; ++d) {
            float total = 0.0f;
            for (int k = first; k < last; ++k) {
                if (tile.tree[i].hides(block.first + k)) continue;
                float weight;
                if constexpr (Path::PAIRS) {
                    const BFloat16* pair = (const BFloat16*)(w.pairs + (k / 2) * ld + i);
                    weight = widen(pair[k % 2]);
                } else {
                    weight = w.scores[k * ld + i];
                }
                total += weight * widen(((const Element*)(block.raw_value + k * value_row))[d]);
            }
            float* out = tile.sums.out + d * ld + i;
            *out = *out * w.rescale[i] + total;
        }
    }
}

// `raw_row`: bytes between the rows of block.raw_value. `longest`: as score() takes it.
template <class Path>
void attend(
    const VarlenJob& job, const Shared& w, const VarlenTile& tile, const KeyBlock& block, ptrdiff_t raw_row, int longest,
    int ld) {
    typedef typename Path::Product Product;
    typedef typename Path::Element Element;
    const VarlenProblem& p = *job.problem;
    const int depth = (int)(Path::PAIRS ? p.head_dim / 2 : p.head_dim);
    const int columns = up_to_multiple(tile.rows, W) / W;
    const Running running = {tile.sums.maximum, tile.sums.sum, w.rescale};
    const bool mask = block.first < tile.common.first || block.first + block.count > tile.common.last;
    const bool plain = !mask && job.cap_factor == 0.0f && !job.call->alibi_slopes;
#if HAS_AMX
    if (block.on_amx)
        amx_score(w, tile.query, block, (int)p.head_dim, columns, ld);
    else
#endif
    {
        for (int c = 0; c < columns; ++c) store(w.block_max + c * W, set1(-__builtin_inff()));
        score<Path>(w, tile.query, block, 0, block.count, depth, longest, 0, columns, ld, plain ? w.block_max : nullptr);
    }
    if (!plain) {
        if (job.cap_factor != 0.0f)
            finish_scores<true>(job, tile, block, mask, w.scores, columns, ld, w.block_max);
        else
            finish_scores<false>(job, tile, block, mask, w.scores, columns, ld, w.block_max);
    }
#if HAS_AMX
    else if (block.on_amx)
        find_maxima(w.scores, ld, block.count, columns, w.block_max);
#endif
    weigh_block<Path>(w, running, block.count, 0, columns, ld, job.scale);
    if (mask && has_nonfinite<Element>(block.raw_value, raw_row, block.count, (int)p.value_dim)) {
        add_seen_products<Path>(job, w, tile, block, raw_row, ld);
        return;
    }
#if HAS_AMX
    if (block.on_amx) return amx_add_outputs(w, tile.sums.out, block, (int)p.value_dim, columns, ld);
#endif
    const int step = Path::PAIRS ? 2 : 1;
    multiply<Product>(
        block.value, 4, block.value_row, (int)p.value_dim, Path::PAIRS ? w.pairs : w.scores, ld,
        (block.count + step - 1) / step, 0, columns, OutputEpilogue{tile.sums.out, ld, w.rescale});
}

// The sums of a later part of the keys added to those of the parts before it.
void add_part(const VarlenJob& job, const Sums& total, const Sums& part, int ld) {
    const int value_dim = (int)job.problem->value_dim;
    for (int at = 0; at < ld; at += W) {
        const F before = load(total.maximum + at), here = load(part.maximum + at);
        const F highest = max(here, before);
        // As in raise_maxima: where there is nothing but minus infinity weights are 0.
        const F base = select_equal(highest, set1(-__builtin_inff()), set1(0.0f), highest);
        const F t[2] = {mul(sub(before, base), set1(job.scale)), mul(sub(here, base), set1(job.scale))};
        F factor[2];
        exp2_to_zero<6, 2>(t, factor);
        factor[0] = select_equal(before, highest, set1(1.0f), factor[0]);
        factor[1] = select_equal(here, highest, set1(1.0f), factor[1]);
        const auto add_to = [&](float* to, const float* x) __attribute__((always_inline)) {
            store(to, madd(load(x), factor[1], mul(load(to), factor[0])));
        };
        add_to(total.sum + at, part.sum + at);
        for (int d = 0; d < value_dim; ++d) add_to(total.out + d * ld + at, part.out + d * ld + at);
        store(total.maximum + at, highest);
    }
}

// The division's rounding is below that of a 16-bit result by a product too.
template <class T>
constexpr bool DIVIDES = sizeof(T) == sizeof(float);

// Writes the log-sum-exp of row i, and returns what its output is to be divided by, or multiplied with.
template <class T>
float finish_row(const VarlenJob& job, const VarlenTile& tile, int i, float highest, float total) {
    const bool has_keys = tile.seen[i].last > 0;
    const double maximum = highest * ((double)job.scale / LOG2_E);
    if (tile.lse[i]) *tile.lse[i] = has_keys ? (float)(maximum + log((double)total)) : -__builtin_inff();
    double sum = total;
    // Where every score is minus infinity, weights are zero, and the sink alone counts.
    if (tile.sink[i] != -__builtin_inff()) sum += exp(tile.sink[i] - (maximum > -INFINITY ? maximum : 0.0));
    if (!has_keys) return DIVIDES<T> ? 1.0f : 0.0f;
    return (float)(DIVIDES<T> ? sum : 1.0 / sum);
}

template <class Path>
void finish_tile(const VarlenJob& job, const Shared& w, const VarlenTile& tile, int ld) {
    typedef typename Path::Element Element;
    float* const divisor = w.rescale;
    for (int i = 0; i < ld; ++i) divisor[i] = 1.0f;
    for (int i = 0; i < tile.rows; ++i)
        divisor[i] = finish_row<Element>(job, tile, i, tile.sums.maximum[i], tile.sums.sum[i]);
    store_outputs<Element, DIVIDES<Element>>(
        tile.sums.out, ld, divisor, tile.out_row, tile.rows, (int)job.problem->value_dim, up_to_multiple(tile.rows, W) / W);
}

}  // namespace

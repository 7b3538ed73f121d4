// One tile of queries against one block of keys: five products and what lies between them.
#pragma once

#include "backward_amx.h"
#include "backward_weights.h"
#include "paths.h"

namespace {

// In place if the rows are contiguous float32 and whole vectors, else a copy. Rows far apart would share a few sets of the
// first-level cache.
template <class T>
const float* float_rows(const char* from, ptrdiff_t stride, int rows, int head_dim, float* copy) {
    if constexpr (sizeof(T) == sizeof(float))
        if (stride == head_dim * (ptrdiff_t)sizeof(float) && head_dim % W == 0) return (const float*)from;
    widen_rows<T>(from, stride, rows, head_dim, copy);
    return copy;
}

// How the operands come to the products for each element type; Path is one of these throughout.
// This: fp32, and 16-bit elements through fp32.
template <class T>
struct FloatBackwardPath {
    typedef NoSession Session;
    typedef T Element;
    typedef FloatProduct Product;
    static constexpr bool PAIRS = false;
    static constexpr int STEP = 1;  // numbers of the depth in one step of a product

    static void prepare_block(const BackwardJob& job, const BackwardWorkspace& w, BackwardBlock& block) {
        const int d = (int)job.problem->head_dim;
        block.key_rows = float_rows<T>(block.key, block.key_row, block.count, d, w.key);
        block.key = (const char*)block.key_rows;
        block.key_row = d * 4;
        block.key_step = d;
        if (!job.needs_score_gradients) return;
        block.value = (const char*)float_rows<T>(block.value, block.value_row, block.count, d, w.value);
        block.value_row = d * 4;
    }

    static void load_columns(const char* const* row, int rows, int head_dim, float* to, ptrdiff_t ld, int columns) {
        load_queries<T>(row, rows, head_dim, 1.0f, to, ld, columns);
    }

    static const float* load_rows(const char* from, ptrdiff_t stride, int rows, int head_dim, float* copy) {
        return float_rows<T>(from, stride, rows, head_dim, copy);
    }
};

#if HAS_BF16
struct PairBackwardPath {
    typedef AmxSession Session;
    typedef BFloat16 Element;
    typedef PairProduct Product;
    static constexpr bool PAIRS = true;
    static constexpr int STEP = 2;

    static void prepare_block(const BackwardJob& job, const BackwardWorkspace& w, BackwardBlock& block) {
        if (job.on_amx) return prepare_on_amx(job, w, block);
        const int d = (int)job.problem->head_dim;
        block.key_step = d;
        block.key_rows = w.key;
        if (job.grad_query) interleave_rows(block.key, block.key_row, block.count, d, w.key);
    }

    static void load_columns(const char* const* row, int rows, int head_dim, float* to, ptrdiff_t ld, int columns) {
        load_query_pairs(row, rows, head_dim, 1.0f, to, ld, columns);
    }

    static const float* load_rows(const char* from, ptrdiff_t stride, int rows, int head_dim, float* copy) {
        interleave_rows(from, stride, rows, head_dim, copy);
        return copy;
    }
};
typedef PairBackwardPath BFloat16BackwardPath;
#else
typedef FloatBackwardPath<BFloat16> BFloat16BackwardPath;
#endif

// to[key][query] = rows of the block's keys (or values) times columns of the tile, `longest` steps of the depth at a time.
template <class Path>
void multiply_columns(
    const char* rows, ptrdiff_t row, int count, const float* columns, int head_dim, int longest, float* to, ptrdiff_t ld,
    int first, int last) {
    const int depth = head_dim / Path::STEP;
    for (int at = 0; at < depth; at += longest) {
        const int part = smaller(depth - at, longest);
        multiply<typename Path::Product>(
            rows + at * 4, row, 4, count, columns + at * ld, ld, part, first, last, SumEpilogue{to, ld, at == 0});
    }
}

template <class Path, int G, bool MASKED>
void weigh_columns(
    const BackwardWorkspace& w, const WeightInputs& inputs, ptrdiff_t ld, int keys, int column, int lane) {
    if constexpr (Path::PAIRS) {
#if HAS_BF16
        const PairOutputs to = {(BFloat16*)w.weight_pairs, (BFloat16*)w.gradient_pairs, w.gradient_key_pairs};
        weigh_to_pairs<G, MASKED>(inputs, to, w.scores, w.gradients, ld, keys, column, lane);
#endif
    } else {
        weigh_floats<G, MASKED>(inputs, w.scores, w.gradients, ld, keys, column, lane);
    }
}

// rowsum(out * grad_out) of W rows of the tile from row i on.
template <class T>
F output_delta(const AttentionBackwardProblem& p, const QueryTile& tile, int i) {
    F total[W];
    for (int r = 0; r < W; ++r) {
        total[r] = set1(0.0f);
        if (i + r >= tile.rows) continue;
        const T* const x = (const T*)(tile.out + (i + r) * p.out_stride[2]);
        const T* const y = (const T*)(tile.grad_out + (i + r) * p.grad_out_stride[2]);
        for (int d = 0; d < p.head_dim; d += W) {
            const int count = (int)p.head_dim - d;
            total[r] = madd(load_first(x + d, count), load_first(y + d, count), total[r]);
        }
    }
    return sum_lanes(total);
}

// The deltas of a column of queries that see no key beyond the first block, which this is: sum(P * dP) / sum(P), so that with
// the very weights that they are multiplied by a row's gradients sum to zero. Rows whose weights do not add up to one have
// others elsewhere, a sink's or those of other keys, which the output has in it.
template <class Path>
void add_lone_delta(
    const BackwardJob& job, const WeightInputs& inputs, const BackwardWorkspace& w, const QueryTile& tile,
    const BackwardBlock& block, int column, ptrdiff_t ld) {
    constexpr int DEGREE = Path::PAIRS ? 3 : 6;
    // Of a sum from one: what exponents of this degree and a rounded log-sum-exp leave. More is somebody else's share, and a
    // sum that lacks it makes a delta that is off in all columns alike, where an output is off at random.
    constexpr float MOST_APART = Path::PAIRS ? 1.0f / 2048 : 1.0f / 65536;
    const int keys = visible_keys(tile, block, smaller((column + 1) * W, tile.rows));
    const int lane = (int)(-tile.diagonal - column * W);
    if (keys == 0) return;
    const WeightSums sums =
        tile.diagonal == NO_DIAGONAL
            ? sum_weights<DEGREE, false>(inputs, w.scores, w.gradients, ld, keys, column, 0)
            : sum_weights<DEGREE, true>(inputs, w.scores, w.gradients, ld, keys, column, lane);
    float weights[W], delta[W];
    store(weights, sums.weights);
    store(delta, div(sums.weighted, sums.weights));
    bool own = true;
    for (int i = 0; i < W && column * W + i < tile.rows; ++i) own &= __builtin_fabsf(weights[i] - 1.0f) <= MOST_APART;
    if (!own) {
        float of_output[W];
        store(of_output, output_delta<typename Path::Element>(*job.problem, tile, column * W));
        for (int i = 0; i < W; ++i)
            if (!(__builtin_fabsf(weights[i] - 1.0f) <= MOST_APART)) delta[i] = of_output[i];
    }
    store(tile.delta + column * W, add(load(tile.delta + column * W), load(delta)));
}

// Weights and gradients of key k and query i as the products see them.
template <class Path>
float number_at(const float* floats, const float* pairs, ptrdiff_t ld, int k, int i) {
    if constexpr (Path::PAIRS) return widen(((const BFloat16*)pairs)[k * ld + i]);
    else return floats[k * ld + i];
}

// to[d * step] += sum over i in [from, end) of weight(i) * row i. One by one: for operands that are not finite, of which a masked
// one must not be multiplied, not even by zero.
template <class T, class Weight>
void add_rows(
    float* to, ptrdiff_t step, const char* rows, ptrdiff_t stride, int from, int end, int head_dim, const Weight& weight) {
    float total[256] = {};
    for (int i = from; i < end; ++i) {
        const float x = weight(i);
        const T* const row = (const T*)(rows + i * stride);
        for (int d = 0; d < head_dim; ++d) total[d] += x * widen(row[d]);
    }
    for (int d = 0; d < head_dim; ++d) to[d * step] += total[d];
}

// The three sums of a block on the diagonal where some operand is not finite: only what is visible.
template <class Path>
void add_visible_products(
    const BackwardJob& job, const BackwardWorkspace& w, const QueryTile& tile, const BackwardBlock& block, ptrdiff_t ld) {
    typedef typename Path::Element Element;
    const AttentionBackwardProblem& p = *job.problem;
    const int head_dim = (int)p.head_dim;
    const int keys = visible_keys(tile, block, tile.rows);
    for (int k = 0; k < keys; ++k) {
        const int from = (int)larger<int64_t>(0, block.first + k - tile.diagonal);
        const auto weight = [&](int i) { return number_at<Path>(w.scores, w.weight_pairs, ld, k, i); };
        const auto gradient = [&](int i) { return number_at<Path>(w.gradients, w.gradient_pairs, ld, k, i); };
        if (block.grad_value)
            add_rows<Element>(
                block.grad_value + k * job.row, 1, tile.grad_out, p.grad_out_stride[2], from, tile.rows, head_dim, weight);
        if (block.grad_key)
            add_rows<Element>(
                block.grad_key + k * job.row, 1, tile.query, p.query_stride[2], from, tile.rows, head_dim, gradient);
    }
    if (!job.grad_query) return;
    for (int i = 0; i < tile.rows; ++i) {
        const auto gradient = [&](int k) { return number_at<Path>(w.gradients, w.gradient_pairs, ld, k, i); };
        add_rows<Element>(
            tile.grad_query + i * (job.on_amx ? 1 : job.row), job.on_amx ? ld : 1, block.raw_key, block.raw_key_row, 0,
            visible_keys(tile, block, i + 1), head_dim, gradient);
    }
}

// Scores, weights and their gradients. In a block on the diagonal each column of queries stops after the last key that one
// of its lanes sees.
template <class Path>
void weigh_tile(
    const BackwardJob& job, const BackwardWorkspace& w, const QueryTile& tile, const BackwardBlock& block, bool diagonal,
    int columns, ptrdiff_t ld) {
    const int head_dim = (int)job.problem->head_dim;
    const int longest = block.count < FEW_KEYS ? MAX_DEPTH_FEW_KEYS : MAX_DEPTH;
    if (job.on_amx) score_on_amx(job, w, tile, block, columns, ld);
    for (int c = 0, from = 0; !job.on_amx && c < columns; ++c) {
        const int to = visible_keys(tile, block, smaller((c + 1) * W, tile.rows));
        if (to == from) continue;
        multiply_columns<Path>(
            block.key + from * block.key_row, block.key_row, to - from, tile.query_columns, head_dim, longest,
            w.scores + from * ld, ld, c, columns);
        if (job.needs_score_gradients)
            multiply_columns<Path>(
                block.value + from * block.value_row, block.value_row, to - from, tile.grad_columns, head_dim,
                longest, w.gradients + from * ld, ld, c, columns);
        from = to;
    }
    const WeightInputs inputs = {tile.lse, tile.delta, job.scale, job.needs_score_gradients};
    if (block.first == 0 && job.needs_score_gradients)
        for (int alone = 0; alone < smaller(tile.lone_columns, columns); ++alone)
            add_lone_delta<Path>(job, inputs, w, tile, block, alone, ld);
    int c = 0;
    if (diagonal) {
        for (; c < columns; ++c) {
            const int keys = visible_keys(tile, block, smaller((c + 1) * W, tile.rows));
            if (keys > 0)
                weigh_columns<Path, 1, true>(w, inputs, ld, keys, c, (int)(block.first - tile.diagonal - c * W));
        }
    } else {
        for (; c + 2 <= columns; c += 2) weigh_columns<Path, 2, false>(w, inputs, ld, block.count, c, 0);
        if (c < columns) weigh_columns<Path, 1, false>(w, inputs, ld, block.count, c, 0);
    }
    if (job.on_amx) return clear_padding(job, w, tile, block, columns, ld);
    if constexpr (Path::PAIRS) {
        // An odd last row's pair is a lane of no row, where a key that is not finite leaves NaN.
        if (tile.rows % 2 == 1)
            for (int k = 0; k < block.count; ++k)
                ((BFloat16*)w.weight_pairs)[k * ld + tile.rows] = ((BFloat16*)w.gradient_pairs)[k * ld + tile.rows] = {0};
    }
}

// What the tile and the block add to the gradients.
template <class Path>
void add_products(
    const BackwardJob& job, const BackwardWorkspace& w, const QueryTile& tile, const BackwardBlock& block, int columns,
    ptrdiff_t ld) {
    if (job.on_amx) return add_products_on_amx(job, w, tile, block, columns, ld);
    typedef typename Path::Product Product;
    constexpr int STEP = Path::STEP;
    const int lanes = job.row / W;
    const char* const weights = (const char*)(Path::PAIRS ? w.weight_pairs : w.scores);
    const char* const gradients = (const char*)(Path::PAIRS ? w.gradient_pairs : w.gradients);
    const float* const gradients_of_keys = Path::PAIRS ? w.gradient_key_pairs : w.gradients;
    const ptrdiff_t key_bytes = ld * 4 / STEP;
    for (int c = 0, from = 0; c < columns; ++c) {
        // Keys that this column of queries is the first to see.
        const int to = visible_keys(tile, block, smaller((c + 1) * W, tile.rows));
        if (to == from) continue;
        const int first = c * W / STEP;
        const ptrdiff_t at = from * key_bytes + first * 4;
        const int depth = (tile.rows - c * W + STEP - 1) / STEP;
        if (block.grad_value)
            multiply<Product>(
                weights + at, key_bytes, 4, to - from, tile.grad_rows + first * tile.grad_step, tile.grad_step, depth, 0,
                lanes, SumEpilogue{block.grad_value + from * job.row, job.row, false});
        if (block.grad_key)
            multiply<Product>(
                gradients + at, key_bytes, 4, to - from, tile.query_rows + first * tile.query_step, tile.query_step, depth,
                0, lanes, SumEpilogue{block.grad_key + from * job.row, job.row, false});
        from = to;
    }
    if (!job.grad_query) return;
    for (int row = 0; row < tile.rows;) {
        // Columns that see the same keys go together.
        int end = smaller(row + W, tile.rows);
        const int keys = visible_keys(tile, block, end);
        while (end < tile.rows && visible_keys(tile, block, smaller(end + W, tile.rows)) == keys)
            end = smaller(end + W, tile.rows);
        if (keys > 0)
            multiply<Product>(
                (const char*)(gradients_of_keys + row), 4, ld * 4, end - row, block.key_rows, block.key_step,
                (keys + STEP - 1) / STEP, 0, lanes, SumEpilogue{tile.grad_query + row * job.row, job.row, false});
        row = end;
    }
}

// lse, and delta = rowsum(out * grad_out) - grad_lse, of the tile's rows; zeros past the last. Of lone columns the first part
// is added when their weights are known (add_lone_delta): an output that was rounded to 16 bits makes a delta that is off, and
// of few keys' gradients, which nearly cancel, that may be more than every other error.
template <class T>
void prepare_rows(const BackwardJob& job, QueryTile& tile, const float* lse, const char* grad_lse, int ld) {
    const AttentionBackwardProblem& p = *job.problem;
    for (int i = 0; i < ld; ++i)
        tile.lse[i] = i < tile.rows ? lse[tile.first_row + i] : 0.0f;
    if (!job.needs_score_gradients) return;
    for (int i = 0; i < ld; i += W)
        store(tile.delta + i, i / W < tile.lone_columns ? set1(0.0f) : output_delta<T>(p, tile, i));
    if (grad_lse == nullptr) return;
    for (int i = 0; i < tile.rows; ++i)
        tile.delta[i] -= *(const float*)(grad_lse + (tile.first_row + i) * p.grad_lse_stride[2]);
}

template <class Path>
void start_tile(
    const BackwardJob& job, QueryTile& tile, const char* out, const float* lse, const char* grad_lse, int columns, int ld) {
    typedef typename Path::Element Element;
    const AttentionBackwardProblem& p = *job.problem;
    const int head_dim = (int)p.head_dim;
    tile.diagonal = job.causal ? tile.first_row + p.seqlen_k - p.seqlen_q : NO_DIAGONAL;
    tile.keys = larger<int64_t>(0, smaller<int64_t>(p.seqlen_k, tile.diagonal + tile.rows));
    const int64_t alone = tile.keys <= BLOCK_KEYS ? ld : smaller<int64_t>(larger<int64_t>(BLOCK_KEYS - tile.diagonal, 0), ld);
    tile.lone_columns = sizeof(Element) == 2 ? (int)(alone / W) : 0;
    tile.out = out + tile.first_row * p.out_stride[2];
    if (job.grad_query) memset(tile.grad_query, 0, sizeof(float) * ld * job.row);
    if (tile.keys == 0) return;
    const char* row[GRADIENT_TILE_QUERIES];
    for (int i = 0; i < tile.rows; ++i) row[i] = tile.query + i * p.query_stride[2];
    Path::load_columns(row, tile.rows, head_dim, tile.query_columns, ld, columns);
    if (job.needs_score_gradients) {
        for (int i = 0; i < tile.rows; ++i) row[i] = tile.grad_out + i * p.grad_out_stride[2];
        Path::load_columns(row, tile.rows, head_dim, tile.grad_columns, ld, columns);
    }
    tile.query_step = tile.grad_step = head_dim;
    if (job.grad_key)
        tile.query_rows = Path::load_rows(tile.query, p.query_stride[2], tile.rows, head_dim, tile.query_copy);
    if (job.grad_value)
        tile.grad_rows = Path::load_rows(tile.grad_out, p.grad_out_stride[2], tile.rows, head_dim, tile.grad_copy);
    if (job.on_amx) pad_rows(job, tile);
    prepare_rows<Element>(job, tile, lse, grad_lse, ld);
    tile.nonfinite = job.causal && (has_nonfinite<Element>(tile.query, p.query_stride[2], tile.rows, head_dim) ||
                                    has_nonfinite<Element>(tile.grad_out, p.grad_out_stride[2], tile.rows, head_dim));
}

// Rows of sums to the tensor, each number times `scale`.
template <class T>
void store_sums(const float* from, int row, char* to, ptrdiff_t stride, int rows, int head_dim, float scale) {
    for (int r = 0; r < rows; ++r, from += row, to += stride)
        for (int d = 0; d < head_dim; d += W)
            store_first((T*)to + d, mul(load(from + d), set1(scale)), head_dim - d < W ? head_dim - d : W);
}

// The same from the sums' transpose.
template <class T>
void store_columns(const float* from, ptrdiff_t ld, char* to, ptrdiff_t stride, int rows, int head_dim, float scale) {
    float by[GRADIENT_TILE_QUERIES];
    char* row[GRADIENT_TILE_QUERIES];
    for (int i = 0; i < GRADIENT_TILE_QUERIES; ++i) {
        by[i] = scale;
        row[i] = to + i * stride;
    }
    store_outputs<T, false>(from, ld, by, row, rows, head_dim, up_to_multiple(rows, W) / W);
}

}  // namespace

// One tile of queries against a whole block of 16-bit keys, none of them masked, with products of 16-bit integers; what
// tile.h does with fp32 numbers.
#pragma once

#include "integer_products.h"
#include "integer_rounding.h"
#include "softmax.h"
#include "tile.h"

namespace {

// With fewer rows the work is done before a block's keys and values have been rounded.
constexpr int MIN_INTEGER_ROWS = larger(TILE_QUERIES, 32);
// Rows of all row spaces: with fewer, narrow tiles keep more threads at work.
constexpr int MIN_INTEGER_QUERIES = 2 * TILE_QUERIES;

// With AVX2 tiles are narrow enough as they are.
constexpr bool NARROW_INTEGER_TILES = W > 8;

// By the shape and what is asked for alone, and so are tiles, or what goes by them: bits do not depend on the number of threads.
bool takes_integers(const Job& job) {
    const AttentionProblem& p = *job.problem;
    // A log-sum-exp of float16 is as exact as PyTorch's, which has that of fp32 scores.
    const bool type_fits = p.element_type == BFLOAT16 || (p.element_type == FLOAT16 && job.lse == nullptr);
    // Whole vectors, which head dimensions are of eight lanes.
    const bool lanes_fit = W == 8 || (p.head_dim % W == 0 && job.rows * job.row_spaces >= MIN_INTEGER_QUERIES);
    return HAS_INTEGERS && type_fits && job.rows >= MIN_INTEGER_ROWS && p.seqlen_k >= BLOCK_KEYS && lanes_fit;
}

#if HAS_INTEGERS

// Integer scores and, as integers too, the maxima of each query.
struct IntegerScores {
    float* scores;
    ptrdiff_t ld;
    float* highest;
    template <int R, int C>
    __attribute__((always_inline)) void store(int row, int column, F acc[R][C]) const {
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
            F most = load(highest + (column + c) * W);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                most = max_integers(acc[r][c], most);
                ::store(scores + (row + r) * ld + (column + c) * W, acc[r][c]);
            }
            ::store(highest + (column + c) * W, most);
        }
    }
};

// The same as numbers, of which this is one part of several.
struct PartOfScores {
    float* scores;
    ptrdiff_t ld;
    float* highest;
    bool first, last;
    template <int R, int C>
    __attribute__((always_inline)) void store(int row, int column, F acc[R][C]) const {
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
            F most = load(highest + (column + c) * W);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                float* const to = scores + (row + r) * ld + (column + c) * W;
                F sum = as_floats(acc[r][c]);
                if (!first) sum = add(load(to), sum);
                most = max(sum, most);
                ::store(to, sum);
            }
            if (last) ::store(highest + (column + c) * W, most);
        }
    }
};

// out = out * rescale + sums * unit of the row * gain of the query.
struct IntegerOutputs {
    float* out;
    ptrdiff_t ld;
    const float *rescale, *gain, *unit;
    template <int R, int C>
    __attribute__((always_inline)) void store(int row, int column, F acc[R][C]) const {
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
            const F factor = load(rescale + (column + c) * W), of_query = load(gain + (column + c) * W);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                float* const to = out + (row + r) * ld + (column + c) * W;
                const F sum = mul(as_floats(acc[r][c]), mul(of_query, set1(unit[row + r])));
                ::store(to, madd(load(to), factor, sum));
            }
        }
    }
};

// A block's weights from its scores, of one vector of queries: 2^(score * slope + offset).
struct Exponents {
    F slope, offset;
};

template <bool IN_PARTS>
INLINE F score_of(const float* s) { return IN_PARTS ? load(s) : as_floats(load(s)); }

constexpr int WEIGHTS_AT_ONCE = 4;

template <bool IN_PARTS, int BITS>
INLINE void weights_of_scores(const float* s, int ld, const Exponents& of, F weight[WEIGHTS_AT_ONCE]) {
    F score[WEIGHTS_AT_ONCE];
#pragma GCC unroll 4
    for (int i = 0; i < WEIGHTS_AT_ONCE; ++i) score[i] = score_of<IN_PARTS>(s + i * ld);
    if constexpr (NO_EXPONENTIALS) {
#pragma GCC unroll 4
        for (int i = 0; i < WEIGHTS_AT_ONCE; ++i) weight[i] = madd(score[i], of.slope, of.offset);
    } else {
        integer_weights<BITS, WEIGHTS_AT_ONCE>(score, of.slope, of.offset, weight);
    }
}

// Pairs of weights, of WEIGHT_BITS bits; their sum.
template <class T, bool IN_PARTS>
INLINE F weigh_by_bits(const float* s, float* pairs, int ld, const Exponents& exponents) {
    F total[2] = {set1(0.0f), set1(0.0f)};
    for (int k = 0; k < BLOCK_KEYS; k += WEIGHTS_AT_ONCE, s += WEIGHTS_AT_ONCE * ld) {
        F weight[WEIGHTS_AT_ONCE];
        weights_of_scores<IN_PARTS, Digits<T>::WEIGHT_BITS>(s, ld, exponents, weight);
#pragma GCC unroll 4
        for (int i = 0; i < WEIGHTS_AT_ONCE; ++i) {
            total[i % 2] = add(total[i % 2], weight[i]);
            weight[i] = add(weight[i], set1(DITHER.of[k + i]));
        }
#pragma GCC unroll 2
        for (int i = 0; i < WEIGHTS_AT_ONCE; i += 2, pairs += ld) store(pairs, integer_pairs(weight[i], weight[i + 1]));
    }
    return mul(add(total[0], total[1]), set1(1.0f / (1 << Digits<T>::WEIGHT_BITS)));
}

// Pairs of weights, of as many bits as their sum allows, and what a one stands for; their sum. Scores are overwritten.
template <bool IN_PARTS>
INLINE F weigh_by_sum(float* s, float* pairs, int ld, const Exponents& exponents, F& unit) {
    F total[2] = {set1(0.0f), set1(0.0f)};
    float* at = s;
    for (int k = 0; k < BLOCK_KEYS; k += WEIGHTS_AT_ONCE, at += WEIGHTS_AT_ONCE * ld) {
        F weight[WEIGHTS_AT_ONCE];
        weights_of_scores<IN_PARTS, 0>(at, ld, exponents, weight);
#pragma GCC unroll 4
        for (int i = 0; i < WEIGHTS_AT_ONCE; ++i) {
            total[i % 2] = add(total[i % 2], weight[i]);
            store(at + i * ld, weight[i]);
        }
    }
    const F sum = add(total[0], total[1]);
    const F factor = min(set1(MAX_WEIGHT), div(set1(MAX_WEIGHTS), sum));
    unit = div(set1(1.0f), factor);
    at = s;
#pragma GCC unroll 2
    for (int k = 0; k < BLOCK_KEYS; k += 2, at += 2 * ld, pairs += ld) {
        const F low = madd(load(at), factor, set1(DITHER.of[k]));
        store(pairs, integer_pairs(low, madd(load(at + ld), factor, set1(DITHER.of[k + 1]))));
    }
    return sum;
}

// One vector of queries: the block's maximum into the running one, and pairs of weights in place of scores.
template <class T, bool IN_PARTS>
void weigh_integers(const Workspace& w, const Tile& tile, int column, int ld, float scale) {
    const int at = column * W;
    const F unit = mul(load(tile.integers.unit + at), set1(w.integers.key_unit));
    const F highest = score_of<IN_PARTS>(w.block_max + at);
    const F block_max = mul(highest, unit);
    const F old_max = load(tile.maximum + at), new_max = max(block_max, old_max);
    // As in raise_maxima: exactly 1 where a maximum is the new one.
    F t[2] = {mul(sub(old_max, new_max), set1(scale)), mul(sub(block_max, new_max), set1(scale))}, factor[2];
    exp2_to_zero<6, 2>(t, factor);
    const F rescale = select_equal(old_max, new_max, set1(1.0f), factor[0]);
    const F gain = select_equal(block_max, new_max, set1(1.0f), factor[1]);
    store(tile.maximum + at, new_max);
    store(w.rescale + at, rescale);

    const F slope = mul(unit, set1(scale));
    const Exponents exponents = {slope, sub(set1(0.0f), mul(highest, slope))};
    F sum, of_weight = set1(1.0f);
    if constexpr (Digits<T>::WEIGHTS_BY_SUM)
        sum = weigh_by_sum<IN_PARTS>(w.scores + at, w.pairs + at, ld, exponents, of_weight);
    else
        sum = weigh_by_bits<T, IN_PARTS>(w.scores + at, w.pairs + at, ld, exponents);
    store(w.gain + at, mul(gain, of_weight));
    store(tile.sum + at, madd(load(tile.sum + at), rescale, mul(sum, gain)));
}

template <class T, int C>
void attend_in_integers(const Job& job, const Workspace& w, const Tile& tile, int ld) {
    const IntegerBlock& block = w.integers;
    const int head_dim = (int)job.problem->head_dim;
    constexpr int DEPTH = Digits<T>::DEPTH;
    if (head_dim <= DEPTH) {
        for (int c = 0; c < C; ++c) store(w.block_max + c * W, lowest_integers());
        multiply_integers<C>(
            (const char*)block.key, head_dim * 2, 4, BLOCK_KEYS, tile.integers.pairs, ld, head_dim / 2,
            IntegerScores{w.scores, ld, w.block_max});
        for (int c = 0; c < C; ++c) weigh_integers<T, false>(w, tile, c, ld, job.scale);
    } else if constexpr (DEPTH < MAX_HEAD_DIM) {
        for (int c = 0; c < C; ++c) store(w.block_max + c * W, set1(-__builtin_inff()));
        for (int d = 0; d < head_dim; d += DEPTH)
            multiply_integers<C>(
                (const char*)(block.key + d), head_dim * 2, 4, BLOCK_KEYS, tile.integers.pairs + d / 2 * ld, ld,
                smaller(DEPTH, head_dim - d) / 2,
                PartOfScores{w.scores, ld, w.block_max, d == 0, d + DEPTH >= head_dim});
        for (int c = 0; c < C; ++c) weigh_integers<T, true>(w, tile, c, ld, job.scale);
    }
    multiply_integers<C>(
        (const char*)block.value, 4, head_dim * 4, head_dim, w.pairs, ld, BLOCK_KEYS / 2,
        IntegerOutputs{tile.out, ld, w.rescale, w.gain, block.value_unit});
}

template <class T>
void attend_in_integers(const Job& job, const Workspace& w, const Tile& tile, int columns, int ld) {
    if constexpr (MAX_COLUMNS == 4) {
        if (columns == 4) return attend_in_integers<T, 4>(job, w, tile, ld);
        if (columns == 3) return attend_in_integers<T, 3>(job, w, tile, ld);
    }
    if (columns == 2)
        attend_in_integers<T, 2>(job, w, tile, ld);
    else
        attend_in_integers<T, 1>(job, w, tile, ld);
}

// Whether the mask leaves the whole tile all of the block, and it still tries.
bool wants_integers(const Job& job, const Tile& tile, const KeyBlock& block) {
    const int before = NARROW_INTEGER_TILES ? vectors_before(job, tile) * W : 0;
    return block.first + BLOCK_KEYS - 1 <= tile.diagonal - before && tile.integers.misses < MAX_MISSES;
}

// What the queries of a narrow tile may lose, in whose blocks: that of the whole tile that it is a part of, as its bits go by.
// Those lie in `w` meanwhile, where keys and values come later.
template <class T>
void bound_by_whole_tile(const Job& job, const Workspace& w, Tile& tile, const char* query, char* out) {
    const int head_dim = (int)job.problem->head_dim;
    Tile whole;
    whole.query = w.key;
    whole.integers.pairs = w.value;
    whole.integers.unit = w.value + head_dim / 2 * TILE_QUERIES;
    whole.first_row = tile.first_row - vectors_before(job, tile) * W;
    whole.rows = (int)smaller<int64_t>(TILE_QUERIES, job.rows - whole.first_row);
    const int columns = up_to_multiple(whole.rows, W) / W;
    find_rows(job, whole, query, out);
    load_queries<T>(whole.query_row, whole.rows, head_dim, job.query_factor, whole.query, TILE_QUERIES, columns);
    round_queries<T>(whole, head_dim, columns, TILE_QUERIES, whole.integers);
    tile.integers.squares = whole.integers.squares;
    tile.integers.errors = whole.integers.errors;
}

// A block as integers; false where no tile of the task wants it, it has fewer keys, or they or their values cannot be integers.
template <class T>
bool round_block(const Job& job, const Tile* tile, int tiles, const KeyBlock& block, int head_dim, IntegerBlock& to) {
    bool wanted = false;
    for (int t = 0; t < tiles; ++t) wanted |= wants_integers(job, tile[t], block);
    return wanted && block.count == BLOCK_KEYS && round_keys<T>(block.key, block.key_row, head_dim, to) &&
           round_values<T>(block.value, block.value_row, head_dim, to);
}

// Whether the tile's products with the block, which are not masked, are exact enough.
template <class T>
bool fits_integers(const Job& job, const Tile& tile, const IntegerBlock& integers) {
    typedef Digits<T> Limits;
    const float scale = job.scale / (float)LOG2_E;
    const IntegerQueries& queries = tile.integers;
    const float error = sqrtf(queries.errors * integers.key_squares) + sqrtf(queries.squares * integers.key_errors);
    const float directions = Limits::DITHERS_ROWS ? sqrtf((float)job.problem->head_dim) : 1.0f;
    return scale * scale * queries.squares * integers.key_squares <= Limits::MAX_SCORE * Limits::MAX_SCORE &&
           scale * error <= Limits::MAX_SCORE_ERROR * directions;
}

// Attends in integers where the tile and the block allow it: `rounded` says whether the block does.
template <class T>
bool attends_in_integers(
    const Job& job, const Workspace& w, Tile& tile, const KeyBlock& block, bool rounded, int columns, int ld) {
    if (!wants_integers(job, tile, block)) return false;
    if (!rounded || !fits_integers<T>(job, tile, w.integers)) {
        ++tile.integers.misses;
        return false;
    }
    tile.integers.misses = 0;
    attend_in_integers<T>(job, w, tile, columns, ld);
    return true;
}

#endif

}  // namespace

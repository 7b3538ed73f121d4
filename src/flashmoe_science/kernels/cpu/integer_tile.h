// One tile of queries against a whole block of bf16 keys, none of them masked, with products of 16-bit integers; what
// tile.h does with fp32 numbers.
//
// Rows of queries and of keys, and columns of values, are multiplied by powers of two and rounded to integers. Elements of
// at least 2^-7 of the row's length are then exact. What rounding the others may cost is bounded before: a block whose
// numbers would lose too much, or that are not finite, is left to tile.h. Weights are relative to the block's own maximum,
// so that a block of small weights has as many digits as one of large ones.
//
// Errors are to be small beside each row of the output, not only beside the largest. u = 2^-8 is bf16's rounding unit: of
// PyTorch's weights, and of every output.
//   scores   rounding errors dq and dk move one by at most scale * (|dq| |k| + |q| |dk|) (Cauchy-Schwarz), which may be u,
//            and by some u / sqrt(head_dim) where they have no common direction. |dq| and |dk| are measured.
//   weights  have errors of 2^-14 to 2^-13 of the block's largest, up and down alike (see dither), so 64 of them add about
//            2^-11.3 of a typical row of values to the sum.
//   values   have errors of up to 2^-12 of their column's largest, and 2^-13 in the mean of squares.
// The largest weight of a block is 1. So its row of the output is about as long as some row of the block's values, whatever
// the weights are, and both errors are at most about u of it if no row is shorter than MIN_VALUE_ROW of the columns'
// largest. A block with a shorter one, such as that of an attention sink without a value, is left to tile.h.
#pragma once

#include <math.h>

#include "gemm.h"
#include "integers.h"
#include "softmax.h"
#include "problem.h"

namespace {

// With fewer rows the work is done before a block's keys and values have been rounded.
constexpr int MIN_INTEGER_ROWS = 2 * TILE_QUERIES;

// By the shape alone, as are the tiles then: the bits do not depend on the number of threads.
bool takes_integers(const Job& job) {
    const AttentionProblem& p = *job.problem;
    return HAS_INTEGERS && p.element_type == BFLOAT16 && job.rows >= MIN_INTEGER_ROWS && p.seqlen_k >= BLOCK_KEYS;
}

#if HAS_INTEGERS

// Largest product of a query's length, a key's length and the softmax's scale.
constexpr float MAX_INTEGER_SCORE = 128.0f;
// Largest error of a score, u.
constexpr float MAX_SCORE_ERROR = 1.0f / 256;
// Largest element of a query and largest square of its length as integers where they have a bit more than usual: products
// with keys are then below 2^31, whatever was rounded.
constexpr float MAX_ELEMENT = 32767.0f;
constexpr float MAX_DOUBLED_SQUARES = 0.98f * 4294967296.0f;
// Least length of a row of values, over that of a row of the columns' maxima; and least of its largest, over theirs.
constexpr float MIN_VALUE_ROW = 1.0f / 8;
// Largest ratio of a column's maximum to the mean of its magnitudes.
constexpr float MAX_VALUE_RATIO = 16.0f;
// Squares and magnitudes outside are left to fp32.
constexpr float MIN_SQUARES = 1e-12f, MAX_SQUARES = 1e12f;
constexpr float MIN_VALUE = 1e-12f, MAX_VALUE = 1e12f;

// By what rows of these lengths are multiplied.
INLINE F integer_scale(F squares) {
    const __m256i half = _mm256_srai_epi32(exponent_of(squares), 1);
    return power_of_two(_mm256_sub_epi32(_mm256_set1_epi32(LENGTH_BITS - 1), half));
}

float largest_lane(F x) {
    float lane[W];
    store(lane, x);
    float most = lane[0];
    for (int i = 1; i < W; ++i)
        if (lane[i] > most) most = lane[i];
    return most;
}

// errors + the square of what rounding x takes from it.
INLINE F add_rounding_error(F x, F errors) {
    const F error = sub(x, rounded(x));
    return madd(error, error, errors);
}

// Queries of a tile as integers, from its numbers. Where they cannot be, its length is infinite.
void round_queries(const Tile& tile, int head_dim, int columns, int ld, IntegerQueries& to) {
    to.squares = to.errors = 0.0f;
    for (int c = 0; c < columns; ++c) {
        const float* const from = tile.query + c * W;
        F squares = set1(0.0f), most = set1(0.0f);
        for (int d = 0; d < head_dim; ++d) {
            const F x = load(from + d * ld);
            squares = madd(x, x, squares);
            most = max(absolute(x), most);
        }
        // A row of zeros, or one beyond the tile's last, has products of zero. A NaN is in the squares, but not in the maximum.
        const F counted = select_equal(most, set1(0.0f), add(squares, set1(1.0f)), squares);
        if (!all_at_most(set1(MIN_SQUARES), counted) || !all_at_most(counted, set1(MAX_SQUARES))) {
            to.squares = __builtin_inff();
            return;
        }
        to.squares = larger(to.squares, largest_lane(squares));
        const F usual = integer_scale(counted), twice = add(usual, usual);
        // One more bit where each element and each product with a key have room for it, with what rounding may add.
        const F scale = select_at_most(
            mul(most, twice), set1(MAX_ELEMENT),
            select_at_most(mul(mul(counted, twice), twice), set1(MAX_DOUBLED_SQUARES), twice, usual), usual);
        const F unit = div(set1(1.0f), scale);
        store(to.unit + c * W, unit);
        F errors = set1(0.0f);
        for (int d = 0; d < head_dim; d += 2) {
            const F low = mul(load(from + d * ld), scale), high = mul(load(from + (d + 1) * ld), scale);
            errors = add_rounding_error(high, add_rounding_error(low, errors));
            store(to.pairs + d / 2 * ld + c * W, integer_pairs(low, high));
        }
        to.errors = larger(to.errors, largest_lane(mul(errors, mul(unit, unit))));
    }
}

// Keys of a block; false where they cannot be integers.
bool round_keys(const char* key, ptrdiff_t row, int head_dim, IntegerBlock& to) {
    F most = set1(0.0f), total = set1(0.0f);
    for (int k = 0; k < BLOCK_KEYS; k += W) {
        F squares[W];
#pragma GCC unroll 8
        for (int i = 0; i < W; ++i) {
            const BFloat16* const from = (const BFloat16*)(key + (k + i) * row);
            squares[i] = set1(0.0f);
            for (int d = 0; d < head_dim; d += W) {
                const F x = load_first(from + d, W);
                squares[i] = madd(x, x, squares[i]);
            }
        }
        const F sums = sum_lanes(squares);
        most = max(sums, most);
        total = add(total, sums);
    }
    to.key_squares = largest_lane(most);
    // A NaN is in the total, but not in the maximum.
    if (!all_at_most(total, set1(MAX_SQUARES)) || to.key_squares < MIN_SQUARES) return false;
    const F scale = integer_scale(set1(to.key_squares));
    to.key_unit = 1.0f / largest_lane(scale);
    F worst = set1(0.0f);
    int16_t* at = to.key;
    for (int k = 0; k < BLOCK_KEYS; k += W) {
        F errors[W];
        for (int i = 0; i < W; ++i, at += head_dim) {
            const BFloat16* const from = (const BFloat16*)(key + (k + i) * row);
            F error = set1(0.0f);
            for (int d = 0; d < head_dim; d += W) {
                const F x = mul(load_first(from + d, W), scale);
                error = add_rounding_error(x, error);
                store_integers(at + d, x);
            }
            errors[i] = error;
        }
        worst = max(sum_lanes(errors), worst);
    }
    to.key_errors = largest_lane(worst) * to.key_unit * to.key_unit;
    return true;
}

// Squares of the lengths of a block's rows of values, lane by lane, and of the row of the columns' maxima.
struct RowSquares {
    F row[BLOCK_KEYS], of_maxima;
};

bool any_short_row(const RowSquares& squares) {
    F maxima[W];
    for (int i = 0; i < W; ++i) maxima[i] = squares.of_maxima;
    const F least = mul(sum_lanes(maxima), set1(MIN_VALUE_ROW * MIN_VALUE_ROW));
    for (int k = 0; k < BLOCK_KEYS; k += W)
        if (!all_at_most(least, sum_lanes(squares.row + k))) return true;
    return false;
}

// Whether a row's largest value is so small that a column's rounding, of up to 2^-12 of its largest, exceeds half a unit in
// its last place.
bool any_small_row(const F largest[BLOCK_KEYS], F of_columns) {
    const float least = largest_lane(of_columns) * MIN_VALUE_ROW;
    for (int k = 0; k < BLOCK_KEYS; ++k)
        if (_mm256_movemask_ps(_mm256_cmp_ps(largest[k], set1(least), _CMP_GE_OQ)) == 0) return true;
    return false;
}

// Values of a block, each column with a scale of its own; false where they cannot be integers. Rows must be long as they
// are, and as integers: one large column hides what the others lose.
bool round_values(const char* value, ptrdiff_t row, int head_dim, IntegerBlock& to) {
    RowSquares as_given = {}, as_integers = {};
    F row_largest[BLOCK_KEYS] = {}, column_largest = set1(0.0f);
    for (int d = 0; d < head_dim; d += W) {
        const char* from = value + d * sizeof(BFloat16);
        F most = set1(0.0f), total = set1(0.0f);
        for (int k = 0; k < BLOCK_KEYS; ++k, from += row) {
            const F magnitude = absolute(load_first((const BFloat16*)from, W));
            most = max(magnitude, most);
            total = add(total, magnitude);
        }
        const F counted = select_equal(total, set1(0.0f), set1(1.0f), most);
        if (!all_at_most(most, mul(total, set1(MAX_VALUE_RATIO / BLOCK_KEYS))) || !all_at_most(set1(MIN_VALUE), counted) ||
            !all_at_most(total, set1(MAX_VALUE)))
            return false;
        const F scale = power_of_two(_mm256_sub_epi32(_mm256_set1_epi32(VALUE_BITS - 1), exponent_of(counted)));
        store(to.value_unit + d, div(set1(1.0f / (1 << WEIGHT_BITS)), scale));
        from = value + d * sizeof(BFloat16);
        for (int k = 0; k < BLOCK_KEYS; k += 2, from += 2 * row) {
            F integer[2];
#pragma GCC unroll 2
            for (int i = 0; i < 2; ++i) {
                const F x = load_first((const BFloat16*)(from + i * row), W);
                integer[i] = mul(x, scale);
                row_largest[k + i] = max(absolute(x), row_largest[k + i]);
                as_given.row[k + i] = madd(x, x, as_given.row[k + i]);
                as_integers.row[k + i] = madd(integer[i], integer[i], as_integers.row[k + i]);
            }
            store(to.value + k / 2 * head_dim + d, integer_pairs(integer[0], integer[1]));
        }
        const F largest = mul(most, scale);
        column_largest = max(most, column_largest);
        as_given.of_maxima = madd(most, most, as_given.of_maxima);
        as_integers.of_maxima = madd(largest, largest, as_integers.of_maxima);
    }
    return !any_small_row(row_largest, column_largest) && !any_short_row(as_given) && !any_short_row(as_integers);
}

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

// Rows are a multiple of 8. Four at a time leave registers to spare, and are as fast as six.
template <int C, class Epilogue>
void multiply_integers(
    const char* a, ptrdiff_t a_row, ptrdiff_t a_step, int rows, const float* b, ptrdiff_t b_step, int depth,
    const Epilogue& epilogue) {
    constexpr int R = C == 2 ? 4 : 8;
    for (int row = 0; row < rows; row += R)
        register_block<IntegerProduct, R, C>(a, a_row, a_step, b, b_step, depth, row, 0, epilogue);
}

// What is added to a key's weight before it is rounded, other for each key, so that many alike are not all rounded up or all
// down: multiples of the golden ratio, modulo 1. It is less than a half, so that the weights 0 and 1 stay what they are.
struct Dither {
    float of_key[BLOCK_KEYS];
    constexpr Dither() : of_key() {
        for (int k = 0; k < BLOCK_KEYS; ++k)
            of_key[k] = 0.875f * ((float)(k * 40503 % 65536) / 65536 - 0.5f);
    }
};
constexpr Dither DITHER;

// One vector of queries: the block's maximum into the running one, and pairs of weights in place of scores.
void weigh_integers(const Workspace& w, const Tile& tile, int column, int ld, float scale) {
    const int at = column * W;
    const F unit = mul(load(tile.integers.unit + at), set1(w.integers.key_unit));
    const F highest = as_floats(load(w.block_max + at));
    const F block_max = mul(highest, unit);
    const F old_max = load(tile.maximum + at), new_max = max(block_max, old_max);
    // As in raise_maxima: exactly 1 where a maximum is the new one.
    F t[2] = {mul(sub(old_max, new_max), set1(scale)), mul(sub(block_max, new_max), set1(scale))}, factor[2];
    exp2_to_zero<6, 2>(t, factor);
    const F rescale = select_equal(old_max, new_max, set1(1.0f), factor[0]);
    const F gain = select_equal(block_max, new_max, set1(1.0f), factor[1]);
    store(tile.maximum + at, new_max);
    store(w.rescale + at, rescale);
    store(w.gain + at, gain);

    const F slope = mul(unit, set1(scale));
    const F offset = sub(set1(0.0f), mul(highest, slope));
    F total[2] = {set1(0.0f), set1(0.0f)};
    const float* s = w.scores + at;
    float* pairs = w.pairs + at;
    for (int k = 0; k < BLOCK_KEYS; k += 2, s += 2 * ld, pairs += ld) {
        F x[2], weight[2];
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) x[i] = madd(as_floats(load(s + i * ld)), slope, offset);
        if constexpr (NO_EXPONENTIALS) {
            weight[0] = x[0];
            weight[1] = x[1];
        } else {
            integer_weights<2>(x, weight);
        }
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
            total[i] = add(total[i], weight[i]);
            weight[i] = add(weight[i], set1(DITHER.of_key[k + i]));
        }
        store(pairs, integer_pairs(weight[0], weight[1]));
    }
    const F sum = mul(mul(add(total[0], total[1]), set1(1.0f / (1 << WEIGHT_BITS))), gain);
    store(tile.sum + at, madd(load(tile.sum + at), rescale, sum));
}

template <int C>
void attend_in_integers(const Job& job, const Workspace& w, const Tile& tile, int ld) {
    const IntegerBlock& block = w.integers;
    const int head_dim = (int)job.problem->head_dim;
    for (int c = 0; c < C; ++c) store(w.block_max + c * W, lowest_integers());
    multiply_integers<C>(
        (const char*)block.key, head_dim * 2, 4, BLOCK_KEYS, tile.integers.pairs, ld, head_dim / 2,
        IntegerScores{w.scores, ld, w.block_max});
    for (int c = 0; c < C; ++c) weigh_integers(w, tile, c, ld, job.scale);
    multiply_integers<C>(
        (const char*)block.value, 4, head_dim * 4, head_dim, w.pairs, ld, BLOCK_KEYS / 2,
        IntegerOutputs{tile.out, ld, w.rescale, w.gain, block.value_unit});
}

void attend_in_integers(const Job& job, const Workspace& w, const Tile& tile, int columns, int ld) {
    if (columns == 2)
        attend_in_integers<2>(job, w, tile, ld);
    else
        attend_in_integers<1>(job, w, tile, ld);
}

// A block as integers; false where it has fewer keys, or they or their values cannot be integers.
bool round_block(const KeyBlock& block, int head_dim, IntegerBlock& to) {
    return block.count == BLOCK_KEYS && round_keys(block.key, block.key_row, head_dim, to) &&
           round_values(block.value, block.value_row, head_dim, to);
}

// Whether the tile's products with the block are exact enough, and none is masked.
bool fits_integers(const Job& job, const Tile& tile, const KeyBlock& block, const IntegerBlock& integers) {
    const float scale = job.scale / (float)LOG2_E;
    const IntegerQueries& queries = tile.integers;
    return block.first + block.count - 1 <= tile.diagonal &&
           scale * scale * queries.squares * integers.key_squares <= MAX_INTEGER_SCORE * MAX_INTEGER_SCORE &&
           scale * (sqrtf(queries.errors * integers.key_squares) + sqrtf(queries.squares * integers.key_errors)) <=
               MAX_SCORE_ERROR;
}

#else

void round_queries(const Tile&, int, int, int, IntegerQueries&) {}
bool round_block(const KeyBlock&, int, IntegerBlock&) { return false; }
bool fits_integers(const Job&, const Tile&, const KeyBlock&, const IntegerBlock&) { return false; }
void attend_in_integers(const Job&, const Workspace&, const Tile&, int, int) {}

#endif

}  // namespace

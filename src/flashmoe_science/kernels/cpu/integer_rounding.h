// Queries, keys and values as 16-bit integers, and which may be.
//
// Rows of queries and of keys, and columns of values, are multiplied by powers of two and rounded to integers. Elements of
// at least 2^-7 of the row's length are then exact. What rounding the others may cost is bounded before: a block whose
// numbers would lose too much, or that are not finite, is left to tile.h. Weights are relative to the block's own maximum.
//
// Errors are to be small beside each row of the output. u is the type's rounding unit; docs/kernels/cpu.md has what the
// parts may add up to.
#pragma once

#include <math.h>

#include "integers.h"
#include "problem.h"

namespace {

#if HAS_INTEGERS

// What a row's length is below as integers: so is the root of any product of two rows, before its elements are rounded.
// Rows have a bit more where it fits.
constexpr int LENGTH_BITS = 15;
// Largest square of the lengths of two rows, multiplied, and largest element, where they have that bit: products are then
// below 2^31, whatever was rounded.
constexpr float MAX_SQUARES_OF_PRODUCT = 0.98f * 4294967296.0f * 1073741824.0f;
constexpr float MAX_ELEMENT = 32767.0f;

// What a type's numbers become as integers, and what is left to fp32.
template <class T>
struct Digits;

template <>
struct Digits<BFloat16> {
    // Longest run of products summed as integers. Rows that are longer are so many runs, each with a length.
    static constexpr int DEPTH = 256;
    // Weights lie in 0 .. 2^WEIGHT_BITS and values below 2^VALUE_BITS: the sum of a block's 64 products is less than 2^31.
    static constexpr int WEIGHT_BITS = 13;
    static constexpr bool WEIGHTS_BY_SUM = false;
    static constexpr int VALUE_BITS = 12;
    // Squares of lengths, of rows with a bit more.
    static constexpr float MAX_KEY_SQUARES = 1 << 30;
    // Largest product of a query's length, a key's length and the softmax's scale.
    static constexpr float MAX_SCORE = 40.0f;
    // Largest error of a score, u.
    static constexpr bool DITHERS_ROWS = false;
    static constexpr float MAX_SCORE_ERROR = 1.0f / 256;
    // Least length of a row of values, over that of a row of the columns' maxima; and least of its largest, over theirs.
    static constexpr float MIN_VALUE_ROW = 1.0f / 8;
};

// Three more digits: weights are multiplied by what their sum allows, and values have two bits more.
template <>
struct Digits<Half> {
    static constexpr int DEPTH = 64;
    static constexpr int WEIGHT_BITS = 0;
    static constexpr bool WEIGHTS_BY_SUM = true;
    static constexpr int VALUE_BITS = 14;
    static constexpr float MAX_KEY_SQUARES = 0.98f * 2147483648.0f;
    static constexpr float MAX_SCORE = 24.0f;
    // Elements are dithered, so that their errors have no common direction: of a score's error, which is then that of their
    // length over the root of head_dim, 0.4 u at most: the mean of a weight's rounding.
    static constexpr bool DITHERS_ROWS = true;
    static constexpr float MAX_SCORE_ERROR = 0.4f / 2048;
    static constexpr float MIN_VALUE_ROW = 1.0f / 4;
};

// Where weights go by their sum: the largest one, and the largest sum of a block's, with room for what is added to each
// before it is rounded. Times values, that is less than 2^31.
constexpr float MAX_WEIGHT = 32700.0f;
constexpr float MAX_WEIGHTS = 131072.0f - 128.0f;

// Largest ratio of a column's maximum to the mean of its magnitudes.
constexpr float MAX_VALUE_RATIO = 16.0f;
// Squares and magnitudes outside are left to fp32.
constexpr float MIN_SQUARES = 1e-12f, MAX_SQUARES = 1e12f;
constexpr float MIN_VALUE = 1e-12f, MAX_VALUE = 1e12f;
constexpr int MAX_HEAD_DIM = 256;
// After so many blocks in a row that were left to fp32 numbers a tile tries no more: its numbers are not such.
constexpr int MAX_MISSES = 4;

// By what rows of these lengths are multiplied.
INLINE F integer_scale(F squares) {
    return power_of_two(sub_integers(all_integers(LENGTH_BITS - 1), halved(exponent_of(squares))));
}

float largest_lane(F x) {
    float lane[W];
    store(lane, x);
    float most = lane[0];
    for (int i = 1; i < W; ++i)
        if (lane[i] > most) most = lane[i];
    return most;
}

// What is added to a key's weight, or to an element, before it is rounded, other for each, so that many alike are not all
// rounded up or all down: multiples of the golden ratio, modulo 1. It is less than a half, so that integers stay what they are.
struct Dither {
    float of[MAX_HEAD_DIM];
    constexpr Dither() : of() {
        for (int i = 0; i < MAX_HEAD_DIM; ++i) of[i] = 0.875f * ((float)(i * 40503 % 65536) / 65536 - 0.5f);
    }
};
constexpr Dither DITHER;

// x * scale, from which `errors` gets the square of what rounding takes.
template <bool DITHERS>
INLINE F scaled(F x, F scale, F dither, F& errors) {
    const F exact = mul(x, scale);
    const F to_round = DITHERS ? add(exact, dither) : exact;
    const F error = sub(exact, rounded(to_round));
    errors = madd(error, error, errors);
    return to_round;
}

// Queries of a tile as integers, from its numbers. Where they cannot be, its length is infinite.
template <class T>
void round_queries(const Tile& tile, int head_dim, int columns, int ld, IntegerQueries& to) {
    constexpr bool DITHERS = Digits<T>::DITHERS_ROWS;
    constexpr float MAX_DOUBLED_SQUARES = MAX_SQUARES_OF_PRODUCT / Digits<T>::MAX_KEY_SQUARES;
    to.squares = to.errors = 0.0f;
    to.misses = 0;
    for (int c = 0; c < columns; ++c) {
        const float* const from = tile.query + c * W;
        F squares = set1(0.0f), most = set1(0.0f), of_run = set1(0.0f);
        for (int d = 0; d < head_dim;) {
            // Two sums, as one waits for each of its products.
            F run = set1(0.0f), other = set1(0.0f);
            for (const int end = smaller(d + Digits<T>::DEPTH, head_dim); d < end; d += 2) {
                const F x = load(from + d * ld), y = load(from + (d + 1) * ld);
                run = madd(x, x, run);
                other = madd(y, y, other);
                most = max(absolute(x), most);
                most = max(absolute(y), most);
            }
            run = add(run, other);
            of_run = max(run, of_run);
            squares = add(run, squares);
        }
        // A row of zeros, or one beyond the tile's last, has products of zero. A NaN is in the squares, but not in the maxima.
        const F none = select_equal(most, set1(0.0f), set1(1.0f), set1(0.0f));
        const F all = add(squares, none), counted = add(of_run, none);
        if (!all_at_most(set1(MIN_SQUARES), counted) || !all_at_most(all, set1(MAX_SQUARES))) {
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
        F of_low = set1(0.0f), of_high = set1(0.0f);
        for (int d = 0; d < head_dim; d += 2) {
            const F low = scaled<DITHERS>(load(from + d * ld), scale, set1(DITHER.of[d]), of_low);
            const F high = scaled<DITHERS>(load(from + (d + 1) * ld), scale, set1(DITHER.of[d + 1]), of_high);
            store(to.pairs + d / 2 * ld + c * W, integer_pairs(low, high));
        }
        const F errors = add(of_low, of_high);
        to.errors = larger(to.errors, largest_lane(mul(errors, mul(unit, unit))));
    }
}

// Keys of a block; false where they cannot be integers.
template <class T>
bool round_keys(const char* key, ptrdiff_t row, int head_dim, IntegerBlock& to) {
    constexpr bool MAY_DOUBLE = Digits<T>::MAX_KEY_SQUARES > 1 << 30;
    F most = set1(0.0f), total = set1(0.0f), element = set1(0.0f), most_of_run = set1(0.0f);
    for (int k = 0; k < BLOCK_KEYS; k += W) {
        F sums = set1(0.0f);
        for (int first = 0; first < head_dim; first += Digits<T>::DEPTH) {
            const int end = smaller(first + Digits<T>::DEPTH, head_dim);
            F squares[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; ++i) {
                const T* const from = (const T*)(key + (k + i) * row);
                squares[i] = set1(0.0f);
                for (int d = first; d < end; d += W) {
                    const F x = load_first(from + d, W);
                    squares[i] = madd(x, x, squares[i]);
                    if constexpr (MAY_DOUBLE) element = max(absolute(x), element);
                }
            }
            const F run = sum_lanes(squares);
            most_of_run = max(run, most_of_run);
            sums = add(run, sums);
        }
        most = max(sums, most);
        total = add(total, sums);
    }
    to.key_squares = largest_lane(most);
    const float of_run = largest_lane(most_of_run);
    // A NaN is in the total, but not in the maxima.
    if (!all_at_most(total, set1(MAX_SQUARES)) || of_run < MIN_SQUARES) return false;
    float factor = largest_lane(integer_scale(set1(of_run)));
    if (MAY_DOUBLE && 2 * factor * largest_lane(element) <= MAX_ELEMENT &&
        4 * factor * factor * of_run <= Digits<T>::MAX_KEY_SQUARES)
        factor *= 2;
    const F scale = set1(factor);
    to.key_unit = 1.0f / factor;
    F worst = set1(0.0f);
    int16_t* at = to.key;
    for (int k = 0; k < BLOCK_KEYS; k += W) {
        F errors[W];
        for (int i = 0; i < W; ++i, at += head_dim) {
            const T* const from = (const T*)(key + (k + i) * row);
            F error = set1(0.0f);
            for (int d = 0; d < head_dim; d += W) {
                const F x = load_first(from + d, W);
                store_integers(at + d, scaled<Digits<T>::DITHERS_ROWS>(x, scale, load(DITHER.of + d), error));
            }
            errors[i] = error;
        }
        worst = max(sum_lanes(errors), worst);
    }
    to.key_errors = largest_lane(worst) * to.key_unit * to.key_unit;
    return true;
}

// What all columns of a block's values have in common.
struct Columns {
    float scale[MAX_HEAD_DIM];
    F largest = set1(0.0f);
    // Squares of the length of the row of the columns' maxima, lane by lane.
    F squares = set1(0.0f), integer_squares = set1(0.0f);
};

// Scales of G vectors of columns from the `d`th on; false where values cannot be integers.
template <class T, int G>
INLINE bool scale_columns(const char* value, ptrdiff_t row, int d, Columns& columns, float* unit) {
    F most[G], total[G];
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) most[g] = total[g] = set1(0.0f);
    const char* from = value + d * sizeof(T);
    for (int k = 0; k < BLOCK_KEYS; ++k, from += row)
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) {
            const F magnitude = absolute(load_first((const T*)from + g * W, W));
            most[g] = max(magnitude, most[g]);
            total[g] = add(total[g], magnitude);
        }
    for (int g = 0; g < G; ++g) {
        const F counted = select_equal(total[g], set1(0.0f), set1(1.0f), most[g]);
        if (!all_at_most(most[g], mul(total[g], set1(MAX_VALUE_RATIO / BLOCK_KEYS))) ||
            !all_at_most(set1(MIN_VALUE), counted) || !all_at_most(total[g], set1(MAX_VALUE)))
            return false;
        const F scale = power_of_two(sub_integers(all_integers(Digits<T>::VALUE_BITS - 1), exponent_of(counted)));
        store(columns.scale + d + g * W, scale);
        store(unit + d + g * W, div(set1(1.0f / (1 << Digits<T>::WEIGHT_BITS)), scale));
        const F integer = mul(most[g], scale);
        columns.largest = max(most[g], columns.largest);
        columns.squares = madd(most[g], most[g], columns.squares);
        columns.integer_squares = madd(integer, integer, columns.integer_squares);
    }
    return true;
}

// What a row's length must be at least, squared.
template <class T>
INLINE F least_squares(F of_maxima) {
    F lanes[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) lanes[i] = of_maxima;
    return mul(sum_lanes(lanes), set1(Digits<T>::MIN_VALUE_ROW * Digits<T>::MIN_VALUE_ROW));
}

// Values of a block, each column with a scale of its own; false where they cannot be integers. Rows must be long as they
// are, and as integers: one large column hides what the others lose. And a row's largest must not be so small that a
// column's rounding exceeds half a unit in its last place.
template <class T>
bool round_values(const char* value, ptrdiff_t row, int head_dim, IntegerBlock& to) {
    Columns columns;
    int d = 0;
    for (; d + 4 * W <= head_dim; d += 4 * W)
        if (!scale_columns<T, 4>(value, row, d, columns, to.value_unit)) return false;
    for (; d < head_dim; d += W)
        if (!scale_columns<T, 1>(value, row, d, columns, to.value_unit)) return false;
    const F least = set1(largest_lane(columns.largest) * Digits<T>::MIN_VALUE_ROW);
    const F least_as_given = least_squares<T>(columns.squares);
    const F least_as_integers = least_squares<T>(columns.integer_squares);
    float* pairs = to.value;
    for (int k = 0; k < BLOCK_KEYS; k += W) {
        F as_given[W], as_integers[W];
        for (int i = 0; i < W; i += 2, pairs += head_dim) {
            const T* const from[2] = {(const T*)(value + (k + i) * row), (const T*)(value + (k + i + 1) * row)};
            F given[2], integers[2], largest[2];
            for (int r = 0; r < 2; ++r) given[r] = integers[r] = largest[r] = set1(0.0f);
            for (d = 0; d < head_dim; d += W) {
                const F scale = load(columns.scale + d);
                F integer[2];
#pragma GCC unroll 2
                for (int r = 0; r < 2; ++r) {
                    const F x = load_first(from[r] + d, W);
                    integer[r] = mul(x, scale);
                    largest[r] = max(absolute(x), largest[r]);
                    given[r] = madd(x, x, given[r]);
                    integers[r] = madd(integer[r], integer[r], integers[r]);
                }
                store(pairs + d, integer_pairs(integer[0], integer[1]));
            }
            for (int r = 0; r < 2; ++r) {
                if (none_at_least(largest[r], least)) return false;
                as_given[i + r] = given[r];
                as_integers[i + r] = integers[r];
            }
        }
        if (!all_at_most(least_as_given, sum_lanes(as_given))) return false;
        if (!all_at_most(least_as_integers, sum_lanes(as_integers))) return false;
    }
    return true;
}

#endif

}  // namespace

// C[rows, columns of W lanes] = A[rows, depth] * B[depth, columns], with B's lanes along the queries.
//
// A is read one element at a time and broadcast, in place: its rows are a_row bytes apart, its depth a_step
// bytes, so that neither K (rows along d) nor V (rows along keys, read across) is ever packed or transposed.
// Sums stay in registers; what becomes of them is the epilogue's business: store(row, column, acc[R][C]).
#pragma once

#include "vector.h"

// One fp32 number of A times W numbers of B.
struct FloatProduct {
    INLINE F broadcast(const char* a) {
        float x;
        memcpy(&x, a, sizeof x);
        return set1(x);
    }
    INLINE F accumulate(F acc, F a, F b) { return madd(a, b, acc); }
};

#if HAS_BF16
// Two neighbouring bf16 numbers of A times W pairs of B.
struct PairProduct {
    INLINE F broadcast(const char* a) {
        int x;
        memcpy(&x, a, sizeof x);
        return _mm512_castsi512_ps(_mm512_set1_epi32(x));
    }
    INLINE F accumulate(F acc, F a, F b) { return dot_pairs(acc, a, b); }
};
#endif

// To memory; added to what is there, unless it is the first of several parts of a sum.
struct SumEpilogue {
    float* to;
    ptrdiff_t ld;
    bool first;
    template <int R, int C>
    __attribute__((always_inline)) void store(int row, int column, F acc[R][C]) const {
        float* const at = to + row * ld + column * W;
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) {
                if (!first) acc[r][c] = add(load(at + r * ld + c * W), acc[r][c]);
                ::store(at + r * ld + c * W, acc[r][c]);
            }
    }
};

template <class Product, int R, int C, class Epilogue>
INLINE void register_block(
    const char* a, ptrdiff_t a_row, ptrdiff_t a_step, const float* b, ptrdiff_t b_step, int depth, int row,
    int column, const Epilogue& epilogue) {
    F acc[R][C];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) acc[r][c] = set1(0.0f);
    a += row * a_row;
    b += column * W;
    // Unrolled: the end of a loop of 64 steps is mispredicted, that of 16 is not.
#pragma GCC unroll 4
    for (int i = 0; i < depth; ++i) {
        F operand[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) operand[c] = load(b + c * W);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const F x = Product::broadcast(a + r * a_row);
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) acc[r][c] = Product::accumulate(acc[r][c], x, operand[c]);
        }
        a += a_step;
        b += b_step;
    }
    epilogue.template store<R, C>(row, column, acc);
}

template <class Product, int C, class Epilogue>
static void column_panel(
    const char* a, ptrdiff_t a_row, ptrdiff_t a_step, int rows, const float* b, ptrdiff_t b_step, int depth,
    int column, const Epilogue& epilogue) {
    constexpr int R = rows_for(C);
    int row = 0;
    // A remainder of two rows has too few accumulators to hide their latency: it is made eight.
    const int full = R == 6 && rows > R && rows % R == 2 ? rows - 8 : rows;
    for (; row + R <= full; row += R)
        register_block<Product, R, C>(a, a_row, a_step, b, b_step, depth, row, column, epilogue);
    if constexpr (R > 8)
        if (row + 8 <= rows) {
            register_block<Product, 8, C>(a, a_row, a_step, b, b_step, depth, row, column, epilogue);
            row += 8;
        }
    if constexpr (R > 4)
        for (; row + 4 <= rows; row += 4)
            register_block<Product, 4, C>(a, a_row, a_step, b, b_step, depth, row, column, epilogue);
    if (row + 2 <= rows) {
        register_block<Product, 2, C>(a, a_row, a_step, b, b_step, depth, row, column, epilogue);
        row += 2;
    }
    if (row < rows)
        register_block<Product, 1, C>(a, a_row, a_step, b, b_step, depth, row, column, epilogue);
}

// Columns [first, last) of the product, at most WIDEST at a time.
template <class Product, int WIDEST = MAX_COLUMNS, class Epilogue>
static void multiply(
    const char* a, ptrdiff_t a_row, ptrdiff_t a_step, int rows, const float* b, ptrdiff_t b_step, int depth,
    int first, int last, const Epilogue& epilogue) {
    if constexpr (WIDEST > MAX_COLUMNS)
        for (; first + WIDEST <= last; first += WIDEST)
            column_panel<Product, WIDEST>(a, a_row, a_step, rows, b, b_step, depth, first, epilogue);
    for (; first + MAX_COLUMNS <= last; first += MAX_COLUMNS)
        column_panel<Product, MAX_COLUMNS>(a, a_row, a_step, rows, b, b_step, depth, first, epilogue);
    const int rest = last - first;
    if constexpr (MAX_COLUMNS > 2) {
        if (rest == 3) column_panel<Product, 3>(a, a_row, a_step, rows, b, b_step, depth, first, epilogue);
        if (rest == 2) column_panel<Product, 2>(a, a_row, a_step, rows, b, b_step, depth, first, epilogue);
    }
    if (rest == 1) column_panel<Product, 1>(a, a_row, a_step, rows, b, b_step, depth, first, epilogue);
}

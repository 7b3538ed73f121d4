// Products of pairs of 16-bit integers with sums of 32 bits, as gemm.h has those of fp32 numbers.
#pragma once

#include "gemm.h"
#include "integers.h"

namespace {

#if HAS_INTEGERS

#ifdef __AVX512VNNI__

// Two neighbouring 16-bit integers of A times W pairs of B, added to 32-bit sums.
struct IntegerProduct {
    INLINE F broadcast(const char* a) {
        int x;
        memcpy(&x, a, sizeof x);
        return of_bits(all_integers(x));
    }
    INLINE F accumulate(F acc, F a, F b) {
        // Of the intrinsic's sums g++ 12 keeps copies, which do not fit the registers.
        __asm__("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
        return acc;
    }
};

// R rows by C vectors; the depth is a multiple of four.
template <int R, int C, class Epilogue>
INLINE void integer_block(
    const char* a, ptrdiff_t a_row, ptrdiff_t a_step, const float* b, ptrdiff_t b_step, int depth, int row,
    const Epilogue& epilogue) {
    F acc[R][C];
#pragma GCC unroll 24
    for (int i = 0; i < R * C; ++i) acc[i / C][i % C] = set1(0.0f);
    a += row * a_row;
    for (; depth > 0; depth -= 4)
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i, a += a_step, b += b_step) {
            F operand[C];
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) operand[c] = load(b + c * W);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const F x = IntegerProduct::broadcast(a + r * a_row);
#pragma GCC unroll 4
                for (int c = 0; c < C; ++c) acc[r][c] = IntegerProduct::accumulate(acc[r][c], x, operand[c]);
            }
        }
        // Nothing of the epilogue before the last sum.
#pragma GCC unroll 24
    for (int i = 0; i < R * C; ++i) __asm__("" : "+v"(acc[i / C][i % C]));
    epilogue.template store<R, C>(row, 0, acc);
}

// Rows are a multiple of 8.
template <int C, class Epilogue>
void multiply_integers(
    const char* a, ptrdiff_t a_row, ptrdiff_t a_step, int rows, const float* b, ptrdiff_t b_step, int depth,
    const Epilogue& epilogue) {
    constexpr int R = rows_for(C);
    // A remainder of two rows is made eight.
    const int full = rows % R == 2 ? rows - 8 : rows;
    int row = 0;
    for (; row + R <= full; row += R) integer_block<R, C>(a, a_row, a_step, b, b_step, depth, row, epilogue);
    for (; row < rows; row += 4) integer_block<4, C>(a, a_row, a_step, b, b_step, depth, row, epilogue);
}

#else

// Two neighbouring 16-bit integers of A times W pairs of B, added to 32-bit sums.
struct IntegerProduct {
    INLINE F broadcast(const char* a) {
        int x;
        memcpy(&x, a, sizeof x);
        return _mm256_castsi256_ps(_mm256_set1_epi32(x));
    }
    INLINE F accumulate(F acc, F a, F b) {
        // As one: compilers reorder integer sums and gather the products first, which do not fit the registers.
        F product;
        __asm__("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(acc), "=&x"(product) : "x"(a), "x"(b));
        return acc;
    }
};

// Four rows by two vectors of columns. Products come before sums, and one vector is read where it lies: on Zen 3 1.55 products
// a cycle, in place of 1.37.
#define INTEGER_STEP(A0, A1, A2, A3, B0, B1)                                           \
    "vbroadcastss " A0 ", %%ymm9\n\tvmovups " B0 ", %%ymm8\n\t"                        \
    "vpmaddwd %%ymm8, %%ymm9, %%ymm10\n\tvpmaddwd " B1 ", %%ymm9, %%ymm9\n\t"              \
    "vbroadcastss " A1 ", %%ymm11\n\t"                                                   \
    "vpmaddwd %%ymm8, %%ymm11, %%ymm12\n\tvpmaddwd " B1 ", %%ymm11, %%ymm11\n\t"              \
    "vbroadcastss " A2 ", %%ymm13\n\t"                                                   \
    "vpmaddwd %%ymm8, %%ymm13, %%ymm14\n\tvpmaddwd " B1 ", %%ymm13, %%ymm13\n\t"              \
    "vpaddd %%ymm10, %[c00], %[c00]\n\tvbroadcastss " A3 ", %%ymm15\n\t"                    \
    "vpmaddwd %%ymm8, %%ymm15, %%ymm10\n\tvpmaddwd " B1 ", %%ymm15, %%ymm15\n\t"              \
    "vpaddd %%ymm9, %[c01], %[c01]\n\tvpaddd %%ymm12, %[c10], %[c10]\n\t"                  \
    "vpaddd %%ymm11, %[c11], %[c11]\n\tvpaddd %%ymm14, %[c20], %[c20]\n\t"                  \
    "vpaddd %%ymm13, %[c21], %[c21]\n\tvpaddd %%ymm10, %[c30], %[c30]\n\t"                  \
    "vpaddd %%ymm15, %[c31], %[c31]\n\t"
#define INTEGER_SUMS                                                                                            \
    [c00] "+x"(acc[0][0]), [c01] "+x"(acc[0][1]), [c10] "+x"(acc[1][0]), [c11] "+x"(acc[1][1]), [c20] "+x"(acc[2][0]), \
        [c21] "+x"(acc[2][1]), [c30] "+x"(acc[3][0]), [c31] "+x"(acc[3][1])
#define INTEGER_CLOBBERS "ymm8", "ymm9", "ymm10", "ymm11", "ymm12", "ymm13", "ymm14", "ymm15", "memory", "cc"

// Sums over `depth` steps, a multiple of four. Rows of A are `a_row` bytes apart, their steps 4.
INLINE void add_rows(F acc[4][2], const char* a, ptrdiff_t a_row, const float* b, intptr_t depth) {
    const char* last = a + 3 * a_row;
#define ALONG(AT, B)                                                                                              \
    INTEGER_STEP(AT "(%[a])", AT "(%[a],%[row])", AT "(%[a],%[row],2)", AT "(%[last])", B "(%[b])", B "+32(%[b])")
    __asm__ volatile(
        "1:\n\t" ALONG("0", "0") ALONG("4", "64") ALONG("8", "128") ALONG("12", "192")
        "addq $16, %[a]\n\taddq $16, %[last]\n\taddq $256, %[b]\n\tsubq $4, %[depth]\n\tjne 1b"
        : INTEGER_SUMS, [a] "+r"(a), [last] "+r"(last), [b] "+r"(b), [depth] "+r"(depth)
        : [row] "r"(a_row)
        : INTEGER_CLOBBERS);
#undef ALONG
}

// The same with rows of A side by side, and their steps `a_step` bytes apart.
INLINE void add_columns(F acc[4][2], const char* a, ptrdiff_t a_step, const float* b, intptr_t depth) {
    const char* last = a + 3 * a_step;
#define ACROSS(A, B) INTEGER_STEP("0" A, "4" A, "8" A, "12" A, B "(%[b])", B "+32(%[b])")
    __asm__ volatile(
        "1:\n\t" ACROSS("(%[a])", "0") ACROSS("(%[a],%[step])", "64") ACROSS("(%[a],%[step],2)", "128")
        ACROSS("(%[last])", "192")
        "leaq (%[a],%[step],4), %[a]\n\tleaq (%[last],%[step],4), %[last]\n\t"
        "addq $256, %[b]\n\tsubq $4, %[depth]\n\tjne 1b"
        : INTEGER_SUMS, [a] "+r"(a), [last] "+r"(last), [b] "+r"(b), [depth] "+r"(depth)
        : [step] "r"(a_step)
        : INTEGER_CLOBBERS);
#undef ACROSS
}
#undef INTEGER_STEP
#undef INTEGER_SUMS
#undef INTEGER_CLOBBERS

// Four rows by two vectors: either rows of A or their steps are neighbours.
template <class Epilogue>
INLINE void integer_block(
    const char* a, ptrdiff_t a_row, ptrdiff_t a_step, const float* b, int depth, int row, const Epilogue& epilogue) {
    F acc[4][2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) acc[i / 2][i % 2] = set1(0.0f);
    if (a_step == sizeof(int))
        add_rows(acc, a + row * a_row, a_row, b, depth);
    else
        add_columns(acc, a + row * a_row, a_step, b, depth);
    epilogue.template store<4, 2>(row, 0, acc);
}

// Rows are a multiple of 8.
template <int C, class Epilogue>
void multiply_integers(
    const char* a, ptrdiff_t a_row, ptrdiff_t a_step, int rows, const float* b, ptrdiff_t b_step, int depth,
    const Epilogue& epilogue) {
    if constexpr (C == 2) {
        for (int row = 0; row < rows; row += 4) integer_block(a, a_row, a_step, b, depth, row, epilogue);
    } else {
        for (int row = 0; row < rows; row += 8)
            register_block<IntegerProduct, 8, C>(a, a_row, a_step, b, b_step, depth, row, 0, epilogue);
    }
}

#endif

#endif

}  // namespace

// Products of 16 x 16 blocks on the processor's matrix unit (Intel AMX), of bf16 pairs with fp32 sums:
//
//   C[row][column] = sum over pairs p of A[row][p] . B[p][column]
//
// with 16 rows and 16 pairs of A, 16 pairs and 16 columns of B in one instruction. Rows of A are 64 bytes of 32 neighbouring
// numbers, as keys lie in memory; rows of B are 16 pairs side by side, which is how tiles keep queries and weights.
//
// EMULATE_AMX, a macro of the tests, computes the same with loops on processors that have no such unit. With EMULATE_BF16
// (bf16.h) they need no instructions for bf16 either.
#pragma once

#include "vector.h"

#if HAS_BF16 && (defined(__AMX_BF16__) || defined(EMULATE_AMX))
#define HAS_AMX 1
#else
#define HAS_AMX 0
#endif

// Rows, pairs and columns of a register.
constexpr int AMX_ROWS = 16;
// What dimensions and keys of attention are multiples of, for whole registers in every direction.
constexpr int AMX_STEP = 2 * AMX_ROWS;

#if HAS_AMX

#ifdef EMULATE_AMX

static thread_local float amx_register[8][16][16];

#define AMX_ZERO(c) memset(amx_register[c], 0, sizeof amx_register[c])
#define AMX_LOAD(r, from, stride) \
    for (int i = 0; i < 16; ++i) memcpy(amx_register[r][i], (const char*)(from) + i * (stride), 64)
#define AMX_STORE(r, to, stride) \
    for (int i = 0; i < 16; ++i) memcpy((char*)(to) + i * (stride), amx_register[r][i], 64)
#define AMX_DOT(c, a, b) amx_dot(amx_register[c], amx_register[a], amx_register[b])

static void amx_dot(float c[16][16], const float a[16][16], const float b[16][16]) {
    for (int p = 0; p < 16; ++p)
        for (int i = 0; i < 16; ++i)
            for (int j = 0; j < 16; ++j) {
                BFloat16 x[2], y[2];
                memcpy(x, &a[i][p], 4);
                memcpy(y, &b[p][j], 4);
                c[i][j] += widen(x[0]) * widen(y[0]);
                c[i][j] += widen(x[1]) * widen(y[1]);
            }
}

struct AmxSession {
    AmxSession() {}
};

#else

#include <immintrin.h>

#define AMX_ZERO(c) _tile_zero(c)
#define AMX_LOAD(r, from, stride) _tile_loadd(r, from, stride)
#define AMX_STORE(r, to, stride) _tile_stored(r, to, stride)
#define AMX_DOT(c, a, b) _tile_dpbf16ps(c, a, b)

// While it lives, this thread's eight registers have 16 rows of 64 bytes. Others in the thread set up registers of their own.
struct AmxSession {
    AmxSession() {
        struct alignas(64) {
            uint8_t palette, start_row, reserved[14];
            uint16_t bytes_of_row[16];
            uint8_t rows[16];
        } layout = {};
        layout.palette = 1;
        for (int r = 0; r < 8; ++r) {
            layout.bytes_of_row[r] = 64;
            layout.rows[r] = AMX_ROWS;
        }
        asm volatile("" : : "r"(&layout) : "memory");  // g++'s intrinsic says that it reads the first eight bytes
        _tile_loadconfig(&layout);
    }
    ~AmxSession() { _tile_release(); }
    AmxSession(const AmxSession&) = delete;
    AmxSession& operator=(const AmxSession&) = delete;
};

#endif

// A: `row` bytes from one row to the next, `rows16` to the next 16 rows, `pairs16` to the next 16 pairs.
struct AmxRows {
    const char* at;
    ptrdiff_t row, rows16, pairs16;
};

// What was written before is in memory for the unit: compilers do not see all that its instructions read.
INLINE void amx_publish(const void* written) { asm volatile("" : : "r"(written) : "memory"); }

// Registers 0 to 3 hold 32 x 32 numbers of C: two of rows by two of columns, of which the second may be unused.
INLINE void amx_clear_sums() {
    AMX_ZERO(0);
    AMX_ZERO(1);
    AMX_ZERO(2);
    AMX_ZERO(3);
}

// 16 pairs of A, its second 16 rows `rows16` bytes behind the first, times 16 rows of B.
INLINE void amx_add_products(
    const char* a, ptrdiff_t a_row, ptrdiff_t rows16, const float* b, ptrdiff_t b_row, bool second_rows,
    bool second_columns) {
    AMX_LOAD(4, a, a_row);
    AMX_LOAD(6, b, b_row);
    AMX_DOT(0, 4, 6);
    if (second_columns) {
        AMX_LOAD(7, b + AMX_ROWS, b_row);
        AMX_DOT(1, 4, 7);
    }
    if (second_rows) {
        AMX_LOAD(5, a + rows16, a_row);
        AMX_DOT(2, 5, 6);
        if (second_columns) AMX_DOT(3, 5, 7);
    }
}

// From rows `stride` floats apart.
INLINE void amx_load_sums(const float* from, ptrdiff_t stride, bool second_rows, bool second_columns) {
    const ptrdiff_t row = stride * (ptrdiff_t)sizeof(float);
    AMX_LOAD(0, from, row);
    if (second_columns) AMX_LOAD(1, from + AMX_ROWS, row);
    if (second_rows) {
        AMX_LOAD(2, from + AMX_ROWS * stride, row);
        if (second_columns) AMX_LOAD(3, from + AMX_ROWS * stride + AMX_ROWS, row);
    }
}

// To rows `stride` floats apart.
INLINE void amx_store_sums(float* to, ptrdiff_t stride, bool second_rows, bool second_columns) {
    const ptrdiff_t to_row = stride * (ptrdiff_t)sizeof(float);
    AMX_STORE(0, to, to_row);
    if (second_columns) AMX_STORE(1, to + AMX_ROWS, to_row);
    if (second_rows) {
        AMX_STORE(2, to + AMX_ROWS * stride, to_row);
        if (second_columns) AMX_STORE(3, to + AMX_ROWS * stride + AMX_ROWS, to_row);
    }
}

// C as it is.
struct AmxMatrix {
    float* to;
    ptrdiff_t stride;
    float* at(int row, int column) const { return to + row * stride + column; }
    void finish(int, int, int, int) const {}
};

// Where 32 x 32 numbers of C go: `at(row, column)`, `stride` floats apart, and what becomes of them there. ADD: to what is there.
template <bool ADD = false, class Target>
static void amx_multiply(
    const AmxRows& a, int rows, const float* b, ptrdiff_t ld, int pairs, int columns, const Target& target) {
    const ptrdiff_t b_row = ld * (ptrdiff_t)sizeof(float);
    amx_publish(b);
    for (int r = 0; r < rows; r += 2 * AMX_ROWS) {
        const bool second_rows = r + AMX_ROWS < rows;
        const char* const a_rows = a.at + r / AMX_ROWS * a.rows16;
        for (int c = 0; c < columns; c += 2 * AMX_ROWS) {
            const bool second_columns = c + AMX_ROWS < columns;
            if constexpr (ADD)
                amx_load_sums(target.at(r, c), target.stride, second_rows, second_columns);
            else
                amx_clear_sums();
            for (int p = 0; p < pairs; p += AMX_ROWS)
                amx_add_products(
                    a_rows + p / AMX_ROWS * a.pairs16, a.row, a.rows16, b + p * ld + c, b_row, second_rows,
                    second_columns);
            amx_store_sums(target.at(r, c), target.stride, second_rows, second_columns);
            target.finish(r, c, second_rows ? 2 * AMX_ROWS : AMX_ROWS, second_columns ? 2 : 1);
        }
    }
}

// to[keys / 32][head_dim / 16] blocks of 16 dimensions x 32 keys: the values' transpose, as A wants it.
[[maybe_unused]] static void transpose_value_pairs(const char* from, ptrdiff_t stride, int keys, int head_dim, float* to) {
    for (int k = 0; k < keys; k += 2 * AMX_ROWS)
        for (int d = 0; d < head_dim; d += AMX_ROWS, to += AMX_ROWS * AMX_ROWS) {
            F x[AMX_ROWS];
#pragma GCC unroll 16
            for (int i = 0; i < AMX_ROWS; ++i) {
                const char* const row = from + (k + 2 * i) * stride;
                x[i] = interleave_first((const BFloat16*)row + d, (const BFloat16*)(row + stride) + d, AMX_ROWS);
            }
            transpose(x);
#pragma GCC unroll 16
            for (int i = 0; i < AMX_ROWS; ++i) store(to + i * AMX_ROWS, x[i]);
        }
}

#else

struct AmxSession {
    AmxSession() {}
};

#endif

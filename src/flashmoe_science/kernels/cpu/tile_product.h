// One tile of C = A B from rows that lie anywhere: gathered tokens, slots of one expert, weights.
//
// Parts of the depth are packed, A for the broadcast and B with its lanes along the columns (gemm.h), and added to the tile
// in their order: the sum does not depend on who computes the tile. A's rows lie along the depth, or across it: then a row
// holds one element of each of the tile's rows, as in a product with the transpose.
//
// On the matrix unit (amx.h) the same packed parts are multiplied, of bf16: A's rows as they are, or across it turned once more.
#pragma once

#include "amx.h"
#include "gemm.h"

constexpr int TILE_ROWS = 96;
constexpr int TILE_COLUMNS = 128;
constexpr int TILE_DEPTH = 256;

// A thread's own memory. Vectors are loaded from it.
struct TileMemory {
    float a[TILE_ROWS * TILE_DEPTH];
    float b[TILE_DEPTH * TILE_COLUMNS];
    float c[TILE_ROWS * TILE_COLUMNS];
};

// Elements as fp32 numbers.
template <class T>
struct WidenedTile {
    typedef T Element;
    typedef FloatProduct Product;
    static constexpr int DEPTH_STEP = 1;

    template <class Row>
    static void pack_along(float* to, ptrdiff_t ld, int rows, int count, const Row& row) {
        for (int i = 0; i < rows; ++i) {
            const T* const from = row(i);
            for (int j = 0; j < count; j += W) store(to + i * ld + j, load_first(from + j, W));
        }
    }

    template <class Row>
    static void pack_across(float* to, ptrdiff_t ld, int depth, int count, const Row& row) {
        pack_along(to, ld, depth, count, row);
    }
};

#if HAS_BF16
// Neighbours along the depth as pairs, an odd last one with zero.
struct PairedTile {
    typedef BFloat16 Element;
    typedef PairProduct Product;
    static constexpr int DEPTH_STEP = 2;

    template <class Row>
    static void pack_along(float* to, ptrdiff_t ld, int rows, int count, const Row& row) {
        for (int i = 0; i < rows; ++i) memcpy(to + i * ld, row(i), count * sizeof(BFloat16));
    }

    template <class Row>
    static void pack_across(float* to, ptrdiff_t ld, int depth, int count, const Row& row) {
        for (int k = 0; k < depth; k += 2) {
            const BFloat16* const low = row(k);
            const BFloat16* const high = k + 1 < depth ? row(k + 1) : nullptr;
            for (int j = 0; j < count; j += W)
                store(to + k / 2 * ld + j, interleave_first(low + j, high ? high + j : nullptr, W));
        }
    }
};
#endif

// Adds the packed parts' product to memory.c, or begins it.
template <class Tile, bool ACROSS>
static void multiply_parts(TileMemory& memory, int rows, int columns, int depth, bool begins) {
    constexpr int STEP = Tile::DEPTH_STEP;
    constexpr ptrdiff_t ALONG = TILE_DEPTH / STEP;
    const ptrdiff_t a_row = ACROSS ? 4 : ALONG * 4, a_step = ACROSS ? TILE_ROWS * 4 : 4;
    multiply<typename Tile::Product>(
        (const char*)memory.a, a_row, a_step, rows, memory.b, TILE_COLUMNS, (depth + STEP - 1) / STEP, 0, columns / W,
        SumEpilogue{memory.c, TILE_COLUMNS, begins});
}

#if HAS_AMX
// Sums of the tile, in its place, or made beside it and added.
struct TileSums {
    float* c;
    float* beside;  // null, or 32 x 32
    ptrdiff_t stride;
    float* at(int row, int column) const { return beside ? beside : c + row * TILE_COLUMNS + column; }
    void finish(int row, int column, int rows, int vectors) const {
        if (!beside) return;
        for (int r = 0; r < rows; ++r)
            for (int v = 0; v < vectors; ++v) {
                float* const to = c + (row + r) * TILE_COLUMNS + column + v * W;
                store(to, add(load(to), load(beside + r * stride + v * W)));
            }
    }
};

// The same on the matrix unit. Rows of a register that the tile does not have are computed from what is there, and not read.
template <bool ACROSS>
static void multiply_pairs_on_amx(TileMemory& memory, int rows, int columns, int depth, bool begins) {
    constexpr ptrdiff_t ALONG = TILE_DEPTH / 2;
    constexpr int SIDE = 2 * AMX_ROWS;
    static_assert(TILE_ROWS % SIDE == 0 && TILE_COLUMNS % SIDE == 0 && ALONG % AMX_ROWS == 0, "");
    const int pairs = (depth + 1) / 2, whole = (pairs + AMX_ROWS - 1) / AMX_ROWS * AMX_ROWS;
    // Pairs leave half of a's room.
    float* const a = ACROSS ? memory.a + TILE_ROWS * ALONG : memory.a;
    if constexpr (ACROSS) {
        for (int r = 0; r < rows; r += W)
            for (int p = 0; p < whole; p += W) {
                F x[W];
#pragma GCC unroll 16
                for (int i = 0; i < W; ++i) x[i] = p + i < pairs ? load(memory.a + (p + i) * TILE_ROWS + r) : set1(0.0f);
                transpose(x);
#pragma GCC unroll 16
                for (int i = 0; i < W; ++i) store(a + (r + i) * ALONG + p, x[i]);
            }
    } else {
        for (int r = 0; r < rows; ++r) memset(a + r * ALONG + pairs, 0, (whole - pairs) * sizeof(float));
    }
    for (int p = pairs; p < whole; ++p) memset(memory.b + p * TILE_COLUMNS, 0, columns * sizeof(float));
    alignas(64) float beside[SIDE * SIDE];
    const AmxRows of_a = {(const char*)a, ALONG * 4, AMX_ROWS * ALONG * 4, 64};
    amx_publish(a);
    amx_multiply(
        of_a, rows, memory.b, TILE_COLUMNS, whole, columns,
        begins ? TileSums{memory.c, nullptr, TILE_COLUMNS} : TileSums{memory.c, beside, SIDE});
}

struct MatrixTile : PairedTile {};
template <>
inline void multiply_parts<MatrixTile, false>(TileMemory& memory, int rows, int columns, int depth, bool begins) {
    multiply_pairs_on_amx<false>(memory, rows, columns, depth, begins);
}
template <>
inline void multiply_parts<MatrixTile, true>(TileMemory& memory, int rows, int columns, int depth, bool begins) {
    multiply_pairs_on_amx<true>(memory, rows, columns, depth, begins);
}
typedef MatrixTile BFloat16Tile;
#elif HAS_BF16
typedef PairedTile BFloat16Tile;
#else
typedef WidenedTile<BFloat16> BFloat16Tile;
#endif

// memory.c[rows][columns] of row length TILE_COLUMNS. a(i) is the tile's row i at depth 0, or with ACROSS depth i at the
// tile's first row; b(k) is depth k at the tile's first column. `columns`, and what lies along a row of A (`depth`, or with
// ACROSS `rows`), are multiples of 16.
template <class Tile, bool ACROSS, class A, class B>
static void multiply_tile(TileMemory& memory, int rows, int columns, int64_t depth, const A& a, const B& b) {
    constexpr ptrdiff_t ALONG = TILE_DEPTH / Tile::DEPTH_STEP;
    for (int64_t begin = 0; begin < depth; begin += TILE_DEPTH) {
        const int part = (int)(depth - begin < TILE_DEPTH ? depth - begin : TILE_DEPTH);
        if constexpr (ACROSS)
            Tile::pack_across(memory.a, TILE_ROWS, part, rows, [&](int k) { return a(begin + k); });
        else
            Tile::pack_along(memory.a, ALONG, rows, part, [&](int i) { return a(i) + begin; });
        Tile::pack_across(memory.b, TILE_COLUMNS, part, columns, [&](int k) { return b(begin + k); });
        multiply_parts<Tile, ACROSS>(memory, rows, columns, part, begin == 0);
    }
    if (depth == 0)
        for (int i = 0; i < rows; ++i) memset(memory.c + (ptrdiff_t)i * TILE_COLUMNS, 0, columns * sizeof(float));
}

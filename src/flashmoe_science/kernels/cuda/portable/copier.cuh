// Copies of tiles from global to shared memory, by all threads of a block.
#pragma once
#include "portable/tile_shape.cuh"
#include "ptx/cp_async.cuh"

constexpr int power_of_two_above(int x) {
    int p = 1;
    while (p < x) p *= 2;
    return p;
}

// Where a row of a tile comes from. One that is not valid is not read; it becomes zero.
struct RowSource {
    const char* address;
    bool valid;
};

// How the threads of a block share the copy of a tile with rows of Dim elements: every thread owns one chunk column and
// every kRowsPerPass-th row from its first on.
template <int Dim>
struct Copier {
    using Layout = Tile<Dim>;
    static constexpr int kColumns = power_of_two_above(Layout::kChunks);
    static constexpr int kRowsPerPass = kThreads / kColumns;

    int first;           // row
    bool active;         // this thread's column exists in the tile
    bool valid;          // and in the tensor; a column of padding is filled with zeros
    uint32 offset;       // of the thread's first chunk in a tile
    int64 global_offset;  // of its column in a row, bytes

    __device__ __forceinline__ explicit Copier(int head_dim) {
        const int column = threadIdx.x % kColumns;
        first = threadIdx.x / kColumns;
        active = column < Layout::kChunks;
        valid = column < head_dim / kChunkElements;
        offset = Layout::offset(first, column);
        global_offset = column * kChunkBytes;
    }

    // `source`: the thread's chunk in the tile's first pass. Rows from `rows` on become zero; they are not read.
    template <int Rows, bool Whole>
    __device__ __forceinline__ void copy(uint32 tile, const char* source, int64 row_bytes, int rows) const {
        if (Layout::kChunks != kColumns && !active) return;
        constexpr int passes = (Rows + kRowsPerPass - 1) / kRowsPerPass;
        const int remaining = valid ? rows - first : 0;
        const int column = threadIdx.x % kColumns;
#pragma unroll
        for (int i = 0; i < passes; ++i) {
            constexpr bool exact = Rows % kRowsPerPass == 0;
            if (exact || first + i * kRowsPerPass < Rows) {
                const uint32 target = kRowsPerPass % 8 == 0 ? offset + i * kRowsPerPass * Layout::kRowBytes
                                                            : Layout::offset(first + i * kRowsPerPass, column);
                copy_chunk(tile + target, source, Whole ? valid : i * kRowsPerPass < remaining);
            }
            source += kRowsPerPass * row_bytes;
        }
    }

    // Every row from an address of its own. `source(row)`: a `RowSource`.
    template <int Rows, typename Source>
    __device__ __forceinline__ void copy_rows(uint32 tile, const Source& source) const {
        if (Layout::kChunks != kColumns && !active) return;
        const int column = threadIdx.x % kColumns;
#pragma unroll
        for (int i = 0; i < (Rows + kRowsPerPass - 1) / kRowsPerPass; ++i) {
            const int row = first + i * kRowsPerPass;
            if (Rows % kRowsPerPass == 0 || row < Rows) {
                const uint32 target = kRowsPerPass % 8 == 0 ? offset + i * kRowsPerPass * Layout::kRowBytes
                                                            : Layout::offset(row, column);
                const auto from = source(row);
                copy_chunk(tile + target, from.address + global_offset, valid && from.valid);
            }
        }
    }
};

// Asynchronous copies of rows from global memory into a swizzled tile, shared among the threads of a block.
#pragma once
#include "ptx/cp_async.cuh"
#include "ptx/special_registers.cuh"
#include "swizzle.cuh"
#include "types.cuh"

constexpr int power_of_two_above(int x) {
    int p = 1;
    while (p < x) p *= 2;
    return p;
}

// Every thread owns one chunk column and every kRowsPerPass-th row from its first on. Made anew for every copy, so that
// nothing of it is held in registers between two.
template <int HeadDim, int Threads>
struct TileCopy {
    using T = Tile<HeadDim>;
    static constexpr int kColumns = power_of_two_above(T::kChunks);
    static constexpr int kRowsPerPass = Threads / kColumns;

    int first;      // row
    int column;     // chunk
    bool valid;     // the column is in the tensor; one of padding is filled with zeros
    uint32 offset;  // of the thread's first chunk in a tile

    __device__ __forceinline__ explicit TileCopy(int head_dim) {
        const int thread = thread_index();
        column = thread % kColumns;
        first = thread / kColumns;
        valid = column < head_dim / kChunkElements;
        offset = T::offset(first, column);
    }

    // `source`: the tile's first row. Rows from `rows` on become zero; they are not read.
    template <int Rows>
    __device__ __forceinline__ void copy(uint32 tile, const char* source, int64 row_bytes, int rows) const {
        if (T::kChunks != kColumns && column >= T::kChunks) return;
        constexpr int passes = (Rows + kRowsPerPass - 1) / kRowsPerPass;
        const int remaining = valid ? rows - first : 0;
        source += first * row_bytes + column * kChunkBytes;
#pragma unroll
        for (int i = 0; i < passes; ++i) {
            constexpr bool exact = Rows % kRowsPerPass == 0;
            if (exact || first + i * kRowsPerPass < Rows) {
                const uint32 target = kRowsPerPass % 8 == 0 ? offset + i * kRowsPerPass * T::kRowBytes
                                                            : T::offset(first + i * kRowsPerPass, column);
                copy_chunk(tile + target, source, i * kRowsPerPass < remaining);
            }
            source += kRowsPerPass * row_bytes;
        }
    }
};

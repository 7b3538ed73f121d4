// Shared-memory tiles of 16-bit elements, row by row, with the 16-byte chunks of a row permuted by XOR so that
// eight rows of one chunk column lie in eight different bank groups: cp.async, ldmatrix and ldmatrix.trans
// are then free of bank conflicts.
#pragma once
#include "types.cuh"

template <int HeadDim>
struct Tile {
    static constexpr int kChunks = HeadDim / kChunkElements;           // chunks that hold data
    static constexpr int kRowBytes = (HeadDim + 31) / 32 * 32 * kElementBytes;
    // A row of n x 128 bytes starts in bank 0, so its row number is mixed into three bits of the chunk number;
    // a row of n x 128 + 64 bytes starts alternately in banks 0 and 16, and two bits are enough.
    static constexpr int kBits = kRowBytes % 128 == 0 ? 3 : 2;

    static __device__ __forceinline__ constexpr int mix(int row) {
        return kBits == 3 ? (row & 7) : ((row >> 1) & 3);
    }

    // Byte offset of a chunk.
    static __device__ __forceinline__ constexpr int offset(int row, int chunk) {
        return row * kRowBytes + ((chunk ^ mix(row)) << 4);
    }

    // The address `pairs` x 2 chunks to the right of `address`, which is that of chunk 0 or 1 of a row.
    static __device__ __forceinline__ constexpr uint32 advance(uint32 address, int pairs) {
        constexpr int per_group = 1 << (kBits - 1);
        return (address ^ ((pairs % per_group) << 5)) + (pairs / per_group) * (per_group << 5);
    }
};

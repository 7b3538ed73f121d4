// What one lane of the small-shape kernel holds: pieces of rows, tiles of keys and values, quads of the output.
#pragma once
#include "ptx/global.cuh"
#include "small/fragments.cuh"
#include "small/parameters.cuh"

namespace {

// Where a packed query row lies.
struct Row {
    int position, head;  // head within the group
};

__device__ __forceinline__ Row locate(int row, const Parameters& p) {
    if (p.group == 1) return {row, 0};
    const int position = static_cast<int>(__umulhi(static_cast<uint32>(row), p.group_magic));
    return {position, row - position * p.group};
}

// One past the last key that a query sees.
__device__ __forceinline__ int key_limit(int row, const Parameters& p) {
    return min(p.seqlen_k, locate(row, p).position + 1 + p.past);
}

__device__ __forceinline__ int head_dim(const Parameters& p) { return PADDED ? p.head_dim : HEAD_DIM; }

// Strides and indices have 32 bits, their product 64.
__device__ __forceinline__ uint64 offset_of(int index, uint32 stride) {
    return static_cast<uint64>(static_cast<uint32>(index)) * stride;
}

// What one lane holds of a row that `Lanes` lanes share: every Lanes-th 16-byte chunk. Chunks past the head dimension
// repeat the last one: keys are zeroed there before use (`KeyTile::chunk`), of values the result is not written.
template <int Lanes>
struct RowPieces {
    static constexpr int kPieces = (HEAD_DIM + 8 * Lanes - 1) / (8 * Lanes);

    Chunk piece[kPieces];

    __device__ __forceinline__ void load_from(const char* row, int lane, int dims) {
        const char* const first = row + kChunkBytes * lane;
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            if (!PADDED && 8 * Lanes * (i + 1) <= HEAD_DIM)
                piece[i] = load_global(first + kChunkBytes * Lanes * i);
            else
                piece[i] = load_global(row + kChunkBytes * min(Lanes * i + lane, dims / 8 - 1));
        }
    }
};

// One tile of 16 keys. Keys past the end repeat the last one: their scores are masked, and no memory outside the tensor
// is read.
struct KeyTile {
    RowPieces<4> rows[2];  // keys g and g + 8

    __device__ __forceinline__ void load_from(const char* base, uint32 stride, int tile, const Parameters& p, int lane) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int key = min(16 * tile + lane / 4 + 8 * half, p.seqlen_k - 1);
            rows[half].load_from(base + offset_of(key, stride), lane % 4, head_dim(p));
        }
    }

    // The query is zero past the head dimension, but zero times a repeated infinity or NaN would be NaN.
    __device__ __forceinline__ Chunk chunk(int half, int i, const Parameters& p, int lane) const {
        const bool inside = (!PADDED && 32 * i + 32 <= HEAD_DIM) || 32 * i + 8 * (lane % 4) < head_dim(p);
        const Chunk& x = rows[half].piece[i];
        return {inside ? x.x : 0, inside ? x.y : 0, inside ? x.z : 0, inside ? x.w : 0};
    }
};

// Values of keys past the end repeat the last one until `clear_past_end`.
struct ValueTile {
    RowPieces<8> rows[4];  // keys 2t, 2t + 1, 2t + 8, 2t + 9

    __device__ __forceinline__ void load_from(const char* base, uint32 stride, int tile, const Parameters& p, int lane) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int key = min(16 * tile + 2 * (lane % 4) + i % 2 + 8 * (i / 2), p.seqlen_k - 1);
            rows[i].load_from(base + offset_of(key, stride), lane / 4, head_dim(p));
        }
    }

    // Their probabilities are zero, but zero times a repeated infinity or NaN would be NaN. Apart from the load, which
    // nothing may wait for before the others are issued, and passed over where the tile is whole.
    __device__ __forceinline__ void clear_past_end(int tile, const Parameters& p, int lane) {
        if (16 * tile + 16 <= p.seqlen_k) return;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const bool inside = 16 * tile + 2 * (lane % 4) + i % 2 + 8 * (i / 2) < p.seqlen_k;
#pragma unroll
            for (int j = 0; j < RowPieces<8>::kPieces; ++j) {
                Chunk& x = rows[i].piece[j];
                x = {inside ? x.x : 0, inside ? x.y : 0, inside ? x.z : 0, inside ? x.w : 0};
            }
        }
    }
};

using Quad = QuadOf<kDimGroups>;

}  // namespace

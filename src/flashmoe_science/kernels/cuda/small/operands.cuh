// What one lane of the small-shape kernel holds: pieces of rows, tiles of keys and values, quads of the output.
#pragma once
#include "ptx/global.cuh"
#include "small/parameters.cuh"

namespace {

// A maximum that may be subtracted: exp2(-inf - 0) is 0 where exp2(-inf - -inf) would be NaN.
__device__ __forceinline__ float finite_maximum(float x) { return x == NEGATIVE_INFINITY ? 0.0f : x; }

__device__ __forceinline__ uint32 word(const Chunk& x, int i) {
    return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

// Lanes with the same t hold different keys of the same queries.
__device__ __forceinline__ float max_over_keys(float x) {
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, mask));
    return x;
}

__device__ __forceinline__ float sum_over_keys(float x) {
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
    return x;
}

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

// Quad q of a lane: four consecutive dims of one query, in the order in which the partial results lie in memory.
struct Quad {
    int row_tile, group, column, half;

    __device__ __forceinline__ explicit Quad(int q)
        : row_tile(q / (4 * kDimGroups)), group(q / 4 % kDimGroups), column(q / 2 % 2), half(q % 2) {}

    __device__ __forceinline__ int row(int lane) const { return 8 * row_tile + 2 * (lane % 4) + column; }
    __device__ __forceinline__ int dim(int lane) const { return 64 * group + 8 * (lane / 4) + 4 * half; }
};

__device__ __forceinline__ void accumulate(float4& sum, float weight, const float4& x) {
    sum.x = fmaf(weight, x.x, sum.x);
    sum.y = fmaf(weight, x.y, sum.y);
    sum.z = fmaf(weight, x.z, sum.z);
    sum.w = fmaf(weight, x.w, sum.w);
}

}  // namespace

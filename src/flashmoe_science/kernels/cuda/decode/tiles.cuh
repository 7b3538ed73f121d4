// What one lane holds of a tile of 16 keys or values, and where in a cache it is read.
//
// PAGES (macro): 0: keys of a sequence lie one after another; 1: so do the 16 of a tile, in a page; 2: each key is looked up.
#pragma once
#include "decode/schedule.cuh"
#include "ptx/global.cuh"

namespace {

// Strides and indices have 32 bits, their product 64.
__device__ __forceinline__ uint64 offset_of(int index, uint32 stride) {
    return static_cast<uint64>(static_cast<uint32>(index)) * stride;
}

// Tiles past the end repeat the last one: their scores are masked, and only keys of the segment are read.
__device__ __forceinline__ int inside(const Segment& segment, int tile) {
    return min(tile, (segment.last_key - 1) / kTileKeys);
}

// The page of a tile; with PAGES 2 that of its key lane % 16.
__device__ __forceinline__ int look_up(const Parameters& p, const Segment& segment, int tile, int lane) {
    if (PAGES == 0) return 0;
    int key = kTileKeys * inside(segment, tile);
    if (PAGES == 2) key = min(max(key + lane % kTileKeys, segment.first_key), segment.last_key - 1);
    return p.pages[segment.sequence * p.pages_row + static_cast<uint32>(key) / static_cast<uint32>(p.page_size)];
}

// The rows of one tile of keys or values.
class Rows {
    const char* base_;
    uint32 row_;
    int last_;  // row that is read in place of those past the end
    uint64 page_bytes_;
    int page_, first_, page_size_, first_key_;

public:
    __device__ __forceinline__ Rows(const char* cache, const Cache& strides, const Parameters& p, const Segment& segment,
                                    int tile, int page)
        : base_(cache + segment.head * strides.head), row_(strides.row), page_bytes_(strides.page), page_(page) {
        first_ = kTileKeys * inside(segment, tile);
        last_ = segment.last_key - 1 - first_;
        page_size_ = p.page_size;
        first_key_ = segment.first_key - first_;
        if (PAGES == 0) base_ += offset_of(segment.key_start + first_, row_);
        if (PAGES == 1) {
            const int within = static_cast<uint32>(first_) % static_cast<uint32>(page_size_);
            base_ += static_cast<uint64>(static_cast<uint32>(page)) * page_bytes_ + offset_of(within, row_);
        }
    }

    // All lanes, `row` below 16.
    __device__ __forceinline__ const char* at(int row) const {
        if (PAGES < 2) return base_ + offset_of(min(row, last_), row_);
        const int page = __shfl_sync(0xffffffffu, page_, row);
        const int key = first_ + min(max(row, first_key_), last_);
        const int within = static_cast<uint32>(key) % static_cast<uint32>(page_size_);
        return base_ + static_cast<uint64>(static_cast<uint32>(page)) * page_bytes_ + offset_of(within, row_);
    }
};

// What one lane holds of a row that `Lanes` lanes share: every Lanes-th 16-byte chunk. Chunks past the dimension repeat the
// last one: keys are zeroed there before use (`KeyTile::chunk`), of values the result is not written.
template <int Lanes, int Dim>
struct RowPieces {
    static constexpr int kPieces = (Dim + 8 * Lanes - 1) / (8 * Lanes);

    Chunk piece[kPieces];

    __device__ __forceinline__ void load_from(const char* row, int lane) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            const bool whole = 8 * Lanes * (i + 1) <= Dim;
            piece[i] = load_global(row + kChunkBytes * (whole ? Lanes * i + lane : min(Lanes * i + lane, Dim / 8 - 1)));
        }
    }
};

__device__ __forceinline__ void clear_unless(bool keep, Chunk& x) {
    x = {keep ? x.x : 0, keep ? x.y : 0, keep ? x.z : 0, keep ? x.w : 0};
}

struct KeyTile {
    RowPieces<4, HEAD_DIM> rows[2];  // keys g and g + 8

    __device__ __forceinline__ void load_from(const Rows& from, int lane) {
#pragma unroll
        for (int half = 0; half < 2; ++half) rows[half].load_from(from.at(lane / 4 + 8 * half), lane % 4);
    }

    // The query is zero past the head dimension, but zero times a repeated infinity or NaN would be NaN.
    __device__ __forceinline__ Chunk chunk(int half, int i, int lane) const {
        Chunk x = rows[half].piece[i];
        if (32 * i + 32 > HEAD_DIM) clear_unless(32 * i + 8 * (lane % 4) < HEAD_DIM, x);
        return x;
    }
};

struct ValueTile {
    RowPieces<8, VALUE_DIM> rows[4];  // keys 2t, 2t + 1, 2t + 8, 2t + 9

    static __device__ __forceinline__ int row(int i, int lane) { return 2 * (lane % 4) + i % 2 + 8 * (i / 2); }

    __device__ __forceinline__ void load_from(const Rows& from, int lane) {
#pragma unroll
        for (int i = 0; i < 4; ++i) rows[i].load_from(from.at(row(i, lane)), lane / 4);
    }

    // Probabilities of keys that no row sees are zero, but zero times an infinity or NaN would be NaN. Apart from the load,
    // which nothing may wait for before the others are issued, and passed over where the tile is whole.
    __device__ __forceinline__ void clear_unseen(int tile, const Segment& segment, int lane) {
        const int first = kTileKeys * tile;
        if (first >= segment.first_key && first + kTileKeys <= segment.last_key) return;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int key = first + row(i, lane);
            const bool seen = key >= segment.first_key && key < segment.last_key;
#pragma unroll
            for (int j = 0; j < RowPieces<8, VALUE_DIM>::kPieces; ++j) clear_unless(seen, rows[i].piece[j]);
        }
    }
};

}  // namespace

// What one lane holds of a tile of 16 keys or values, and where in a cache it is read.
//
// CACHE (macro): 0: elements of the query's type; 1: e4m3 with a scale for each head; 2: with one for each key and head.
// PAGES (macro): 0: keys of a sequence lie one after another; 1: so do the 16 of a tile, in a page; 2: each key is looked up.
// QUEUE (macro): 0: lanes load what they multiply to registers; else they copy it to shared memory so many passes ahead, a
// warp its own tiles, so that nobody else waits for it. With PAGES 0 or 1 and CACHE 0, or 1 and PAIRS; may be left out.
#pragma once
#include "decode/schedule.cuh"
#include "ptx/fp8.cuh"
#include "ptx/global.cuh"
#include "small/fragments.cuh"
#ifndef QUEUE
#define QUEUE 0
#endif

namespace {

// Tiles past the end repeat the last one: their scores are masked, and only keys of the segment are read.
__device__ __forceinline__ int inside(const Segment& segment, int tile) {
    return min(tile, (segment.last_key - 1) / kTileKeys);
}

// The i-th tile of a warp in a pass; any further i is one of a later pass.
__device__ __forceinline__ int tile_of_warp(const Segment& segment, int warp, int pass, int i) {
    return segment.tile + warp + WARPS * (KEY_TILES * pass + i);
}

// The page of a tile, which is one that some row sees; with PAGES 2 that of its key lane % 16.
__device__ __forceinline__ int look_up(const Parameters& p, const Segment& segment, int tile, int lane) {
    if (PAGES == 0) return 0;
    int key = kTileKeys * inside(segment, tile);
#if HIDDEN_TILES  // and PAGES 1
    key = max(key, segment.first_key);
#endif
    if (PAGES == 2) key = min(max(key + lane % kTileKeys, segment.first_key), segment.last_key - 1);
    return p.pages[segment.sequence * p.pages_row + divide(key, p.by_page)];
}

// Where the rows of one tile of keys or values are.
class Rows {
    const char* base_;  // the first row's; with PAGES 2 that of row lane % 16
    uint32 row_;
    int last_;  // row that is read in place of those past the end

public:
    // All that takes long, ahead of the loads.
    __device__ __forceinline__ void find(const char* cache, const Cache& strides, const Parameters& p,
                                         const Segment& segment, int tile, int page, int lane) {
        const int first = kTileKeys * inside(segment, tile);
        base_ = cache + static_cast<uint32>(segment.head) * strides.head;
        row_ = strides.row;
        last_ = segment.last_key - 1 - first;
        if (PAGES == 0) {
            base_ += offset_of(segment.key_start + first, row_);
            return;
        }
        int key = first;
        if (PAGES == 2) key = min(max(key + lane % kTileKeys, segment.first_key), segment.last_key - 1);
        const int within = key - divide(key, p.by_page) * p.page_size;
        base_ += static_cast<uint64>(static_cast<uint32>(page)) * strides.page + offset_of(within, row_);
    }

    // All lanes, `row` below 16.
    __device__ __forceinline__ const char* at(int row) const {
        if (PAGES < 2) return base_ + offset_of(min(row, last_), row_);
        const uint64 address = reinterpret_cast<uint64>(base_);
        const uint32 low = __shfl_sync(0xffffffffu, static_cast<uint32>(address), row);
        const uint32 high = __shfl_sync(0xffffffffu, static_cast<uint32>(address >> 32), row);
        return reinterpret_cast<const char*>(static_cast<uint64>(high) << 32 | low);
    }
};

// Past L1, which keys and values that are read once only fill. With more rows, or heads of 64, it was not faster.
__device__ __forceinline__ Chunk load_passing(const char* address) {
    return ROW_TILES > 1 || HEAD_DIM <= 64 ? load_global(address) : load_past_l1(address);
}

// Eight elements.
#if CACHE == 0
using Piece = Chunk;
__device__ __forceinline__ Piece load_piece(const char* address) { return load_passing(address); }
#else
using Piece = HalfChunk;
__device__ __forceinline__ Piece load_piece(const char* address) { return load_global_half(address); }
#endif

#if QUEUE
constexpr int kChunkPieces = CACHE == 0 ? 1 : 2;
constexpr uint32 kKeyBytes = HEAD_DIM / 8 * kPieceBytes, kValueBytes = VALUE_DIM / 8 * kPieceBytes;
static_assert(QUEUE > 1, "one pass is copied while another is multiplied");
static_assert(PAGES < 2 && (CACHE == 0 || (CACHE == 1 && kKeyPairs && kValuePairs)), "rows lie together, and lanes read whole chunks");
static_assert(kKeyBytes % 128 == 0 && kValueBytes % 128 == 0, "eight chunks to a line of banks");
#endif

// What one lane holds of a row that `Lanes` lanes share: every Lanes-th piece. Pieces past the dimension repeat the last one:
// keys are zeroed there before use (`KeyTile::chunk`), of values the result is not written.
template <int Lanes, int Dim, bool Pairs>
struct RowPieces {
    static constexpr int kPieces = (Dim + 8 * Lanes - 1) / (8 * Lanes);

    Piece piece[kPieces];

    __device__ __forceinline__ void load_from(const char* row, int lane) {
#if PAIRS
        if (Pairs) {
#pragma unroll
            for (int i = 0; i < kPieces; i += 2) {
                const Chunk both = load_passing(row + first_dim<true, Lanes>(i, lane));
                piece[i] = {both.x, both.y};
                piece[i + 1] = {both.z, both.w};
            }
            return;
        }
#endif
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            const bool whole = 8 * Lanes * (i + 1) <= Dim;
            piece[i] = load_piece(row + kPieceBytes * (whole ? Lanes * i + lane : min(Lanes * i + lane, Dim / 8 - 1)));
        }
    }
#if QUEUE
    __device__ __forceinline__ void fetch(uint32 row, uint32 swizzle, int lane) {
#pragma unroll
        for (int i = 0; i < kPieces; i += kChunkPieces) {
            const Chunk chunk = load_shared(row + ((i / kChunkPieces * Lanes + lane) * sizeof(Chunk) ^ swizzle));
#if CACHE > 0
            piece[i] = {chunk.x, chunk.y};
            piece[i + 1] = {chunk.z, chunk.w};
#else
            piece[i] = chunk;
#endif
        }
    }
#endif
};

__device__ __forceinline__ void clear_unless(bool keep, Chunk& x) {
    x = {keep ? x.x : 0, keep ? x.y : 0, keep ? x.z : 0, keep ? x.w : 0};
}

__device__ __forceinline__ void clear_unless(bool keep, HalfChunk& x) { x = {keep ? x.x : 0, keep ? x.y : 0}; }

struct KeyTile {
    RowPieces<4, HEAD_DIM, kKeyPairs> rows[2];  // keys g and g + 8

    __device__ __forceinline__ void load_from(const Rows& from, int lane) {
#pragma unroll
        for (int half = 0; half < 2; ++half) rows[half].load_from(from.at(lane / 4 + 8 * half), lane % 4);
    }
#if QUEUE
    static constexpr uint32 kRowBytes = kKeyBytes;

    // Lanes read four chunks of two neighbouring rows.
    __device__ __forceinline__ static uint32 swizzle(int row) { return row % 2 * 64; }
    __device__ __forceinline__ void fetch(uint32 from, int lane) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = lane / 4 + 8 * half;
            rows[half].fetch(from + row * kRowBytes, swizzle(row), lane % 4);
        }
    }
#endif

    // The query is zero past the head dimension, but zero times a repeated infinity or NaN would be NaN.
    __device__ __forceinline__ Chunk chunk(int half, int i, int lane) const {
#if CACHE == 0
        Chunk x = rows[half].piece[i];
#else
        const Piece codes = rows[half].piece[i];
        Chunk x = {widen_low(codes.x), widen_high(codes.x), widen_low(codes.y), widen_high(codes.y)};
#endif
        if (32 * i + 32 > HEAD_DIM) clear_unless(32 * i + 8 * (lane % 4) < HEAD_DIM, x);
        return x;
    }
};

struct ValueTile {
    RowPieces<8, VALUE_DIM, kValuePairs> rows[4];  // keys 2t, 2t + 1, 2t + 8, 2t + 9

    static __device__ __forceinline__ int row(int i, int lane) { return 2 * (lane % 4) + i % 2 + 8 * (i / 2); }

    __device__ __forceinline__ void load_from(const Rows& from, int lane) {
#pragma unroll
        for (int i = 0; i < 4; ++i) rows[i].load_from(from.at(row(i, lane)), lane / 4);
    }
#if QUEUE
    static constexpr uint32 kRowBytes = kValueBytes;

    // Lanes read two chunks of every second of eight rows.
    __device__ __forceinline__ static uint32 swizzle(int row) { return row / 2 % 4 * 32; }
    __device__ __forceinline__ void fetch(uint32 from, int lane) {
#pragma unroll
        for (int i = 0; i < 4; ++i) rows[i].fetch(from + row(i, lane) * kRowBytes, swizzle(row(i, lane)), lane / 4);
    }
#endif

    // Dims 2w and 2w + 1 of the lane's in a group of 64, each of the keys 2t and 2t + 1, and of 2t + 8 and 2t + 9.
    __device__ __forceinline__ void pair_keys(int group, int w, uint32 (&dims)[4]) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const Piece &first = rows[2 * i].piece[group], &second = rows[2 * i + 1].piece[group];
#if CACHE == 0
            dims[2 * i] = __byte_perm(word(first, w), word(second, w), 0x5410);
            dims[2 * i + 1] = __byte_perm(word(first, w), word(second, w), 0x7632);
#else
            const uint32 low = w < 2 ? first.x : first.y, high = w < 2 ? second.x : second.y;
            const uint32 both = __byte_perm(low, high, w % 2 ? 0x7362 : 0x5140);
            dims[2 * i] = widen_low(both);
            dims[2 * i + 1] = widen_high(both);
#endif
        }
    }

    // Probabilities of keys that no row sees are zero, but zero times an infinity or NaN would be NaN. Apart from the load,
    // which nothing may wait for before the others are issued, and passed over where the tile is whole.
    __device__ __forceinline__ void clear_unseen(int tile, const Segment& segment, int lane) {
        const int first = kTileKeys * tile;
#if TREE
        const uint32 of_tree = tile - segment.tree_tile;
        if (of_tree < kTreeTiles && segment.unseen[of_tree] != 0) clear_unseen_of_tree(segment.unseen[of_tree], lane);
#endif
        if (first >= segment.first_key && first + kTileKeys <= segment.last_key) return;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int key = first + row(i, lane);
            const bool seen = key >= segment.first_key && key < segment.last_key;
#pragma unroll
            for (int j = 0; j < RowPieces<8, VALUE_DIM, kValuePairs>::kPieces; ++j) clear_unless(seen, rows[i].piece[j]);
        }
    }

#if TREE
    // `unseen` has a bit for each key of the tile.
    __device__ __forceinline__ void clear_unseen_of_tree(uint32 unseen, int lane) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = 0; j < RowPieces<8, VALUE_DIM, kValuePairs>::kPieces; ++j)
                clear_unless(!(unseen >> row(i, lane) & 1), rows[i].piece[j]);
        }
    }
#endif
};

// The scales of a tile's keys g and g + 8, or those of the head.
struct TileScales {
    float key[2], value[2];

    __device__ __forceinline__ void load(const Parameters& p, const Segment& segment, int tile, int page, int lane) {
        const int first = kTileKeys * inside(segment, tile);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = lane / 4 + 8 * half;
            const int at = PAGES == 2 ? __shfl_sync(0xffffffffu, page, row) : page;
            const int place = min(max(first + row, segment.first_key), segment.last_key - 1);
            const int within = PAGES == 0 ? segment.key_start + place : place - divide(place, p.by_page) * p.page_size;
            const auto scale = [&](const float* scales, const Scales& strides) {
                if (scales == nullptr) return 1.0f;
                const int64 head = segment.head * strides.head;
                return scales[head + (PAGES == 0 ? 0 : static_cast<uint32>(at) * strides.page) + within * strides.row];
            };
            key[half] = scale(p.key_scales, p.key_scale_strides);
            value[half] = scale(p.value_scales, p.value_scale_strides);
        }
    }
};

}  // namespace

// Loads where pages are of no multiple of 8 keys, so that boxes would have too few rows: each key is looked up, and threads copy its
// row. Each warp has a quarter of a tile's rows.
#pragma once

#include "decode_hopper/shared.cuh"
#include "ptx/cp_async.cuh"

namespace {

constexpr int kRowsOfWarp = kTileKeys / kLoadingWarps;
constexpr int kTilesOfLookUp = 32 / kRowsOfWarp;  // tiles of which each lane has a row of the warp's
static_assert(kTilesOfLookUp * kRowsOfWarp == 32, "each lane looks a key up");

// Where the warp's rows in a segment's tiles are, one in each lane. Pages are looked up twice as many tiles ahead: a line of the
// table that comes from memory takes longer than a tile does.
struct RowsOfTiles {
    uint64 key_row, value_row;  // bytes from the first row of the segment's head, of kTilesOfLookUp tiles
    uint32 valid;               // a bit for each lane: whether the segment has that key
    int key, page_of_next, page_after;  // `key`: which `page_after` is of

    __device__ __forceinline__ RowsOfTiles(const Parameters& p, const Segment& segment, int warp, int lane)
        : key(kTileKeys * (segment.tile + lane / kRowsOfWarp) + kRowsOfWarp * warp + lane % kRowsOfWarp) {
        page_of_next = page_of(p, segment, key);
        key += kStep;
        page_after = page_of(p, segment, key);
        advance(p, segment);
    }
    __device__ __forceinline__ void advance(const Parameters& p, const Segment& segment) {
        const int now = key - kStep;
        const uint32 page = page_of_next, within = now - divide(now, p.by_page) * p.page_size;
        key_row = page * p.key_strides.page + static_cast<uint64>(within) * p.key_strides.row;
        value_row = page * p.value_strides.page + static_cast<uint64>(within) * p.value_strides.row;
        valid = __ballot_sync(0xffffffffu, has(segment, now));
        page_of_next = page_after;
        key += kStep;
        page_after = page_of(p, segment, key);
    }

private:
    static constexpr int kStep = kTileKeys * kTilesOfLookUp;

    __device__ __forceinline__ static bool has(const Segment& segment, int key) {
        return key >= segment.first_key && key < segment.last_key;
    }
    // Keys that the segment has not are never looked up: the table may hold anything there.
    __device__ __forceinline__ static int page_of(const Parameters& p, const Segment& segment, int key) {
        return has(segment, key) ? p.pages[segment.sequence * p.pages_row + divide(key, p.by_page)] : 0;
    }
};

// The warp's rows of a tile, the `number`-th of its segment; those that are none of the segment's become zeros. A warp has little
// time for each row, so all but a few instructions of it are for 32 rows at once, in `RowsOfTiles`.
template <int Dim>
__device__ __forceinline__ void copy_rows(const Segment& segment, const char* cache, uint64 head_stride, uint64 row_of_lane,
                                          uint32 valid, int number, uint32 destination, int warp, int lane) {
    constexpr int kRowChunks = Dim / 8, kCopies = kRowsOfWarp * kRowChunks / 32;
    static_assert(8 % kCopies == 0, "the swizzle of a lane's rows differs in bits that the first one's does not have");
    const int of_warp = lane / kRowChunks * kCopies, source = number % kTilesOfLookUp * kRowsOfWarp + of_warp;
    const uint32 at = panel::chunk_address<kTileKeys>(0, kRowsOfWarp * warp + of_warp, lane % kRowChunks);
    const char* const base = cache + static_cast<uint32>(segment.head) * head_stride + lane % kRowChunks * kChunkBytes;
    uint64 rows[kCopies];
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
        const uint32 low = __shfl_sync(0xffffffffu, static_cast<uint32>(row_of_lane), source + i);
        const uint32 high = __shfl_sync(0xffffffffu, static_cast<uint32>(row_of_lane >> 32), source + i);
        rows[i] = static_cast<uint64>(high) << 32 | low;
    }
#pragma unroll
    for (int i = 0; i < kCopies; ++i)
        copy_chunk(destination + (at ^ i << 4) + i * panel::ROW_BYTES, base + rows[i], valid >> (source + i) & 1);
}

// What a warp loads of a segment.
struct Loader {
    int warp;
    RowsOfTiles rows;

    __device__ __forceinline__ Loader(const Parameters& p, const Maps&, const Segment& segment, int warp, int lane)
        : warp(warp), rows(p, segment, warp, lane) {}

    // The `number`-th tile of the segment, as soon as there is room.
    __device__ __forceinline__ void load(const Parameters& p, const Shared& shared, const Segment& segment, int number, int stage,
                                         uint32 parity, int lane) {
        if (number > 0 && number % kTilesOfLookUp == 0) rows.advance(p, segment);
        ptx::mbarrier_wait(shared.key_empty(stage), parity ^ 1);
        copy_rows<HEAD_DIM>(segment, p.key, p.key_strides.head, rows.key_row, rows.valid, number, shared.key(stage), warp, lane);
        ptx::mbarrier_arrive_after_copies(shared.key_full(stage));
        ptx::mbarrier_wait(shared.value_empty(stage), parity ^ 1);
        copy_rows<VALUE_DIM>(segment, p.value, p.value_strides.head, rows.value_row, rows.valid, number, shared.value(stage), warp,
                             lane);
        ptx::mbarrier_arrive_after_copies(shared.value_full(stage));
    }
};

}  // namespace

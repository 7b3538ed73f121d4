// Passes of a warp on their way to shared memory, ahead of the one that it multiplies: with QUEUE (tiles.cuh).
#pragma once
#include "decode/tiles.cuh"
#include "ptx/cp_async.cuh"

#if QUEUE

namespace {

// The warp's copy of a tile to shared memory, a row by neighbouring lanes. Its chunks change places as lanes read them: eight at a time.
template <class Tile>
__device__ __forceinline__ void copy_tile(const Rows& from, uint32 to, int lane) {
    constexpr int kRowChunks = Tile::kRowBytes / sizeof(Chunk), kRowsAtOnce = 32 / kRowChunks;
#pragma unroll
    for (int first = 0; first < kTileKeys; first += kRowsAtOnce) {
        const int row = first + lane / kRowChunks;
        const uint32 within = lane % kRowChunks * sizeof(Chunk);
        copy_chunk(to + row * Tile::kRowBytes + (within ^ Tile::swizzle(row)), from.at(row) + within, true);
    }
}

struct Queue {
    static constexpr uint32 kKeysBytes = kTileKeys * kKeyBytes, kTileBytes = kKeysBytes + kTileKeys * kValueBytes;
    static constexpr uint32 kStageBytes = KEY_TILES * kTileBytes;
    static constexpr int kPassesOfLookUp = 32 / KEY_TILES;

    const Parameters& p;
    const uint32 base;
    const int warp, lane;
    int ahead = 0, under_way = 0;   // the pass of the segment, or of the next one, that comes next; copied, and not yet in registers
    int copied = 0, fetched = 0;    // stages
    bool of_next = false;
    int pages = 0, more_pages = 0;  // each lane has the page of one of the warp's tiles, and of one 32 tiles on: no pass waits for its own
    int pages_of_next = 0;

    // `start`: where those of the block's first warp begin.
    __device__ __forceinline__ Queue(const Parameters& p, uint32 start, int warp, int lane)
        : p(p), base(start + warp * QUEUE * kStageBytes), warp(warp), lane(lane) {}

    // Of the next pass that is fetched.
    __device__ __forceinline__ uint32 keys(int i) const { return place(fetched, i); }
    __device__ __forceinline__ uint32 values(int i) const { return place(fetched, i) + kKeysBytes; }

    __device__ __forceinline__ void begin(const Segment& segment) { begin_pages(segment, look_up_from(segment, 0), 0); }
    __device__ __forceinline__ void look_up_next(const Segment& next) { pages_of_next = look_up_from(next, 0); }

    // As many passes as there is room for; `more`: whether there is a next segment.
    __device__ __forceinline__ void copy_ahead(const Segment& segment, const Segment& next, bool more) {
#pragma unroll 1
        while (under_way < QUEUE) {
            if (more && !of_next && ahead == segment.passes) {
                of_next = true;
                ahead = 0;
                begin_pages(next, pages_of_next, 0);
            }
            const Segment& source = of_next ? next : segment;
            if (ahead == source.passes) break;
            Rows key_rows[KEY_TILES], value_rows[KEY_TILES];
#pragma unroll
            for (int i = 0; i < KEY_TILES; ++i) {
                const int tile = tile_of_warp(source, warp, ahead, i);
                const int page = PAGES == 0 ? 0 : __shfl_sync(0xffffffffu, pages, ahead % kPassesOfLookUp * KEY_TILES + i);
                key_rows[i].find(p.key, p.key_strides, p, source, tile, page, lane);
                value_rows[i].find(p.value, p.value_strides, p, source, tile, page, lane);
            }
#pragma unroll
            for (int i = 0; i < KEY_TILES; ++i) {
                copy_tile<KeyTile>(key_rows[i], place(copied, i), lane);
                copy_tile<ValueTile>(value_rows[i], place(copied, i) + kKeysBytes, lane);
            }
            copy_commit();
            ++ahead;
            if (PAGES > 0 && ahead % kPassesOfLookUp == 0) begin_pages(source, more_pages, ahead);
            copied = after(copied);
            ++under_way;
        }
    }
    // Until the next pass is there; those after it may still come.
    __device__ __forceinline__ void wait() const {
        if (under_way == QUEUE) copy_wait<QUEUE - 1>();
        else if (under_way == QUEUE - 1) copy_wait<QUEUE - 2>();
        else copy_wait<0>();
        __syncwarp();
    }
    // It is in registers.
    __device__ __forceinline__ void advance() {
        fetched = after(fetched);
        --under_way;
    }
    // The next segment is the segment, and its queries are there: they came with a pass, unless there was none left.
    __device__ __forceinline__ void end_segment(int passes) {
        if (passes <= QUEUE) {
            copy_commit();
            copy_wait<0>();
        }
        of_next = false;
    }

private:
    __device__ __forceinline__ static int after(int stage) { return stage + 1 == QUEUE ? 0 : stage + 1; }
    __device__ __forceinline__ uint32 place(int stage, int i) const { return base + stage * kStageBytes + i * kTileBytes; }
    __device__ __forceinline__ int look_up_from(const Segment& segment, int pass) const {
        return look_up(p, segment, tile_of_warp(segment, warp, pass, lane), lane);
    }
    // From a pass on, with the pages of its tiles and those after them.
    __device__ __forceinline__ void begin_pages(const Segment& segment, int of_first, int first) {
        pages = of_first;
        more_pages = look_up_from(segment, first + kPassesOfLookUp);
    }
};

}  // namespace

#endif

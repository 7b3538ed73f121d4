// The warp that loads: it finds the block's segments, publishes them, and asks for their keys and values.
#pragma once

#include "decode_hopper/shared.cuh"
#include "ptx/tma.cuh"

namespace {

// A coordinate outside every tensor: its box is read as zeros, without access to memory.
constexpr int kOutside = 1 << 30;
constexpr int kBoxes = kTileKeys / BOX_ROWS;  // of a panel of a tile; each lies in a page
static_assert(kBoxes * BOX_ROWS == kTileKeys && kBoxes <= 32, "a lane has a box of each tile");

struct Maps {
    ptx::TensorMap key;    // (head_dim, rows, key heads, 1), or (head_dim, slots of a page, key heads, pages)
    ptx::TensorMap value;
};

// The page of the box that begins at such a key. Pages of keys that the segment has not are never looked up: the table may
// hold anything there.
__device__ __forceinline__ int page_of_box(const Parameters& p, const Segment& segment, int key) {
    if (PAGES == 0) return 0;
    if (key >= segment.last_key || key + BOX_ROWS <= segment.first_key) return kOutside;
    return p.pages[segment.sequence * p.pages_row + divide(key, p.by_page)];
}

// The pages of a segment's boxes, 32 at a time, one in each lane. They are looked up as many boxes ahead: a line of the table
// that comes from memory takes longer than a tile does.
struct Pages {
    static constexpr int TILES = 32 / kBoxes;  // whose pages a lane's number is one of

    int now, next, key;  // `key`: where the lane's box after those begins

    __device__ __forceinline__ Pages(const Parameters& p, const Segment& segment, int lane) {
        key = kTileKeys * segment.tile + BOX_ROWS * lane;
        next = page_of_box(p, segment, key);
        advance(p, segment);
    }
    __device__ __forceinline__ void advance(const Parameters& p, const Segment& segment) {
        now = next;
        key += kTileKeys * TILES;
        next = page_of_box(p, segment, key);
    }
    // Of a tile's boxes, in the lanes that have one. `number`: of the tile in its segment; each is asked for, in order.
    __device__ __forceinline__ int of_tile(const Parameters& p, const Segment& segment, int number, int lane) {
        if (PAGES == 0) return 0;
        if (number > 0 && number % TILES == 0) advance(p, segment);
        return __shfl_sync(0xffffffffu, now, number % TILES * kBoxes + lane);
    }
};

template <int Panels>
__device__ __forceinline__ void load_box(const Parameters& p, const ptx::TensorMap& map, const Segment& segment, int tile, int page,
                                         uint32 destination, uint32 barrier, int lane) {
    const int key = kTileKeys * tile + BOX_ROWS * lane;
    const int row = PAGES == 0 ? segment.key_start + key : key - divide(key, p.by_page) * p.page_size;
#pragma unroll
    for (int panel = 0; panel < Panels; ++panel)
        ptx::tma_load(map, destination + panel * kPanelBytes + lane * BOX_ROWS * panel::ROW_BYTES, barrier, ptx::EVICT_FIRST,
                      panel * panel::PANEL_COLUMNS, row, segment.head, page);
}

// All lanes of one warp. The first segment is there.
__device__ __forceinline__ void produce(const Parameters& p, const Maps& maps, const Shared& shared, Cursor& cursor,
                                        Segment* segments, Meeting* meetings, int lane) {
    hopper::Ring<STAGES> ring;
    for (int s = 0;; ++s) {
        const int slot = s % kSlots, next = (s + 1) % kSlots;
        const Segment& segment = segments[slot];
        if (lane == 0) {
            arrange(p, cursor, segment, meetings[slot]);
            ptx::mbarrier_arrive(shared.segment_full(slot));
        }
        if (segment.passes == 0) return;
        const int first = segment.tile, end = first + tiles_of_segment(segment);
        Pages pages(p, segment, lane);
        for (int tile = first; tile < end; ++tile, ring.advance()) {
            const int page = pages.of_tile(p, segment, tile - first, lane);
            ptx::mbarrier_wait(shared.key_empty(ring.stage), ring.parity ^ 1);
            if (lane == 0) ptx::mbarrier_expect_bytes(shared.key_full(ring.stage), kKeyBytes);
            __syncwarp();
            if (lane < kBoxes)
                load_box<kKeyPanels>(p, maps.key, segment, tile, page, shared.key(ring.stage), shared.key_full(ring.stage), lane);
            ptx::mbarrier_wait(shared.value_empty(ring.stage), ring.parity ^ 1);
            if (lane == 0) ptx::mbarrier_expect_bytes(shared.value_full(ring.stage), kValueBytes);
            __syncwarp();
            if (lane < kBoxes)
                load_box<kValuePanels>(p, maps.value, segment, tile, page, shared.value(ring.stage), shared.value_full(ring.stage),
                                       lane);
        }
        ptx::mbarrier_wait(shared.segment_empty(next), (s + 1) / kSlots % 2 ^ 1);
        if (lane == 0) next_segment(p, cursor, segments[next]);
        __syncwarp();
    }
}

}  // namespace

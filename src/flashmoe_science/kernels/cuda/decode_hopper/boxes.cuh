// Loads by TMA: a box for each page and 64 columns. A box takes a warp some 70 cycles, as its operands must lie in uniform
// registers; so each warp has a panel of keys or of values of its own.
#pragma once

#include "decode_hopper/shared.cuh"
#include "ptx/tma.cuh"

namespace {

// A coordinate outside every tensor: its box is read as zeros, without access to memory.
constexpr int kOutside = 1 << 30;
constexpr int kBoxes = kTileKeys / BOX_ROWS;  // of a panel of a tile; each lies in a page
static_assert(kBoxes * BOX_ROWS == kTileKeys && kBoxes <= 32, "a lane has a box of each tile");

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

// What a warp loads of a segment.
struct Loader {
    const Maps& maps;
    int panel;
    Pages pages;

    __device__ __forceinline__ Loader(const Parameters& p, const Maps& maps, const Segment& segment, int warp, int lane)
        : maps(maps), panel(warp), pages(p, segment, lane) {}

    // The `number`-th tile of the segment, as soon as there is room.
    __device__ __forceinline__ void load(const Parameters& p, const Shared& shared, const Segment& segment, int number, int stage,
                                         uint32 parity, int lane) {
        const int page = pages.of_tile(p, segment, number, lane);
        if (panel < kKeyPanels)
            load_panel(p, maps.key, segment, number, page, panel, shared.key(stage), shared.key_full(stage), parity, lane);
        else
            load_panel(p, maps.value, segment, number, page, panel - kKeyPanels, shared.value(stage), shared.value_full(stage), parity,
                       lane);
    }

private:
    // `full`: its barrier; that of the room lies behind it.
    __device__ __forceinline__ static void load_panel(const Parameters& p, const ptx::TensorMap& map, const Segment& segment, int number,
                                                      int page, int of_panel, uint32 destination, uint32 full, uint32 parity, int lane) {
        ptx::mbarrier_wait(full + Shared::EMPTY, parity ^ 1);
        if (lane == 0) ptx::mbarrier_expect_bytes(full, kPanelBytes);
        __syncwarp();
        if (lane >= kBoxes) return;
        const int key = kTileKeys * (segment.tile + number) + BOX_ROWS * lane;
        const int row = PAGES == 0 ? segment.key_start + key : key - divide(key, p.by_page) * p.page_size;
        ptx::tma_load(map, destination + of_panel * kPanelBytes + lane * BOX_ROWS * panel::ROW_BYTES, full, ptx::EVICT_FIRST,
                      of_panel * panel::PANEL_COLUMNS, row, segment.head, page);
    }
};

}  // namespace

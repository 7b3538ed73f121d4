// Which page each piece of a block of keys lies in: looked up a block ahead, as the table's latency would stand between two blocks.
#pragma once

#include "hopper_varlen/scheduler.cuh"

namespace hopper {

// The compiler moves what is computed before a loop to where it is used in it, a division too. Not this.
__device__ __forceinline__ int held(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// A page, or a coordinate, outside every tensor: what lies there reads as zeros, without access to memory.
constexpr int OUTSIDE = 1 << 30;

// Of COUNT boxes of a block, which are rows that lie in one page for certain; lane i has FIRST + i, FIRST + i + 32, ...
template <int FIRST, int COUNT>
struct Pages {
    static constexpr int OF_LANE = (COUNT + 31) / 32;
    int head;  // of keys
    int page[OF_LANE];

    static __device__ __forceinline__ int page_of(const Parameters& p, int key) {
        return __umulhi(2 * static_cast<uint32>(key), p.page_multiplier) >> p.page_shift;
    }

    static __device__ __forceinline__ int slot_of(const Parameters& p, int key) { return key - page_of(p, key) * p.page_size; }

    __device__ __forceinline__ void enter(const Parameters& p, const Tile& tile) { head = held(tile.slice / p.group); }

    // Only keys from `begin` on and before `tile.keys` are looked up: what the table has for others is anything.
    __device__ __forceinline__ void look_up(const Parameters& p, const Tile& tile, int block, int begin, int lane) {
        if (!PAGED) return;
#pragma unroll
        for (int i = 0; i < OF_LANE; ++i) {
            const int box = lane + 32 * i;
            const int key = block * BLOCK_N + (FIRST + box) * PAGE_ROWS;
            page[i] = OUTSIDE;
            if (box < COUNT && block >= tile.first_block && key < tile.keys && key + PAGE_ROWS > begin) {
                page[i] = load_index(p.page_table + tile.place * p.table_row + page_of(p, key));
            }
        }
    }
};

}  // namespace hopper

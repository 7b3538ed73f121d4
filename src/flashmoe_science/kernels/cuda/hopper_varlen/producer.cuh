// The producer warpgroup: a warp each hands out tiles, loads keys, loads values, loads queries.
//
// A box of TMA is rectangular and a sequence's end is not on its edge: rows behind it belong to another sequence, or to nobody,
// and may hold anything. Keys there are masked. Values there are multiplied with zero, so they are made zeros, in shared memory,
// before the consumers get the block; so are query rows, on whose scores the others' way through the softmax depends.
#pragma once

#include "hopper_varlen/scheduler.cuh"
#include "ptx/bulk.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"

namespace hopper {

// The compiler moves what is computed before a loop to where it is used in it, a division too. Not this.
__device__ __forceinline__ int held(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// A coordinate outside every tensor: its box is read as zeros, without access to memory.
constexpr int OUTSIDE = 1 << 30;
constexpr int BOXES_OF_LANE = (BOXES + 31) / 32;
#if TREE
constexpr bool ONE_LANE_ISSUES = false;  // what else the producers keep leaves no registers for that
#else
constexpr bool ONE_LANE_ISSUES = true;
#endif
// So many boxes of pages are told to the lane that issues at a time: few, as registers are.
constexpr int MOST_AT_ONCE = CONSUMERS == 3 ? 2 : 4;
constexpr int BOXES_AT_ONCE = BOXES < MOST_AT_ONCE ? BOXES : MOST_AT_ONCE;

// Where the boxes of a block of keys lie. In pages, lane i has boxes i, i + 32, ...: they are looked up ahead, as the table's
// latency would stand between two blocks. One lane issues them all: where several do, the compiler makes a loop over them,
// of which each round costs some 40 cycles.
struct Boxes {
    int head;  // of keys
    int page[BOXES_OF_LANE];
    int next_page[BOXES_AT_ONCE];
    int next_slot[BOXES_AT_ONCE];  // of the box's first row in its page

    static __device__ __forceinline__ int page_of(const Parameters& p, int key) {
        return __umulhi(2 * static_cast<uint32>(key), p.page_multiplier) >> p.page_shift;
    }

    __device__ __forceinline__ void enter(const Parameters& p, const Tile& tile) { head = held(tile.slice / p.group); }

    // Only keys from `begin` on and before `tile.keys` are looked up: what the table has for others is anything.
    __device__ __forceinline__ void look_up(const Parameters& p, const Tile& tile, int block, int begin, int lane) {
        if (!PAGED) return;
#pragma unroll
        for (int i = 0; i < BOXES_OF_LANE; ++i) {
            const int box = lane + 32 * i;
            const int key = block * BLOCK_N + box * PAGE_ROWS;
            page[i] = OUTSIDE;
            if (box < BOXES && block >= tile.first_block && key < tile.keys && key + PAGE_ROWS > begin) {
                page[i] = load_index(p.page_table + tile.place * p.table_row + page_of(p, key));
            }
        }
    }

    // By a whole warp: tells every lane of the block's boxes from `first` on.
    __device__ __forceinline__ void tell(const Parameters& p, int block, int first, int lane) {
        if (!PAGED || !ONE_LANE_ISSUES) return;
        const int key = block * BLOCK_N + (first / 32 * 32 + lane) * PAGE_ROWS;
        const int slot = key - page_of(p, key) * p.page_size;
#pragma unroll
        for (int i = 0; i < BOXES_AT_ONCE && first + i < BOXES; ++i) {
            next_page[i] = __shfl_sync(ALL_LANES, page[BOXES_OF_LANE > 1 ? first / 32 : 0], (first + i) % 32);
            next_slot[i] = __shfl_sync(ALL_LANES, slot, (first + i) % 32);
        }
    }

    // By a whole warp, which has been told of the first boxes: issues the loads of a block, which complete `barrier`.
    template <int PANELS>
    __device__ __forceinline__ void load(const Parameters& p, const ptx::TensorMap& map, const Tile& tile, int block,
                                         uint32 destination, uint32 barrier, int lane) {
        if (!PAGED) {
            const int row = tile.keys > 0 ? tile.place + block * BLOCK_N : OUTSIDE;
            if (ptx::elect_lane()) {
                ptx::mbarrier_expect_bytes(barrier, PANELS * BLOCK_PANEL_BYTES);
#pragma unroll
                for (int panel = 0; panel < PANELS; ++panel) {
                    ptx::tma_load(map, destination + panel * BLOCK_PANEL_BYTES, barrier, ptx::EVICT_LAST,
                                  panel * panel::PANEL_COLUMNS, row, head, 0);
                }
            }
            return;
        }
        if (!ONE_LANE_ISSUES) {
            if (lane == 0) ptx::mbarrier_expect_bytes(barrier, PANELS * BLOCK_PANEL_BYTES);
            __syncwarp();
#pragma unroll
            for (int i = 0; i < BOXES_OF_LANE; ++i) {
                const int box = lane + 32 * i;
                const int key = block * BLOCK_N + box * PAGE_ROWS;
                if (box >= BOXES) break;
#pragma unroll
                for (int panel = 0; panel < PANELS; ++panel) {
                    ptx::tma_load(map, destination + panel * BLOCK_PANEL_BYTES + box * PAGE_ROWS * panel::ROW_BYTES, barrier,
                                  ptx::EVICT_LAST, panel * panel::PANEL_COLUMNS, key - page_of(p, key) * p.page_size, head, page[i]);
                }
            }
            return;
        }
#pragma unroll(BOXES > 32 ? BOXES : 1)  // a loop takes fewer registers; `page` is no array in memory
        for (int first = 0; first < BOXES; first += BOXES_AT_ONCE) {
            if (first > 0) tell(p, block, first, lane);
            if (ptx::elect_lane()) {
                if (first == 0) ptx::mbarrier_expect_bytes(barrier, PANELS * BLOCK_PANEL_BYTES);
#pragma unroll
                for (int i = 0; i < BOXES_AT_ONCE && first + i < BOXES; ++i) {
#pragma unroll
                    for (int panel = 0; panel < PANELS; ++panel) {
                        ptx::tma_load(map, destination + panel * BLOCK_PANEL_BYTES + (first + i) * PAGE_ROWS * panel::ROW_BYTES,
                                      barrier, ptx::EVICT_LAST, panel * panel::PANEL_COLUMNS, next_slot[i], head, next_page[i]);
                    }
                }
            }
        }
    }
};

// Zeros in rows [from, to) of a tile in shared memory whose panels have PANEL_ROWS rows. By a whole warp, before an arrival.
template <int PANELS, int PANEL_ROWS>
__device__ __forceinline__ void clear_rows(uint32 tile, int from, int to, int lane) {
    const int chunks = (to - from) * (panel::ROW_BYTES / kChunkBytes);
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel) {
        const uint32 start = tile + (panel * PANEL_ROWS + from) * panel::ROW_BYTES;
#if TREE
#pragma unroll 1  // fewer registers
#endif
        for (int i = lane; i < chunks; i += 32) store_shared(start + i * kChunkBytes, Chunk{0, 0, 0, 0});
    }
}

// By a whole warp: hands on what it has mended.
__device__ __forceinline__ void hand_on(uint32 barrier, int lane) {
    ptx::fence_async_shared();
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(barrier);
}

// The next tile of a producer that only reads them, and tells `barrier` so; false at the end. By a whole warp.
__device__ __forceinline__ bool next_tile(const Shared& shared, Ring<SLOTS>& slot, Tile& tile, uint32 barrier) {
    ptx::mbarrier_wait(shared.tile_full(slot.stage), slot.parity);
    tile = read_tile(shared, slot.stage);
    if (!LEFT_WINDOW) tile.first_block = 0;  // and takes no register
    release(barrier);
    slot.advance();
    return tile.first_row >= 0;
}

// The first key that a tile's rows see.
__device__ __forceinline__ int first_key_of(const Parameters& p, const Tile& tile) {
    return first_key(p, tile.first_row >> p.heads_shift, tile.offset());
}

// One warp: hands out tiles. The next is looked for while the keys of one are loaded, and not before: a block that draws ahead
// takes from those that have less to do.
__device__ __forceinline__ void hand_out_tiles(const Parameters& p, const Shared& shared, int index, int blocks) {
    const int lane = threadIdx.x % 32;
    Scheduler scheduler(p);
    Ring<SLOTS> slot;
    Ring<1> begun;
    int number = index;
    int ticket = -1;
    while (scheduler.publish(p, shared, slot, number)) {
        ptx::mbarrier_wait(shared.tile_begun(), begun.parity);
        begun.advance();
        if (lane == 0) ticket = atomicAdd(p.ticket, 1);
        number = __shfl_sync(ALL_LANES, ticket, 0) + blocks;
    }
    if (lane == 0 && ticket >= 0) give_back(p, ticket, scheduler.before);
}

// One warp: keeps the key ring full.
__device__ __forceinline__ void produce_keys(const Parameters& p, const Shared& shared) {
    const int lane = threadIdx.x % 32;
    Ring<K_STAGES> key;
    Ring<SLOTS> slot;
    Boxes boxes;
    Tile tile;
    while (next_tile(shared, slot, tile, shared.tile_begun())) {
        const int begin = first_key_of(p, tile);
        boxes.enter(p, tile);
        boxes.look_up(p, tile, tile.last_block, begin, lane);
#pragma unroll 1
        for (int block = tile.last_block; block >= tile.first_block; --block) {
            boxes.tell(p, block, 0, lane);
            ptx::mbarrier_wait(shared.key_empty(key.stage), key.parity ^ 1);
            boxes.load<KEY_PANELS>(p, p.key, tile, block, shared.key(key.stage), shared.key_full(key.stage), lane);
            boxes.look_up(p, tile, block - 1, begin, lane);
            key.advance();
        }
    }
}

// One warp: keeps the value ring full.
__device__ __forceinline__ void produce_values(const Parameters& p, const Shared& shared) {
    const int lane = threadIdx.x % 32;
    Ring<V_STAGES> value;
    Ring<1> landed;
    Ring<SLOTS> slot;
    Boxes boxes;
    Tile tile;
    while (next_tile(shared, slot, tile, shared.tile_empty(slot.stage))) {
        const int begin = first_key_of(p, tile);
        boxes.enter(p, tile);
        boxes.look_up(p, tile, tile.last_block, begin, lane);
#pragma unroll 1
        for (int block = tile.last_block; block >= tile.first_block; --block) {
            const uint32 destination = shared.value(value.stage);
            const int from = max(0, begin - block * BLOCK_N);  // rows of the block that are keys of some row
            const int to = min(BLOCK_N, tile.keys - block * BLOCK_N);
#if TREE
            const int tree = tile.tree() - block * BLOCK_N;  // row of the first query's key
            const bool whole = to == BLOCK_N && tree >= BLOCK_N;
#else
            const bool whole = to == BLOCK_N && (!LEFT_WINDOW || from == 0);
#endif
            const uint32 barrier = whole ? shared.value_full(value.stage) : shared.values_landed();
            boxes.tell(p, block, 0, lane);
            ptx::mbarrier_wait(shared.value_empty(value.stage), value.parity ^ 1);
            boxes.load<VALUE_PANELS>(p, p.value, tile, block, destination, barrier, lane);
            boxes.look_up(p, tile, block - 1, begin, lane);
            if (!whole) {
#if TREE
                // Of the queries' keys, those that no row of the sequence sees. Few registers: not kept from block to block.
                uint64 unseen = 0;
                if (tree < BLOCK_N)
                    unseen = unseen_by_all(p.tree_mask + tile.query_start, tile.tokens, CAUSAL ? p.window_right : kTreeQueries, lane);
#endif
                ptx::mbarrier_wait(shared.values_landed(), landed.parity);
                landed.advance();
                if (LEFT_WINDOW) clear_rows<VALUE_PANELS, BLOCK_N>(destination, 0, min(from, BLOCK_N), lane);
                clear_rows<VALUE_PANELS, BLOCK_N>(destination, to, BLOCK_N, lane);
#if TREE
#pragma unroll 1
                for (int row = max(0, tree); unseen != 0 && row < to; ++row)
                    if (unseen >> (row - tree) & 1) clear_rows<VALUE_PANELS, BLOCK_N>(destination, row, row + 1, lane);
#endif
                hand_on(shared.value_full(value.stage), lane);
            }
            value.advance();
        }
    }
}

// One warp: the query rows of each consumer as soon as its buffer is free.
__device__ __forceinline__ void produce_queries(const Parameters& p, const Shared& shared) {
    const int lane = threadIdx.x % 32;
    Ring<Q_STAGES> ring;
    Ring<1> landed;
    Ring<SLOTS> slot;
    Tile tile;
    while (next_tile(shared, slot, tile, shared.tile_empty(slot.stage))) {
#pragma unroll
        for (int consumer = 0; consumer < CONSUMERS; ++consumer) {
            ptx::mbarrier_wait(shared.query_empty(ring.stage, consumer), ring.parity ^ 1);
            const uint32 full = shared.query_full(ring.stage, consumer);
            const uint32 destination = shared.query(ring.stage, consumer);
            const int first = tile.first_row + consumer * ROWS;
            const int rows = tile.rows(p) - first;
            const uint32 barrier = rows >= ROWS ? full : shared.queries_landed();
            if (rows > 0 && ptx::elect_lane()) {
                ptx::mbarrier_expect_bytes(barrier, QUERY_BYTES);
#pragma unroll
                for (int panel = 0; panel < KEY_PANELS; ++panel) {
                    ptx::tma_load(p.query, destination + panel * QUERY_PANEL_BYTES, barrier, ptx::EVICT_FIRST,
                                  panel * panel::PANEL_COLUMNS, 0, tile.query_start + (first >> p.heads_shift), tile.slice);
                }
            }
            if (rows < ROWS) {
                if (rows > 0) {
                    ptx::mbarrier_wait(barrier, landed.parity);
                    landed.advance();
                }
                clear_rows<KEY_PANELS, ROWS>(destination, max(rows, 0), ROWS, lane);
                hand_on(full, lane);
            }
        }
        ring.advance();
    }
}

}  // namespace hopper

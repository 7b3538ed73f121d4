// The producer warpgroup: a warp each hands out tiles, loads keys, loads values, loads queries. Where rows are copied one by one the
// fourth copies the last rows of keys and values, and the first loads queries as well.
//
// A box of TMA is rectangular and a sequence's end is not on its edge: rows behind it belong to another sequence, or to nobody,
// and may hold anything. Keys there are masked. Values there are multiplied with zero, so they are made zeros, in shared memory,
// before the consumers get the block; so are query rows, on whose scores the others' way through the softmax depends.
#pragma once

#include "hopper_varlen/boxes.cuh"
#include "hopper_varlen/rows.cuh"
#include "hopper_varlen/scheduler.cuh"
#include "ptx/bulk.cuh"

namespace hopper {

#if GATHER
using Source = Rows<0, BLOCK_N - LAST_ROWS>;
using Last = Rows<BLOCK_N - LAST_ROWS, LAST_ROWS>;
#else
using Source = Boxes;
#endif

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

// By a whole warp: hands on what it has mended, by so many lanes as the barrier waits for.
__device__ __forceinline__ void hand_on(uint32 barrier, int lane, int arrivals = 1) {
    ptx::fence_async_shared();
    __syncwarp();
    if (lane < arrivals) ptx::mbarrier_arrive(barrier);
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

// The query rows of each consumer as soon as its buffer is free. By a whole warp.
struct Queries {
    Ring<Q_STAGES> ring;
    Ring<1> landed;
    Ring<SLOTS> slot;

    // Of the next tile; false at the end.
    __device__ __forceinline__ bool produce(const Parameters& p, const Shared& shared) {
        const int lane = threadIdx.x % 32;
        Tile tile;
        if (!next_tile(shared, slot, tile, shared.tile_empty(slot.stage))) return false;
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
        return true;
    }
};

// One warp: hands out tiles. The next is looked for while the keys of one are loaded, and not before: a block that draws ahead
// takes from those that have less to do.
__device__ __forceinline__ void hand_out_tiles(const Parameters& p, const Shared& shared, int index, int blocks) {
    const int lane = threadIdx.x % 32;
    Scheduler scheduler(p);
    Ring<SLOTS> slot;
    Ring<1> begun;
    int number = index;
    int ticket = -1;
#if LAST_ROWS
    Queries queries;  // of the warp that has other work here
#endif
    while (scheduler.publish(p, shared, slot, number)) {
#if LAST_ROWS
        queries.produce(p, shared);
#endif
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
    Source boxes;
    Tile tile;
    while (next_tile(shared, slot, tile, shared.tile_begun())) {
        const int begin = first_key_of(p, tile);
        boxes.enter(p, tile);
        boxes.look_up(p, tile, tile.last_block, begin, lane);
#pragma unroll 1
        for (int block = tile.last_block; block >= tile.first_block; --block) {
            boxes.find(p, p.key, tile, block, begin, lane);
            ptx::mbarrier_wait(shared.key_empty(key.stage), key.parity ^ 1);
            boxes.load<KEY_PANELS>(p, p.key, tile, block, shared.key(key.stage), shared.key_full(key.stage), lane);
            boxes.find_next(p, tile, block, begin, lane);
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
    Source boxes;
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
            const bool whole = (GATHER || to == BLOCK_N) && tree >= BLOCK_N;
#else
            const bool whole = GATHER || (to == BLOCK_N && (!LEFT_WINDOW || from == 0));
#endif
            const uint32 barrier = whole ? shared.value_full(value.stage) : shared.values_landed();
            boxes.find(p, p.value, tile, block, begin, lane);
            ptx::mbarrier_wait(shared.value_empty(value.stage), value.parity ^ 1);
            boxes.load<VALUE_PANELS>(p, p.value, tile, block, destination, barrier, lane);
            boxes.find_next(p, tile, block, begin, lane);
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
                if (!GATHER) clear_rows<VALUE_PANELS, BLOCK_N>(destination, to, BLOCK_N, lane);
#if TREE
#pragma unroll 1
                for (int row = max(0, tree); unseen != 0 && row < to; ++row)
                    if (unseen >> (row - tree) & 1) clear_rows<VALUE_PANELS, BLOCK_N>(destination, row, row + 1, lane);
#endif
                hand_on(shared.value_full(value.stage), lane, BLOCK_ARRIVALS);
            }
            value.advance();
        }
    }
}

#if LAST_ROWS
// One warp: the last rows of each block of keys and of values.
__device__ __forceinline__ void produce_last_rows(const Parameters& p, const Shared& shared) {
    const int lane = threadIdx.x % 32;
    Ring<K_STAGES> key;
    Ring<V_STAGES> value;
    Ring<SLOTS> slot;
    Last rows;
    Tile tile;
    while (next_tile(shared, slot, tile, shared.tile_empty(slot.stage))) {
        const int begin = first_key_of(p, tile);
        rows.enter(p, tile);
        rows.look_up(p, tile, tile.last_block, begin, lane);
#pragma unroll 1
        for (int block = tile.last_block; block >= tile.first_block; --block) {
            rows.find(p, p.key, block, lane);
            ptx::mbarrier_wait(shared.key_empty(key.stage), key.parity ^ 1);
            rows.load<KEY_PANELS>(p, p.key, tile, block, shared.key(key.stage), shared.key_full(key.stage), lane);
            key.advance();
            rows.find(p, p.value, tile, block, begin, lane);
            ptx::mbarrier_wait(shared.value_empty(value.stage), value.parity ^ 1);
            rows.load<VALUE_PANELS>(p, p.value, tile, block, shared.value(value.stage), shared.value_full(value.stage), lane);
            value.advance();
        }
    }
}
#endif

}  // namespace hopper

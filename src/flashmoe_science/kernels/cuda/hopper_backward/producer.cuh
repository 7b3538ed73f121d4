// The producer warpgroup: one warp loads, one for each consumer writes its pieces of dQ.
#pragma once

#include "hopper_backward/scheduler.cuh"
#include "hopper_backward/shared.cuh"
#include "kept_stage.cuh"
#include "ptx/arrival.cuh"
#include "ptx/bulk.cuh"
#include "ptx/dependent_launch.cuh"

namespace backward {

template <int PANEL_BYTES>
__device__ __forceinline__ void load_rows(const ptx::TensorMap& map, uint32 destination, uint32 full, uint64 policy, int row,
                                          int head, int batch) {
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel) {
        ptx::tma_load(map, destination + panel * PANEL_BYTES, full, policy, panel * panel::PANEL_COLUMNS, row, head, batch);
    }
}

// One lane: hands out tiles; loads each one's keys and values, then queries, output gradients and their rows' statistics.
__device__ __forceinline__ void produce(const Parameters& p, const Shared& shared) {
    Ring ring;
    Ring slot;
    if (DRAWS_FIRST) wait_for_predecessor();  // it zeroes the ticket
    int index = DRAWS_FIRST ? atomicAdd(p.ticket, 1) : static_cast<int>(blockIdx.x);
    while (true) {
        const Tile tile = tile_of(p, index);
        publish_tile(shared, slot, tile);
        if (tile.n_block < 0) break;
        bool keys = true;
        for (Walk walk(p, tile); walk.left > 0; walk.advance(p, tile)) {
            const int head = walk.row_head - tile.batch * p.num_heads;
            const int row = walk.m_block * BLOCK_M;
            const uint32 statistic = (walk.row_head * p.m_blocks + walk.m_block) * BLOCK_M;
            if (keys) {
                ptx::mbarrier_wait(shared.keys_empty(), slot.count & 1);  // the slot is a tile ahead
                ptx::mbarrier_expect_bytes(shared.key_full(), KEY_BYTES);
                load_rows<KEY_PANEL_BYTES>(p.key, shared.key(), shared.key_full(), ptx::EVICT_FIRST, tile.n_block * BLOCK_N,
                                           tile.head, tile.batch);
            }
            ptx::mbarrier_wait(shared.query_empty(ring.stage()), ring.parity() ^ 1);
            if (!keeps_stage(shared.query_full(ring.stage()), ring.count, STAGES)) {
                ptx::mbarrier_expect_bytes(shared.query_full(ring.stage()), QUERY_BYTES + STATISTIC_BYTES);
                load_rows<QUERY_PANEL_BYTES>(p.query, shared.query(ring.stage()), shared.query_full(ring.stage()),
                                             ptx::EVICT_LAST, row, head, tile.batch);
                if (ring.count == 0) wait_for_predecessor();
                ptx::bulk_load(shared.lse(ring.stage()), p.lse + statistic, STATISTIC_BYTES, shared.query_full(ring.stage()));
            }
            if (keys) {
                ptx::mbarrier_expect_bytes(shared.value_full(), KEY_BYTES);
                load_rows<KEY_PANEL_BYTES>(p.value, shared.value(), shared.value_full(), ptx::EVICT_FIRST,
                                           tile.n_block * BLOCK_N, tile.head, tile.batch);
                keys = false;
            }
            ptx::mbarrier_wait(shared.gradient_empty(ring.stage()), ring.parity() ^ 1);
            if (!keeps_stage(shared.gradient_full(ring.stage()), ring.count, STAGES)) {
                ptx::mbarrier_expect_bytes(shared.gradient_full(ring.stage()), QUERY_BYTES + STATISTIC_BYTES);
                load_rows<QUERY_PANEL_BYTES>(p.grad_output, shared.gradient(ring.stage()), shared.gradient_full(ring.stage()),
                                             ptx::EVICT_LAST, row, head, tile.batch);
                ptx::bulk_load(shared.delta(ring.stage()), p.delta + statistic, STATISTIC_BYTES,
                               shared.gradient_full(ring.stage()));
            }
            ring.advance();
        }
        if (WINDOW && keys) {  // no row sees them
            wait_for_predecessor();  // it zeroes the ticket
            ptx::mbarrier_wait(shared.keys_empty(), slot.count & 1);
            ptx::mbarrier_arrive(shared.key_full());
            ptx::mbarrier_arrive(shared.value_full());
        }
        // Staggered tiles also wait for later ones of their head. Those must not be drawn ahead by who waits for them.
        const int given = DRAWS_FIRST ? 0 : static_cast<int>(gridDim.x);
        index = STAGGERED ? index + given : given + atomicAdd(p.ticket, 1);
    }
}

// One lane: adds a consumer's pieces of dQ to the sums, key blocks in a fixed order, so that the same call gives the same
// bits. The first stores, so that nothing needs to be zeroed.
__device__ __forceinline__ void write_pieces(const Parameters& p, const Shared& shared, int consumer) {
    uint32 parity = 0;
    Ring slot;
    wait_for_predecessor();
    while (true) {
        ptx::mbarrier_wait(shared.tile_full(slot.stage()), slot.parity());
        const Tile tile = read_tile(shared, slot.stage());
        ptx::mbarrier_arrive(shared.tile_empty(slot.stage()));
        slot.advance();
        if (tile.n_block < 0) break;
        for (Walk walk(p, tile); walk.left > 0; walk.advance(p, tile)) {
            const uint32 index = (walk.row_head * p.m_blocks + walk.m_block) * CONSUMERS + consumer;
            float* sums = p.sums + static_cast<int64>(index) * PIECE_FLOATS;
            const int turn = turn_of(p, tile.n_block, walk.m_block);
            ptx::mbarrier_wait(shared.piece_full(consumer), parity);
            if (NO_SUMS) {
                ptx::mbarrier_arrive(shared.piece_empty(consumer));
                parity ^= 1;
                continue;
            }
            if (turn == 0) {
                ptx::bulk_store(sums, shared.piece(consumer), PIECE_BYTES);
            } else {
                await_turn(p.turns + index, turn);
                ptx::fence_async_global();
                ptx::bulk_add(sums, shared.piece(consumer), PIECE_BYTES);
            }
            ptx::bulk_commit();
            ptx::bulk_wait_read();
            ptx::mbarrier_arrive(shared.piece_empty(consumer));
            ptx::bulk_wait();
            ptx::fence_async_global();
            pass_turn(p.turns + index, turn + 1);
            parity ^= 1;
        }
    }
}

}  // namespace backward

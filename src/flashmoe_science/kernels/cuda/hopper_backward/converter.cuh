// A warp beside the producers that makes dQ of its float32 sums, while they are in L2.
// The block that adds the last keys to a block of query rows converts it: half a piece at a time comes by a bulk copy, and 64
// rows of 64 columns leave by TMA. No local memory: who waits for a turn keeps throwing L1 away.
#pragma once

#include "ablation.cuh"
#include "hopper_backward/scheduler.cuh"
#include "hopper_backward/shared.cuh"
#include "ptx/arrival.cuh"
#include "ptx/bulk.cuh"
#include "ptx/dependent_launch.cuh"
#include "ptx/shared_floats.cuh"
#include "ptx/tma.cuh"

namespace backward {

// A block of query rows of one head of the tile's batch.
struct Rows {
    int head;
    int m_block;

    __device__ __forceinline__ void advance(int begin, int span) {
        if (--m_block < begin) {
            m_block += span;
            ++head;
        }
    }
};

// Of a tile: the first query block whose last keys are the tile's, how many there are, the batch, and the slot.
__device__ __forceinline__ Chunk kept(const Shared& shared) { return load_shared(shared.converted()); }

// Among all query blocks of the call.
__device__ __forceinline__ uint64 block_of(const Parameters& p, const Shared& shared, const Rows& rows) {
    const int head = static_cast<int>(kept(shared).z) * p.num_heads + rows.head;
    return static_cast<uint64>(head) * p.m_blocks + rows.m_block;
}

// Waits until the sums of a block of query rows are complete. Without sums nobody passes turns: it converts what there is.
__device__ __forceinline__ void await_sums(const Parameters& p, const Shared& shared, const Rows& rows) {
    if (!NO_SUMS && threadIdx.x % 32 < CONSUMERS) {
        await_turn(p.turns + block_of(p, shared, rows) * CONSUMERS + threadIdx.x % 32, seen_blocks(p, rows.m_block));
        ptx::fence_async_global();
    }
    __syncwarp();
}

// Puts half a piece of sums on its way; `half` counts the four of a block of rows.
__device__ __forceinline__ void load_half(const Parameters& p, const Shared& shared, const Rows& rows, int half) {
    if (threadIdx.x % 32 != 0) return;
    const int slot = half & 1;
    const int piece = half >> 1;
    const uint64 block = block_of(p, shared, rows);
    ptx::mbarrier_expect_bytes(shared.sums_full(slot), HALF_BYTES + slot * PIECE * 4);
    if (slot == 1) {
        ptx::bulk_load(shared.sums_lse(), p.lse + block * BLOCK_M + (HEAD_DIM == 64 ? PIECE * piece : 0), PIECE * 4,
                       shared.sums_full(slot));
    }
    ptx::bulk_load(shared.sums(slot), p.sums + (block * CONSUMERS + piece) * PIECE_FLOATS + slot * (PIECE_FLOATS / 2), HALF_BYTES,
                   shared.sums_full(slot));
}

// Half a piece, in fragment order, to 32 columns of 64 rows, in a panel with the 128-byte swizzle.
__device__ __forceinline__ void convert_half(float scale, uint32 sums, uint32 out, int half) {
    const uint32 lane = threadIdx.x % 32;
    const uint32 swizzle = lane / 4;
    uint32 from = sums + lane * 16;
    const uint32 to = out + swizzle * panel::ROW_BYTES + lane % 4 * 4;
#pragma unroll 1
    for (uint32 chunk = 4 * half; chunk < 4u * half + 4; ++chunk) {
        const uint32 at = to + ((chunk ^ swizzle) << 4);
#pragma unroll
        for (int warp = 0; warp < 4; ++warp) {
            float x[4];
            load_shared_quad(x, from + warp * 512);
            store_shared(at + warp * 16 * panel::ROW_BYTES, pack(x[0] * scale, x[1] * scale));
            store_shared(at + (warp * 16 + 8) * panel::ROW_BYTES, pack(x[2] * scale, x[3] * scale));
        }
        from += WARPGROUP * 16;
    }
    __syncwarp();
}

// Rows that see no key are zeros, whatever was added.
__device__ __forceinline__ void clear_empty_rows(const Shared& shared, uint32 out) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int first = 0; first < PIECE; first += 32) {
        const float2 lse = load_shared_pair(shared.sums_lse() + (first + (lane & ~1)) * 4);
        uint32 empty = __ballot_sync(0xffffffff, (lane & 1 ? lse.y : lse.x) == -NEGATIVE_INFINITY);
#pragma unroll 1
        for (uint32 row = out + first * panel::ROW_BYTES; empty != 0; empty >>= 1, row += panel::ROW_BYTES) {
            if (empty & 1) store_shared(row + lane * 4, 0u);
        }
    }
}

// A piece of dQ leaves.
__device__ __forceinline__ void finish(const Parameters& p, const Shared& shared, const Rows& rows, int piece) {
    clear_empty_rows(shared, shared.rows_out(piece));
    ptx::fence_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        ptx::tma_store(p.grad_query, shared.rows_out(piece), HEAD_DIM == 64 ? 0 : PIECE * piece,
                       rows.m_block * BLOCK_M + (HEAD_DIM == 64 ? PIECE * piece : 0), rows.head, static_cast<int>(kept(shared).z));
        ptx::bulk_commit();
    }
}

// One warp.
__device__ __forceinline__ void convert(const Parameters& p, const Shared& shared) {
    const bool leads = threadIdx.x % 32 == 0;
    Ring slot;
    wait_for_predecessor();
#pragma unroll 1
    while (true) {
        ptx::mbarrier_wait(shared.tile_full(slot.stage()), slot.parity());
        const Tile tile = read_tile(shared, slot.stage());
        release(shared.tile_empty(slot.stage()));
        slot.advance();
        if (tile.n_block < 0) break;
        const int span = (tile.n_block + 1 < p.n_blocks ? first_m_block(p, tile.n_block + 1) : p.m_blocks) - tile.first;
        if (span <= 0) continue;
        store_shared(shared.converted(), Chunk{static_cast<uint32>(tile.first), static_cast<uint32>(span),
                                               static_cast<uint32>(tile.batch), slot.count});
        __syncwarp();
        const int group = p.num_heads / p.num_kv_heads;
        Rows rows{tile.head * group, tile.first + span - 1};
        await_sums(p, shared, rows);
        load_half(p, shared, rows, 0);
        load_half(p, shared, rows, 1);
#pragma unroll 1
        for (int left = group * span; left > 0; --left) {
            const auto convert_next = [&](int half) {
                ptx::mbarrier_wait(shared.sums_full(half & 1), half >> 1);
                convert_half(p.scale, shared.sums(half & 1), shared.rows_out(half >> 1), half & 1);
                if (half & 1) finish(p, shared, rows, half >> 1);
            };
            if (leads) ptx::bulk_wait_read();
            __syncwarp();
            convert_next(0);
            load_half(p, shared, rows, 2);
            convert_next(1);
            load_half(p, shared, rows, 3);
            Rows next = rows;
            const Chunk tile_rows = kept(shared);
            next.advance(tile_rows.x, tile_rows.y);
            if (left > 1) await_sums(p, shared, next);
            convert_next(2);
            if (left > 1) load_half(p, shared, next, 0);
            convert_next(3);
            if (left > 1) load_half(p, shared, next, 1);
            rows = next;
        }
        slot.count = kept(shared).w;
    }
    if (leads) ptx::bulk_wait();
}

}  // namespace backward

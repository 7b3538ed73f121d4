// The producer warpgroup: one warp loads, the others make the rows' statistics.
#pragma once

#include "backward/statistics.cuh"
#include "hopper_backward_short/shared.cuh"
#include "hopper_backward_short/walk.cuh"
#include "kept_stage.cuh"
#include "ptx/global.cuh"
#include "ptx/shared_floats.cuh"
#include "ptx/vector.cuh"
#include "quad.cuh"

namespace backward {

// One lane. Of each block of keys the first queries and output gradients come before the keys, which have to wait for
// the end of the block before.
__device__ __forceinline__ void produce(const Parameters& p, const Shared& shared) {
    uint32 steps = 0;
    uint32 tiles = 0;
    uint32 outputs = 0;
    for (Head head{static_cast<int>(blockIdx.x), 0}; head.inside(p); head.advance()) {
        const int batch = head.batch(p);
        for (int n_block = 0; n_block < p.n_blocks; ++n_block, ++tiles) {
            bool keys = true;
            const int first = first_m_block(p, n_block);
            for (Walk walk(p, first); walk.left > 0; walk.advance(p, first), ++steps) {
                const int row = walk.m_block * BLOCK_M;
                const int query_head = head.query_head(p) + walk.block / p.m_blocks;
                const uint32 of_query = stage_of<QUERY_STAGES>(steps);
                ptx::mbarrier_wait(shared.query_empty(of_query), parity_of<QUERY_STAGES>(steps) ^ 1);
                if (!keeps_stage(shared.query_full(of_query), steps, QUERY_STAGES)) {
                    ptx::mbarrier_expect_bytes(shared.query_full(of_query), QUERY_BYTES);
                    ptx::tma_load(p.query, shared.query(of_query), shared.query_full(of_query), ptx::EVICT_LAST, 0, row,
                                  query_head, batch);
                }
                const uint32 of_gradient = stage_of<GRADIENT_STAGES>(steps);
                ptx::mbarrier_wait(shared.gradient_empty(of_gradient), parity_of<GRADIENT_STAGES>(steps) ^ 1);
                if (!keeps_stage(shared.gradient_full(of_gradient), steps, GRADIENT_STAGES)) {
                    ptx::mbarrier_expect_bytes(shared.gradient_full(of_gradient), QUERY_BYTES);
                    ptx::tma_load(p.grad_output, shared.gradient(of_gradient), shared.gradient_full(of_gradient), ptx::EVICT_LAST,
                                  0, row, query_head, batch);
                }
                if (n_block == 0) {
                    ptx::mbarrier_wait(shared.output_empty(), (outputs & 1) ^ 1);
                    if (!keeps_stage(shared.output_full(), outputs++, 1)) {
                        ptx::mbarrier_expect_bytes(shared.output_full(), QUERY_BYTES);
                        ptx::tma_load(p.output, shared.output(), shared.output_full(), ptx::EVICT_FIRST, 0, row, query_head,
                                      batch);
                    }
                }
                if (!keys) continue;
                keys = false;
                ptx::mbarrier_wait(shared.keys_empty(), (tiles & 1) ^ 1);
                ptx::mbarrier_expect_bytes(shared.key_full(), KEY_BYTES);
                ptx::tma_load(p.key, shared.key(), shared.key_full(), ptx::EVICT_FIRST, 0, n_block * BLOCK_N, head.head(p), batch);
                ptx::mbarrier_expect_bytes(shared.value_full(), KEY_BYTES);
                ptx::tma_load(p.value, shared.scores(), shared.value_full(), ptx::EVICT_FIRST, 0, n_block * BLOCK_N,
                              head.head(p), batch);
            }
        }
    }
}

// One warp: of each row, the log-sum-exp to base 2, and its gradient, negative. Rows of blocks that see no key get their zeros
// here, as nobody comes by them.
__device__ __forceinline__ void prepare(const Parameters& p, const Shared& shared) {
    constexpr float MOST = 3.402823466e38f;
    constexpr int AT_ONCE = 4;  // rows of a lane, loaded before any is stored
    const int lane = threadIdx.x % 32;
    const int padded = p.m_blocks * BLOCK_M;
    const int rows = p.num_heads / p.num_kv_heads * padded;
    for (Head head{static_cast<int>(blockIdx.x), 0}; head.inside(p); head.advance()) {
        const int parity = head.index % HEADS;
        ptx::mbarrier_wait(shared.statistics_empty(parity), parity_of<HEADS>(head.index) ^ 1);
        const int batch = head.batch(p);
        for (int begin = lane; begin < rows; begin += 32 * AT_ONCE) {
            float lse[AT_ONCE];
            float gradient[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int query_head = head.query_head(p) + (begin + 32 * i) / padded;
                const int row = (begin + 32 * i) % padded;
                lse[i] = NEGATIVE_INFINITY;
                gradient[i] = 0.f;
                if (begin + 32 * i < rows && row < p.seqlen_q) {
                    lse[i] = p.lse[(static_cast<int64>(batch) * p.num_heads + query_head) * p.seqlen_q + row];
                    if (p.grad_lse != nullptr) {
                        gradient[i] = p.grad_lse[batch * p.grad_lse_stride[0] + query_head * p.grad_lse_stride[1] +
                                                 row * p.grad_lse_stride[2]];
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int at = begin + 32 * i;
                if (at >= rows) break;
                // Infinity is for rows without keys alone: of an infinite score comes NaN, of an infinite sink zero.
                store_shared_float(shared.lse(parity, 0) + at * 4, lse[i] == POSITIVE_INFINITY ? MOST : to_log2(lse[i]));
                store_shared_float(shared.delta(parity, 0) + at * 4, -gradient[i]);
                const int row = at % padded;
                if (CAUSAL && lse[i] == NEGATIVE_INFINITY && row < p.seqlen_q) {
                    uint16* own = p.grad_query + batch * p.grad_query_stride[0] +
                                  (head.query_head(p) + at / padded) * p.grad_query_stride[1] + row * p.grad_query_stride[2];
                    for (int chunk = 0; chunk < p.head_dim / 8; ++chunk) {
                        store_global(reinterpret_cast<char*>(own + chunk * 8), Chunk{});
                    }
                }
            }
        }
        release(shared.statistics_full(parity));
    }
}

// DELTA_WARPS warps: delta, of the tiles that have come for a head's first keys. Four lanes share a row.
__device__ __forceinline__ void make_delta(const Parameters& p, const Shared& shared, int warp) {
    constexpr int ROWS_AT_ONCE = 8;
    const int lane = threadIdx.x % 32;
    uint32 steps = 0;  // of all blocks of keys
    uint32 outputs = 0;
    for (Head head{static_cast<int>(blockIdx.x), 0}; head.inside(p); head.advance()) {
        const int parity = head.index % HEADS;
        const int first = first_m_block(p, 0);
        ptx::mbarrier_wait(shared.statistics_full(parity), parity_of<HEADS>(head.index));
        for (Walk walk(p, first); walk.left > 0; walk.advance(p, first), ++steps, ++outputs) {
            const uint32 stage = stage_of<GRADIENT_STAGES>(steps);
            ptx::mbarrier_wait(shared.gradient_full(stage), parity_of<GRADIENT_STAGES>(steps));
            ptx::mbarrier_wait(shared.output_full(), outputs & 1);
#pragma unroll
            for (int i = 0; i < BLOCK_M / ROWS_AT_ONCE / DELTA_WARPS; ++i) {
                const int row = (i * DELTA_WARPS + warp) * ROWS_AT_ONCE + lane / 4;
                float sum = 0.f;
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int chunk = lane % 4 * 2 + j;
                    sum = dot(load_shared(panel::chunk_address<BLOCK_M>(shared.output(), row, chunk)),
                              load_shared(panel::chunk_address<BLOCK_M>(shared.gradient(stage), row, chunk)), sum);
                }
                sum = quad_sum(sum);
                if (lane % 4 == 0) {
                    const bool empty = load_shared_float(shared.lse(parity, walk.block) + row * 4) == POSITIVE_INFINITY;
                    const uint32 delta = shared.delta(parity, walk.block) + row * 4;
                    store_shared_float(delta, empty ? 0.f : sum + load_shared_float(delta));
                }
            }
            release(shared.output_empty());
            release(shared.gradient_empty(stage));
            release(shared.delta_full(stage_of<GRADIENT_STAGES>(outputs)));
        }
        // Of other keys, only to stay in step: a barrier's parity tells neighbouring rounds apart, and no others.
        for (int n_block = 1; n_block < p.n_blocks; ++n_block) {
            for (int left = Walk(p, first_m_block(p, n_block)).left; left > 0; --left, ++steps) {
                const uint32 stage = stage_of<GRADIENT_STAGES>(steps);
                ptx::mbarrier_wait(shared.gradient_full(stage), parity_of<GRADIENT_STAGES>(steps));
                release(shared.gradient_empty(stage));
            }
        }
    }
}

}  // namespace backward

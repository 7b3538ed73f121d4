// Attention backward for Hopper (sm_90a) and short sequences: one launch, no memory but the gradients, deterministic.
//
// A block has whole heads of keys, one after another: all their blocks of 128 keys, and for each the blocks of 64 query rows that
// see it. So the sums of dQ stay in shared memory, in float32, from one block of keys to the next: a lane adds to what it
// alone has written, and nobody waits for another block. dK and dV stay in registers, as in attention_backward_hopper.cu, which
// has the products and their order. Keys and values are operands from registers. Delta, the sum over the head dimension
// of output times output gradient, is made of tiles in shared memory where a head's first keys are worked on.
//
// Compile-time configuration: HEAD_DIM (64), CAUSAL, ELEMENT_BF16; ABLATE to leave something out (ablation.cuh).

#include "hopper_backward_short/parameters.cuh"

#include "hopper_backward/arithmetic.cuh"
#include "hopper_backward/store.cuh"
#include "hopper_backward_short/producer.cuh"
#include "hopper_backward_short/shared.cuh"
#include "hopper_backward_short/walk.cuh"
#include "mma/descriptor.cuh"
#include "ptx/bulk.cuh"
#include "ptx/dependent_launch.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/warpgroup.cuh"

namespace backward {

using Piece = ptx::Wgmma<PIECE>;

// This warp's 16 rows of keys or values, as the left operand of products along the head dimension.
__device__ __forceinline__ void hold_rows(uint32 (&held)[HEAD_DIM / 4], uint32 tile, int first_row) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; ++k) {
        uint32 matrices[4];
        load_matrices(matrices, panel::chunk_address<BLOCK_N>(tile, first_row + lane % 16, 2 * k + lane / 16));
#pragma unroll
        for (int i = 0; i < 4; ++i) held[4 * k + i] = matrices[i];
    }
}

// Held keys (or values) times query rows (or output gradients), along the head dimension; issued, not awaited.
__device__ __forceinline__ void multiply_held(float (&s)[BLOCK_M / 2], const uint32 (&held)[HEAD_DIM / 4], uint32 rows) {
    const uint64 operand = panel::k_major(opaque(rows));
    ptx::forget(s);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; ++k) {
        Scores::rs<0>(s, held[4 * k], held[4 * k + 1], held[4 * k + 2], held[4 * k + 3],
                      operand + panel::k_major_offset<BLOCK_M>(k), k != 0);
    }
    ptx::wgmma_commit();
}

// A consumer's head dims of dQ, along all keys of the block; issued, not awaited. `adds`: to what the piece holds.
__device__ __forceinline__ void multiply_scores(float (&piece)[PIECE / 2], const Shared& shared, int consumer, bool adds) {
    const uint64 scores = panel::mn_major<BLOCK_N>(opaque(shared.scores()));
    const uint64 keys = panel::mn_major<BLOCK_N>(opaque(shared.key() + consumer * PIECE * 2));
    ptx::pin(piece);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < BLOCK_N / 16; ++k) {
        Piece::ss<1>(piece, scores + panel::mn_major_offset(k), keys + panel::mn_major_offset(k), k != 0 || adds);
    }
    ptx::wgmma_commit();
}

// What this lane has of a block's sums, from one block of keys to the next.
__device__ __forceinline__ uint32 own_sums(const Shared& shared, int block, int consumer) {
    return opaque(shared.sum(block, consumer)) + threadIdx.x % WARPGROUP * 16;
}

__device__ __forceinline__ void load_sums(float (&piece)[PIECE / 2], uint32 address) {
#pragma unroll
    for (int i = 0; i < PIECE / 8; ++i) {
        float quad[4];
        load_shared_quad(quad, address + i * WARPGROUP * 16);
#pragma unroll
        for (int j = 0; j < 4; ++j) piece[4 * i + j] = quad[j];
    }
}

__device__ __forceinline__ void store_sums(const float (&piece)[PIECE / 2], uint32 address) {
#pragma unroll
    for (int i = 0; i < PIECE / 8; ++i) {
        store_shared_quad(address + i * WARPGROUP * 16, {piece[4 * i], piece[4 * i + 1], piece[4 * i + 2], piece[4 * i + 3]});
    }
}

// Complete sums leave. Rows that see no key are zeros, whatever was added. `lse`: of the block's first row.
__device__ __forceinline__ void store_query(const Parameters& p, float (&piece)[PIECE / 2], uint32 lse, const Head& head,
                                            const Walk& walk, int consumer) {
    const uint32 own = lse + (threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4) * 4;
    const bool empty[2] = {load_shared_float(own) == POSITIVE_INFINITY, load_shared_float(own + 8 * 4) == POSITIVE_INFINITY};
#pragma unroll
    for (int i = 0; i < PIECE / 2; ++i) {
        if (empty[i / 2 % 2]) piece[i] = 0.f;
    }
    uint16* start = p.grad_query + head.batch(p) * p.grad_query_stride[0] +
                    (head.query_head(p) + walk.block / p.m_blocks) * p.grad_query_stride[1];
    store_rows<PIECE>(piece, p.scale, start, p.grad_query_stride[2], walk.m_block * BLOCK_M, p.seqlen_q, consumer * PIECE,
                      p.head_dim);
}

// Counts of what a consumer has gone through; their parities are those of barriers.
struct Progress {
    uint32 steps = 0;
    uint32 tiles = 0;
    uint32 outputs = 0;
};

__device__ __forceinline__ void consume_tile(const Parameters& p, const Shared& shared, const Head& head, int n_block,
                                             int consumer, Progress& progress) {
    const int lane = threadIdx.x % 32;
    const int own_row = consumer * ROWS + threadIdx.x / 32 % 4 * 16;  // this warp's first, of the block's keys
    const int column = 2 * (lane % 4);
    const int parity = head.index % HEADS;
    const int first = first_m_block(p, n_block);
    Walk walk(p, first);

    float s[BLOCK_M / 2];
    float dp[BLOCK_M / 2];
    float dk[HEAD_DIM / 2] = {};
    float dv[HEAD_DIM / 2] = {};
    float piece[PIECE / 2] = {};
    uint32 keys[HEAD_DIM / 4];
    uint32 values[HEAD_DIM / 4];
    uint32 probabilities[BLOCK_M / 4];
    uint32 gradients[BLOCK_M / 4];

    const auto issue_scores = [&] {
        const uint32 stage = stage_of<QUERY_STAGES>(progress.steps);
        ptx::mbarrier_wait(shared.query_full(stage), parity_of<QUERY_STAGES>(progress.steps));
        multiply_held(s, keys, shared.query(stage));
    };
    const auto probe = [&] {
        const int row = walk.m_block * BLOCK_M;
        const int first_key = n_block * BLOCK_N;
        const int shift = p.seqlen_k - p.seqlen_q;
        if (!NO_MASK && ((CAUSAL && row < first_key + BLOCK_N - 1 - shift) || first_key + BLOCK_N > p.seqlen_k)) {
            const int key = first_key + own_row + lane / 4;
            const int sees = (CAUSAL ? key - shift - row : -NEVER) - column;
            mask(s, key < p.seqlen_k ? sees : NEVER, key + 8 < p.seqlen_k ? sees + 8 : NEVER);
        }
        exponentiate(s, p.scale_log2, shared.lse(parity, walk.block) + column * 4);
    };

    ptx::mbarrier_wait(shared.key_full(), progress.tiles & 1);
    hold_rows(keys, shared.key(), own_row);
    issue_scores();
    ptx::mbarrier_wait(shared.value_full(), progress.tiles & 1);
    hold_rows(values, shared.scores(), own_row);
    if (n_block == 0) ptx::mbarrier_wait(shared.statistics_full(parity), parity_of<HEADS>(head.index));
    ptx::wgmma_wait<0>();
    ptx::pin(s);
    probe();

    // A step begins with its probabilities, and ends with those of the next.
    const auto step = [&](auto last) {
        constexpr bool LAST = decltype(last)::value;
        const Walk done = walk;
        const uint32 query = stage_of<QUERY_STAGES>(progress.steps);
        const uint32 gradient = stage_of<GRADIENT_STAGES>(progress.steps);
        const uint32 step_parity = progress.steps & 1;
        const uint32 delta = shared.delta(parity, done.block);
        ptx::mbarrier_wait(shared.gradient_full(gradient), parity_of<GRADIENT_STAGES>(progress.steps));
        multiply_held(dp, values, shared.gradient(gradient));
        pack_fragment<0, CHUNKS>(s, probabilities);
        accumulate<0, CHUNKS>(dv, probabilities, panel::mn_major<BLOCK_M>(opaque(shared.gradient(gradient))));
        ptx::wgmma_commit();
        if (n_block == 0) {
            ptx::mbarrier_wait(shared.delta_full(stage_of<GRADIENT_STAGES>(progress.outputs)),
                               parity_of<GRADIENT_STAGES>(progress.outputs));
            ++progress.outputs;
        }
        ptx::wgmma_wait<1>();
        ptx::pin(dp);
        differentiate<0, CHUNKS>(dp, s, delta + column * 4);
        pack_fragment<0, CHUNKS>(dp, gradients);
        ptx::mbarrier_wait(shared.scores_empty(), step_parity ^ 1);
        store_scores<0, CHUNKS>(gradients, opaque(shared.scores()), own_row + lane % 16);
        accumulate<0, CHUNKS>(dk, gradients, panel::mn_major<BLOCK_M>(opaque(shared.query(query))));
        ptx::wgmma_commit();
        ptx::fence_async_shared();
        release(shared.scores_full());

        ++progress.steps;
        walk.advance(p, first);
        if constexpr (!LAST) {
            // The score registers are free once packed, dV's operands once it is complete.
            ptx::wgmma_wait<1>();
            ptx::pin(dv);
            release(shared.gradient_empty(gradient));
            issue_scores();
            ptx::wgmma_wait<1>();
        } else {
            ptx::wgmma_wait<0>();
            ptx::pin(dv);
            release(shared.gradient_empty(gradient));
        }
        ptx::pin(dk);
        release(shared.query_empty(query));
        if (n_block > 0) load_sums(piece, own_sums(shared, done.block, consumer));
        ptx::mbarrier_wait(shared.scores_full(), step_parity);
        multiply_scores(piece, shared, consumer, n_block > 0);
        if constexpr (!LAST) {
            ptx::wgmma_wait<1>();
            ptx::pin(s);
            probe();
        }
        ptx::wgmma_wait<0>();
        ptx::pin(piece);
        release(shared.scores_empty());
        if (n_block + 1 < seen_blocks(p, done.m_block)) {
            store_sums(piece, own_sums(shared, done.block, consumer));
        } else {
            store_query(p, piece, shared.lse(parity, done.block), head, done, consumer);
        }
    };
    while (walk.left > 1) step(Flag<false>());
    step(Flag<true>());
    release(shared.keys_empty());
    if (n_block + 1 == p.n_blocks) release(shared.statistics_empty(parity));
    ++progress.tiles;

    const auto store_keys = [&](const float (&sum)[HEAD_DIM / 2], float factor, uint16* gradient, const int64 (&stride)[3]) {
        store_rows<HEAD_DIM>(sum, factor, gradient + head.batch(p) * stride[0] + head.head(p) * stride[1], stride[2],
                             n_block * BLOCK_N + consumer * ROWS, p.seqlen_k, 0, p.head_dim);
    };
    store_keys(dv, 1.f, p.grad_value, p.grad_value_stride);
    store_keys(dk, p.scale, p.grad_key, p.grad_key_stride);
}

__device__ __forceinline__ void consume(const Parameters& p, const Shared& shared, int consumer) {
    Progress progress;
#pragma unroll 1
    for (Head head{static_cast<int>(blockIdx.x), 0}; head.inside(p); head.advance()) {
#pragma unroll 1
        for (int n_block = 0; n_block < p.n_blocks; ++n_block) consume_tile(p, shared, head, n_block, consumer, progress);
    }
}

}  // namespace backward

extern "C" __global__ void __launch_bounds__(backward::THREADS, 1)
    attention_backward_short(const __grid_constant__ backward::Parameters parameters) {
    using namespace backward;
    extern __shared__ __align__(1024) char shared_memory[];
    const Shared shared{shared_address(shared_memory)};

    const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x / 32), 0);
    const int warpgroup = warp / 4;
    if (warp == 0 && ptx::elect_lane()) {
        ptx::prefetch_map(parameters.query);
        ptx::prefetch_map(parameters.key);
        ptx::prefetch_map(parameters.value);
        ptx::prefetch_map(parameters.grad_output);
        ptx::prefetch_map(parameters.output);
        initialise(shared);
    }
    __syncthreads();
    wait_for_predecessor();
    allow_successor();

    if (warpgroup == 0) {
        ptx::give_up_registers<PRODUCER_REGISTERS>();
        if (warp == 0) {
            if (ptx::elect_lane()) produce(parameters, shared);
        } else if (warp == 1) {
            prepare(parameters, shared);
        } else {
            make_delta(parameters, shared, warp - 2);
        }
    } else {
        ptx::claim_registers<CONSUMER_REGISTERS>();
        consume(parameters, shared, warpgroup - 1);
    }
}

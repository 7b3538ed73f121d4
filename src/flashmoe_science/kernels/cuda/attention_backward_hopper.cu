// Attention backward for Hopper (sm_90a): TMA, wgmma and specialised warpgroups; deterministic.
//
// A block owns 128 keys and walks over the query rows that see them, of every head that shares the keys, so that dK and dV
// never leave its registers. Two warpgroups consume, 64 keys each. Transposed, as all here:
//   P = exp2(scale K Q^T - LSE);  dV += P dO;  dP = V dO^T;  dS = P (dP - delta);  dK += dS Q;  dQ = dS^T K
// P and dS are operands straight from registers; dS also goes through shared memory, where the product for dQ sums both
// warpgroups' keys. Pieces of dQ are added to float32 sums in global memory by bulk copies, in a fixed order
// (producer.cuh), and converted by a warp (converter.cuh) or a kernel of their own, while the next scores are computed.
//
// Sources: Dao et al., FlashAttention-2 (2023); Shah et al., FlashAttention-3 (2024), keys on wgmma's rows.
//
// Compile-time configuration: HEAD_DIM (64 or 128), BLOCK_M, CAUSAL, WINDOW, CONVERTS, STAGGERED, ELEMENT_BF16;
// ABLATE to leave something out (ablation.cuh).

#include "hopper_backward/parameters.cuh"

#include "hopper_backward/arithmetic.cuh"
#include "hopper_backward/converter.cuh"
#include "hopper_backward/producer.cuh"
#include "hopper_backward/scheduler.cuh"
#include "hopper_backward/shared.cuh"
#include "hopper_backward/store.cuh"
#include "mma/descriptor.cuh"
#include "mma/narrow_panel.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_floats.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"

namespace backward {

using Piece = ptx::Wgmma<PIECE>;

// Chunks of 16 query rows: of dV, those multiplied while dP is on the way, and of dS, those made at a time. Registers are too
// short for all at 80 rows, where the products of one chunk run under the arithmetic of the next.
constexpr int EARLY = TRANSPOSED ? 1 : CHUNKS;
constexpr int GROUP = TRANSPOSED ? 2 : CHUNKS;

template <int VALUE>
struct Number {
    static constexpr int value = VALUE;
};

// Calls `f` with Number<BEGIN>, the next GROUP and so on, below CHUNKS.
template <int BEGIN, typename F>
__device__ __forceinline__ void by_groups(const F& f) {
    if constexpr (BEGIN < CHUNKS) {
        f(Number<BEGIN>());
        by_groups<BEGIN + GROUP>(f);
    }
}

// A piece of dQ, along all keys of the block: query rows by head dims, or transposed; issued, not awaited.
__device__ __forceinline__ void multiply_scores(float (&piece)[PIECE / 2], uint64 scores, uint64 keys) {
    ptx::forget(piece);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < BLOCK_N / 16; ++k) {
        if constexpr (TRANSPOSED) {
            Piece::ss<1>(piece, keys + panel::mn_major_offset(k), scores + narrow_panel::mn_major_offset(k), k != 0);
        } else {
            Piece::ss<1>(piece, scores + panel::mn_major_offset(k), keys + panel::mn_major_offset(k), k != 0);
        }
    }
    ptx::wgmma_commit();
}

// dK or dV of a consumer's keys.
__device__ __forceinline__ void store_keys(const Parameters& p, const float (&sum)[HEAD_DIM / 2], float factor,
                                           uint16* destination, const int64 (&stride)[3], const Tile& tile, int consumer) {
    store_rows<HEAD_DIM>(sum, factor, destination + tile.batch * stride[0] + tile.head * stride[1], stride[2],
                         tile.n_block * BLOCK_N + consumer * ROWS, p.seqlen_k, 0, p.head_dim);
}

__device__ __forceinline__ void consume_tile(const Parameters& p, const Shared& shared, const Tile& tile, int consumer,
                                             Progress& progress) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32 % 4;
    const int own_row = consumer * ROWS + warp * 16;  // of the block's keys
    const int column = 2 * (lane % 4);
    const auto key_rows = [&] { return panel::k_major(opaque(shared.key() + consumer * ROWS * panel::ROW_BYTES)); };
    const auto value_rows = [&] { return panel::k_major(opaque(shared.value() + consumer * ROWS * panel::ROW_BYTES)); };
    // Where there are two panels of head dims, a consumer's piece of dQ is one; else, half of the query rows.
    const auto piece_keys = [&] {
        return panel::mn_major<BLOCK_N>(opaque(shared.key() + (PANELS == 2 ? consumer * KEY_PANEL_BYTES : 0)));
    };
    const auto piece_scores = [&](int buffer) {
        const uint32 scores = opaque(shared.scores(buffer) + (PANELS == 2 ? 0 : consumer * SCORE_PANEL_BYTES));
        return TRANSPOSED ? narrow_panel::mn_major<BLOCK_N>(scores) : panel::mn_major<BLOCK_N>(scores);
    };

    float s[BLOCK_M / 2];
    float dp[BLOCK_M / 2];
    float dk[HEAD_DIM / 2] = {};
    float dv[HEAD_DIM / 2] = {};
    float piece[PIECE / 2] = {};
    uint32 probabilities[BLOCK_M / 4];
    uint32 gradients[BLOCK_M / 4];

    // The steps of `Walk`, without the heads: the step's first query row, and how many are left.
    const int last_row = (end_m_block(p, tile.n_block) - 1) * BLOCK_M;
    int row = last_row;  // where CAUSAL
    int left = Walk(p, tile).left;
    bool started = false;

    const auto probe = [&] {
        // From shared memory, because registers are short.
        const int first_key = read_tile(shared, progress.tiles().stage()).n_block * BLOCK_N;
        const int shift = p.seqlen_k - p.seqlen_q;
        // Without a mask the branch stays and is never taken: without the branch, head dim 64 spills.
        if (NO_MASK ? p.seqlen_k < 0
                    : (CAUSAL && row < first_key + BLOCK_N - 1 - shift) || first_key + BLOCK_N > p.seqlen_k) {
            const int key = first_key + own_row + lane / 4;
            const int first = (CAUSAL ? key - shift - row : -NEVER) - column;
            mask(s, key < p.seqlen_k ? first : NEVER, key + 8 < p.seqlen_k ? first + 8 : NEVER);
        }
        if (!NO_MASK && WINDOW && row + BLOCK_M - 1 > first_key + p.window_left - shift) {
            const int end = first_key + own_row + lane / 4 + p.window_left + 1 - shift - row - column;
            mask_after(s, end, end + 8);
        }
        exponentiate(s, p.scale_log2, shared.lse(progress.steps().stage()) + column * 4);
    };
    const auto store_piece = [&] {
        // The steps' count is that of the next step by now, and its parity that of the one buffer's round.
        ptx::mbarrier_wait(shared.piece_empty(consumer), progress.steps().stage());
        const uint32 address = opaque(shared.piece(consumer)) + (warp * 32 + lane) * 16;
#pragma unroll
        for (int i = 0; i < PIECE / 8; ++i) {
            store_shared_quad(address + i * WARPGROUP * 16,
                              {piece[4 * i], piece[4 * i + 1], piece[4 * i + 2], piece[4 * i + 3]});
        }
    };

    const uint32 keys_parity = progress.tiles().stage();  // keys have one buffer, tiles two slots
    ptx::mbarrier_wait(shared.key_full(), keys_parity);
    ptx::mbarrier_wait(shared.query_full(progress.steps().stage()), progress.steps().parity());
    multiply_rows(s, key_rows(), panel::k_major(opaque(shared.query(progress.steps().stage()))));
    ptx::mbarrier_wait(shared.value_full(), keys_parity);
    ptx::wgmma_wait<0>();
    ptx::pin(s);
    probe();

    // A step begins with its probabilities, and ends with those of the next.
    const auto step = [&](auto last) {
        constexpr bool LAST = decltype(last)::value;
        const uint32 query = shared.query(progress.steps().stage());
        const uint32 gradient = shared.gradient(progress.steps().stage());
        ptx::mbarrier_wait(shared.gradient_full(progress.steps().stage()), progress.steps().parity());
        multiply_rows(dp, value_rows(), panel::k_major(opaque(gradient)));
        pack_fragment<0, EARLY>(s, probabilities);
        accumulate<0, EARLY>(dv, probabilities, panel::mn_major<BLOCK_M>(opaque(gradient)));
        ptx::wgmma_commit();
        ptx::wgmma_wait<1>();
        ptx::pin(dp);
        by_groups<0>([&](auto first) {
            constexpr int BEGIN = decltype(first)::value;
            constexpr int END = BEGIN + GROUP < CHUNKS ? BEGIN + GROUP : CHUNKS;
            differentiate<BEGIN, END>(dp, s, shared.delta(progress.steps().stage()) + column * 4);
            pack_fragment<BEGIN, END>(dp, gradients);
            store_scores<BEGIN, END>(gradients, opaque(shared.scores(progress.steps().stage())), own_row + lane % 16);
            if constexpr (EARLY < END) {
                constexpr int LATE = BEGIN > EARLY ? BEGIN : EARLY;
                pack_fragment<LATE, END>(s, probabilities);
                accumulate<LATE, END>(dv, probabilities, panel::mn_major<BLOCK_M>(opaque(gradient)));
                if constexpr (END == CHUNKS) ptx::wgmma_commit();
            }
            accumulate<BEGIN, END>(dk, gradients, panel::mn_major<BLOCK_M>(opaque(query)));
        });
        ptx::wgmma_commit();
        ptx::fence_async_shared();
        release(shared.scores_full(progress.steps().stage()));
        if (started) release(shared.piece_full(consumer));
        started = true;

        const Ring done = progress.steps();
        progress.step();
        if constexpr (CAUSAL) {
            row = row > read_tile(shared, progress.tiles().stage()).first * BLOCK_M ? row - BLOCK_M : last_row;
        }
        --left;
        if constexpr (!LAST) {
            // The score registers are free once packed, dV's operands once it is complete.
            ptx::wgmma_wait<1>();
            ptx::pin(dv);
            release(shared.gradient_empty(done.stage()));
            ptx::mbarrier_wait(shared.query_full(progress.steps().stage()), progress.steps().parity());
            multiply_rows(s, key_rows(), panel::k_major(opaque(shared.query(progress.steps().stage()))));
            ptx::wgmma_wait<1>();
        } else {
            ptx::wgmma_wait<0>();
            ptx::pin(dv);
            release(shared.gradient_empty(done.stage()));
        }
        ptx::pin(dk);
        release(shared.query_empty(done.stage()));
        ptx::mbarrier_wait(shared.scores_full(done.stage()), done.parity());
        multiply_scores(piece, piece_scores(done.stage()), piece_keys());
        if constexpr (!LAST) {
            ptx::wgmma_wait<1>();
            ptx::pin(s);
            probe();
        }
        ptx::wgmma_wait<0>();
        ptx::pin(piece);
        store_piece();
    };
    while (left > 1) step(Flag<false>());
    step(Flag<true>());
    release(shared.keys_empty());
    ptx::fence_async_shared();
    release(shared.piece_full(consumer));

    const Tile again = read_tile(shared, progress.tiles().stage());  // held in registers throughout, it would not leave enough
    store_keys(p, dv, 1.f, p.grad_value, p.grad_value_stride, again, consumer);
    store_keys(p, dk, p.scale, p.grad_key, p.grad_key_stride, again, consumer);
}

// Keys that no row sees, which are not loaded.
__device__ __forceinline__ void skip_tile(const Parameters& p, const Shared& shared, const Tile& tile, int consumer,
                                          const Progress& progress) {
    ptx::mbarrier_wait(shared.key_full(), progress.tiles().stage());
    ptx::mbarrier_wait(shared.value_full(), progress.tiles().stage());
    release(shared.keys_empty());
    float zeros[HEAD_DIM / 2] = {};
    store_keys(p, zeros, 0.f, p.grad_value, p.grad_value_stride, tile, consumer);
    store_keys(p, zeros, 0.f, p.grad_key, p.grad_key_stride, tile, consumer);
}

__device__ __forceinline__ void consume(const Parameters& p, const Shared& shared, int consumer) {
    Progress progress;
#pragma unroll 1
    while (true) {
        ptx::mbarrier_wait(shared.tile_full(progress.tiles().stage()), progress.tiles().parity());
        const Tile tile = read_tile(shared, progress.tiles().stage());
        if (tile.n_block < 0) break;
        if (WINDOW && Walk(p, tile).left == 0) {
            skip_tile(p, shared, tile, consumer, progress);
        } else {
            consume_tile(p, shared, tile, consumer, progress);
        }
        release(shared.tile_empty(progress.tiles().stage()));
        progress.tile();
    }
}

}  // namespace backward

extern "C" __global__ void __launch_bounds__(backward::THREADS, 1)
    attention_backward_hopper(const __grid_constant__ backward::Parameters parameters) {
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
        initialise(shared);
    }
    __syncthreads();
    allow_successor();

    if (warpgroup == 0) {
        ptx::give_up_registers<PRODUCER_REGISTERS>();
        if (warp == 0) {
            if (ptx::elect_lane()) produce(parameters, shared);
        } else if (warp <= CONSUMERS) {
            if (ptx::elect_lane()) write_pieces(parameters, shared, warp - 1);
        } else if (CONVERTS) {
            convert(parameters, shared);
        }
    } else {
        ptx::claim_registers<CONSUMER_REGISTERS>();
        consume(parameters, shared, warpgroup - 1);
    }
}

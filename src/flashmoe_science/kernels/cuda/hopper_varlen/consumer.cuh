// A consumer warpgroup: the main loop of attention_hopper.cu, with tiles whose ends are no block's and rows written one by one.
#pragma once

#include "hopper/products.cuh"
#include "hopper/softmax.cuh"
#include "hopper_varlen/shared.cuh"
#include "mma/descriptor.cuh"
#include "ptx/bulk.cuh"
#include "ptx/global.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/wgmma.cuh"

namespace hopper {

constexpr float LN_2 = 0.693147180559945f;
constexpr float LOG2_E = 1.44269504088896f;

// Named barriers, one per consumer: its turn on the tensor cores.
constexpr int TURN_BARRIER = 1;

// cap x tanh(x / cap) = cap - 2 cap / (1 + e^(2 x / cap)), in units of log2.
template <int N>
__device__ __forceinline__ void cap_scores(float (&s)[N], const Parameters& p) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        s[i] = fmaf(-2.f * p.softcap_log2, reciprocal(1.f + exp2_approx(s[i] * p.softcap_rate)), p.softcap_log2);
    }
}

// Sets the scores of keys before those that may be seen to -inf. `low`, `high`: the first key, counted from this lane's first
// column on, that each of its two rows sees.
template <int N>
__device__ __forceinline__ void mask_before(float (&s)[N], int low, int high) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            if (2 * i + j < low) s[i + j] = NEGATIVE_INFINITY;
            if (2 * i + j < high) s[i + 2 + j] = NEGATIVE_INFINITY;
        }
    }
}

#if TREE
// Sets the scores of keys that a tree hides from this lane's two rows to -inf. `first`: the lane's first column, counted from the
// key of the sequence's first query.
template <int N>
__device__ __forceinline__ void mask_tree(float (&s)[N], uint64 low, uint64 high, int first) {
    uint64 of_low = 0, of_high = 0;  // of 64 columns
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        const int column = 2 * i % 64;
        if (column == 0) of_low = hidden_from(low, first + 2 * i), of_high = hidden_from(high, first + 2 * i);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            if (of_low >> (column + j) & 1) s[i + j] = NEGATIVE_INFINITY;
            if (of_high >> (column + j) & 1) s[i + 2 + j] = NEGATIVE_INFINITY;
        }
    }
}
#endif

// Normalises and writes this lane's two rows of the output, and their log-sum-exp: see attention_hopper.cu.
__device__ __forceinline__ void store_rows(const Parameters& p, float (&o)[VALUE_DIM / 2], const Softmax& softmax,
                                           const Tile& tile, int consumer) {
    const int lane = threadIdx.x % 32;
    const bool odd = lane & 1;
    const int first_row = tile.first_row + consumer * ROWS + threadIdx.x / 32 % 4 * 16 + lane / 4;
    const int first_column = (odd ? 8 : 0) + (lane & 2) * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = first_row + 8 * half;
        const int token = row >> p.heads_shift;
        const int head = (tile.slice << p.heads_shift) + row - (token << p.heads_shift);
        const float sum = quad_sum(softmax.sum[half]);
#if TREE
        const bool empty = softmax.reference[half] == NEGATIVE_INFINITY;  // the row sees no key
#else
        const bool empty =
            end_key(p, token, tile.keys, tile.offset()) <= first_key(p, token, tile.offset());  // the row sees no key
#endif
        if (__any_sync(0xffffffff, empty)) {
            // Not by a factor of zero: a value that nobody sees may be NaN.
#pragma unroll
            for (int i = 2 * half; i < VALUE_DIM / 2; i += 4) {
                if (empty) o[i] = o[i + 1] = 0.f;
            }
        }
        const bool inside = token < tile.tokens;
        float total = sum;
        if (p.sinks != nullptr && inside) total += exp2_approx(fmaf(p.sinks[head], LOG2_E, -softmax.reference[half]));
        const float factor = empty ? 1.f : reciprocal(total);
        const int64 place = static_cast<int64>(tile.query_start + token);
        if (p.lse != nullptr && lane % 4 == 0 && inside) {
            p.lse[place * (p.slices << p.heads_shift) + head] =
                empty ? NEGATIVE_INFINITY : softmax.reference[half] * LN_2 + logf(sum);
        }
        uint16* destination = p.output + place * p.output_row + head * p.output_head + first_column;
#pragma unroll
        for (int group = 0; group < VALUE_DIM / 8; group += 2) {
            const float* pair = o + 4 * group + 2 * half;
            const uint32 left = pack(pair[0] * factor, pair[1] * factor);
            const uint32 right = pack(pair[4] * factor, pair[5] * factor);
            const uint32 received = __shfl_xor_sync(0xffffffff, odd ? left : right, 1);
            if (inside && group * 8 + first_column < p.value_dim) {
                store_global(reinterpret_cast<char*>(destination + group * 8), odd ? received : left, odd ? right : received);
            }
        }
    }
}

__device__ __forceinline__ void consume(const Parameters& p, const Shared& shared, int consumer) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32 % 4;

    const auto take_turn = [&] {
        if (PING_PONG) ptx::barrier_sync(TURN_BARRIER + consumer, 2 * WARPGROUP);
    };
    const auto pass_turn = [&] {
        const int next = consumer + 1 == CONSUMERS ? 0 : consumer + 1;
        if (PING_PONG) ptx::barrier_arrive(TURN_BARRIER + next, 2 * WARPGROUP);
    };
    // Rows that were copied one by one are there for wgmma only after a fence. No emulation would miss it.
    const auto wait_for = [](uint32 full, uint32 parity) {
        ptx::mbarrier_wait(full, parity);
        if (GATHER) ptx::fence_async_shared();
    };
    Ring<SLOTS> slot;
    // Of the tile whose scores come next:
    int block;        // the block
    int first_block;  // the last that comes
    int hidden;       // blocks after it that no row of this warpgroup sees, and that are passed over
    int masked;       // blocks from here on need a mask, for some row of this warpgroup
    int clear;        // with a left window, so do blocks before this one
    // False where there is none.
    const auto enter_tile = [&] {
        ptx::mbarrier_wait(shared.tile_full(slot.stage), slot.parity);
        const Tile tile = read_tile(shared, slot.stage);
        if (tile.first_row < 0) return false;
        const int first_row = tile.first_row + consumer * ROWS;
        const int offset = tile.offset();
        block = tile.last_block;
        first_block = LEFT_WINDOW ? tile.first_block : 0;
        hidden = 0;
        masked = tile.keys / BLOCK_N;
        if (CAUSAL) {
            masked = min(masked, max(0, end_key(p, first_row >> p.heads_shift, tile.keys, offset)) / BLOCK_N);
            // Turns must be equal in number, so a warpgroup that takes them passes nothing over.
            const int last_key = end_key(p, (first_row + ROWS - 1) >> p.heads_shift, tile.keys, offset) - 1;
            // Their keys are passed over before their values, which would have to wait for each other if they were more than there
            // are stages; the others are masked.
            if (!PING_PONG) hidden = min(V_STAGES - 1, max(0, block - max(first_block, max(0, last_key) / BLOCK_N)));
            block -= hidden;
        }
#if TREE
        masked = min(masked, max(0, tile.tree()) / BLOCK_N);
#endif
        clear = LEFT_WINDOW ? (first_key(p, (first_row + ROWS - 1) >> p.heads_shift, offset) + BLOCK_N - 1) / BLOCK_N : 0;
        return true;
    };
    const auto needs_mask = [&] { return block >= masked || (LEFT_WINDOW && block < clear); };
    const auto apply_mask = [&](float (&s)[BLOCK_N / 2]) {
        // Read anew: kept from block to block, what the rows see would take the registers that an output of 256 columns needs.
        const Tile tile = read_tile(shared, slot.stage);
        const int first = block * BLOCK_N + 2 * (lane % 4);
        const int row = tile.first_row + consumer * ROWS + warp * 16 + lane / 4;
        const int low = row >> p.heads_shift;
        const int high = (row + 8) >> p.heads_shift;
        mask(s, end_key(p, low, tile.keys, tile.offset()) - first, end_key(p, high, tile.keys, tile.offset()) - first);
        if (LEFT_WINDOW) mask_before(s, first_key(p, low, tile.offset()) - first, first_key(p, high, tile.offset()) - first);
#if TREE
        if ((block + 1) * BLOCK_N > tile.tree()) {
            const uint64* const words = p.tree_mask + tile.query_start;
            mask_tree(s, words[min(low, tile.tokens - 1)], words[min(high, tile.tokens - 1)], first - tile.tree());
        }
#endif
    };
    const auto cap = [&](float (&s)[BLOCK_N / 2]) {
        if (SOFTCAP) cap_scores(s, p);
    };
    const float scale_log2 = SOFTCAP ? 1.f : p.scale_log2;

    Ring<K_STAGES> key;
    Ring<V_STAGES> value;
    Ring<Q_STAGES> query;
    const auto query_tile = [&] { return panel::k_major(shared.query(query.stage, consumer)); };
    const auto key_tile = [&] { return panel::k_major(shared.key(key.stage)); };
    const auto value_tile = [&] { return panel::mn_major<BLOCK_N>(shared.value(value.stage)); };

    const auto pass_over_keys = [&] {
        for (int i = 0; i < hidden; ++i) {
            ptx::mbarrier_wait(shared.key_full(key.stage), key.parity);
            release(shared.key_empty(key.stage));
            key.advance();
        }
    };
    const auto pass_over_values = [&] {
        for (int i = 0; i < hidden; ++i) {
            ptx::mbarrier_wait(shared.value_full(value.stage), value.parity);
            release(shared.value_empty(value.stage));
            value.advance();
        }
    };

    float s[BLOCK_N / 2];
    float o[VALUE_DIM / 2];
    uint32 probabilities[BLOCK_N / 4];
    float correction[2];
    Softmax softmax;

    if (!enter_tile()) return;
    bool accumulate = false;
    if (PING_PONG && consumer == CONSUMERS - 1) ptx::barrier_arrive(TURN_BARRIER, 2 * WARPGROUP);

    pass_over_keys();
    pass_over_values();
    ptx::mbarrier_wait(shared.query_full(query.stage, consumer), query.parity);
    wait_for(shared.key_full(key.stage), key.parity);
    multiply_keys(s, query_tile(), key_tile());
    ptx::wgmma_wait<0>();
    ptx::pin(s);
    release(shared.key_empty(key.stage));
    key.advance();
    cap(s);
    if (needs_mask()) apply_mask(s);
    softmax.step(s, scale_log2, correction);
    pack_probabilities(s, probabilities);

    // Invariant: `probabilities` are those of `block`; its values are still to be multiplied.
    int old_slot;
    while (true) {
        const bool ends = block == first_block;  // the tile
        old_slot = slot.stage;
        if (ends) {
            release(shared.query_empty(query.stage, consumer));
            query.advance();
            slot.advance();
            if (!enter_tile()) break;
            pass_over_keys();
            ptx::mbarrier_wait(shared.query_full(query.stage, consumer), query.parity);
        } else {
            --block;
        }

        wait_for(shared.key_full(key.stage), key.parity);
        take_turn();
        multiply_keys(s, query_tile(), key_tile());
        wait_for(shared.value_full(value.stage), value.parity);
        multiply_values(o, probabilities, value_tile(), accumulate);
        pass_turn();
        ptx::wgmma_wait<1>();
        ptx::pin(s);

        const Softmax finished = softmax;
        if (ends) softmax = Softmax();
        bool kept = false;  // the softmax's reference
        cap(s);
        const bool partial = needs_mask();
        if (likely(!ends && !partial)) kept = softmax.try_step(s, scale_log2);
        if (!likely(kept)) {
            if (partial) {
                apply_mask(s);
            } else if (!ends) {
                multiply_keys_again(s, shared.query(query.stage, consumer), shared.key(key.stage));
                cap(s);
            }
            softmax.step(s, scale_log2, correction);
        }
        release(shared.key_empty(key.stage));
        key.advance();

        ptx::wgmma_wait<0>();
        ptx::pin(o);
        release(shared.value_empty(value.stage));
        value.advance();
        if (!likely(!ends)) {
            store_rows(p, o, finished, read_tile(shared, old_slot), consumer);
            release(shared.tile_empty(old_slot));
            pass_over_values();
        } else if (!likely(kept)) {
            rescale(o, correction);
        }
        accumulate = !ends;
        pack_probabilities(s, probabilities);
    }

    wait_for(shared.value_full(value.stage), value.parity);
    multiply_values(o, probabilities, value_tile(), accumulate);
    ptx::wgmma_wait<0>();
    ptx::pin(o);
    store_rows(p, o, softmax, read_tile(shared, old_slot), consumer);
}

}  // namespace hopper

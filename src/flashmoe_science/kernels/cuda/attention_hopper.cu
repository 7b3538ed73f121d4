// Attention forward for Hopper (sm_90a): TMA, wgmma and specialised warpgroups.
//
// One warpgroup produces: a warp each loads keys, values and queries, by TMA into rings of shared memory. Two or
// three warpgroups consume, 64 query rows each: S = Q K^T, online softmax, O += P V, with P in registers. Two overlaps
// hide the softmax (FlashAttention-3, Shah et al. 2024): within a warpgroup, block j's softmax runs while block j-1's
// P V does; between warpgroups, they take turns on the tensor cores (PING_PONG). The loop over blocks runs on from one
// tile into the next, so that a tile's first scores are computed during the last product of the one before.
//
// Compile-time configuration: HEAD_DIM, ELEMENT_BF16, CAUSAL, CONSUMERS, BLOCK_N, K_STAGES, V_STAGES, Q_STAGES, PING_PONG;
// ABLATE to leave something out (ablation.cuh).

#include "ablation.cuh"
#include "hopper/parameters.cuh"
#include "hopper/producer.cuh"
#include "hopper/products.cuh"
#include "hopper/shared.cuh"
#include "hopper/softmax.cuh"
#include "mma/descriptor.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"

namespace hopper {

constexpr float LN_2 = 0.693147180559945f;

// Named barriers, one per consumer: its turn on the tensor cores.
constexpr int TURN_BARRIER = 1;

// Normalises and writes this lane's two rows of the output, and their log-sum-exp.
//
// A quad holds eight neighbouring columns of a row, two per lane. Neighbouring lanes exchange halves of two such groups,
// so that each writes four columns and the quad a whole 32-byte sector.
__device__ __forceinline__ void store_rows(const Parameters& p, float (&o)[HEAD_DIM / 2], const Softmax& softmax,
                                           const Tile& tile, int consumer) {
    const int lane = threadIdx.x % 32;
    const bool odd = lane & 1;
    const int first_row = tile.m_block * BLOCK_M + consumer * ROWS + threadIdx.x / 32 % 4 * 16 + lane / 4;
    const int first_column = (odd ? 8 : 0) + (lane & 2) * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = first_row + 8 * half;
        const float sum = quad_sum(softmax.sum[half]);
        const bool empty = CAUSAL && row + p.seqlen_k < p.seqlen_q;  // the row sees no key
        if (__any_sync(0xffffffff, empty)) {
            // Not by a factor of zero: a value that nobody sees may be NaN.
#pragma unroll
            for (int i = 2 * half; i < HEAD_DIM / 2; i += 4) {
                if (empty) o[i] = o[i + 1] = 0.f;
            }
        }
        const float factor = empty ? 1.f : reciprocal(sum);
        const bool inside = row < p.seqlen_q;
        if (p.lse != nullptr && lane % 4 == 0 && inside) {
            const int64 head_row = static_cast<int64>(tile.batch) * p.num_heads + tile.head;
            p.lse[head_row * p.seqlen_q + row] = empty ? NEGATIVE_INFINITY : softmax.reference[half] * LN_2 + logf(sum);
        }
        uint16* destination = p.output + tile.batch * p.output_stride[0] + tile.head * p.output_stride[1] +
                              row * p.output_stride[2] + first_column;
#pragma unroll
        for (int group = 0; group < HEAD_DIM / 8; group += 2) {
            const float* pair = o + 4 * group + 2 * half;
            const uint32 left = pack(pair[0] * factor, pair[1] * factor);
            const uint32 right = pack(pair[4] * factor, pair[5] * factor);
            const uint32 received = __shfl_xor_sync(0xffffffff, odd ? left : right, 1);
            if (inside && group * 8 + first_column < p.head_dim) {
                asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(destination + group * 8),
                             "r"(odd ? received : left), "r"(odd ? right : received)
                             : "memory");
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
    // Of the tile whose scores come next:
    int block;      // the block
    int hidden;     // blocks after it that no row of this warpgroup sees, and that are passed over
    int masked;     // blocks from here on need a mask, for some row of this warpgroup
    int own_limit;  // causal: the first key that this lane's first row may not see
    Ring<TILE_SLOTS> slot;
    // False where there is none.
    const auto enter_tile = [&] {
        ptx::mbarrier_wait(shared.tile_full(slot.stage), slot.parity);
        const Tile tile = read_tile(shared, slot.stage);
        if (tile.m_block < 0) return false;
        const int first_row = tile.m_block * BLOCK_M + consumer * ROWS;
        block = tile.n_blocks - 1;
        hidden = 0;
        masked = p.seqlen_k / BLOCK_N;
        if (CAUSAL) {
            const int shift = p.seqlen_k - p.seqlen_q + 1;
            masked = min(masked, (first_row + shift) / BLOCK_N);
            // Turns must be equal in number, so a warpgroup that takes them passes nothing over.
            const int last_key = max(0, first_row + ROWS - 2 + shift);
            if (!PING_PONG) hidden = max(0, block - last_key / BLOCK_N);
            block -= hidden;
            own_limit = first_row + warp * 16 + lane / 4 + shift;
        }
        if (NO_MASK) masked = tile.n_blocks;
        return true;
    };
    const auto apply_mask = [&](float (&s)[BLOCK_N / 2]) {
        const int low = CAUSAL ? min(p.seqlen_k, own_limit) : p.seqlen_k;
        const int high = CAUSAL ? min(p.seqlen_k, own_limit + 8) : p.seqlen_k;
        const int first = block * BLOCK_N + 2 * (lane % 4);
        mask(s, low - first, high - first);
    };

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
    float o[HEAD_DIM / 2];
    uint32 probabilities[BLOCK_N / 4];
    float correction[2];
    Softmax softmax;

    if (!enter_tile()) return;
    bool accumulate = false;
    if (PING_PONG && consumer == CONSUMERS - 1) ptx::barrier_arrive(TURN_BARRIER, 2 * WARPGROUP);

    pass_over_keys();
    pass_over_values();
    ptx::mbarrier_wait(shared.query_full(query.stage, consumer), query.parity);
    ptx::mbarrier_wait(shared.key_full(key.stage), key.parity);
    multiply_keys(s, query_tile(), key_tile());
    ptx::wgmma_wait<0>();
    ptx::pin(s);
    release(shared.key_empty(key.stage));
    key.advance();
    if (block >= masked) apply_mask(s);
    softmax.step(s, p.scale_log2, correction);
    pack_probabilities(s, probabilities);

    // Invariant: `probabilities` are those of `block`; its values are still to be multiplied.
    int old_slot;
    while (true) {
        const bool ends = block == 0;  // the tile
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

        ptx::mbarrier_wait(shared.key_full(key.stage), key.parity);
        take_turn();
        multiply_keys(s, query_tile(), key_tile());
        ptx::mbarrier_wait(shared.value_full(value.stage), value.parity);
        multiply_values(o, probabilities, value_tile(), accumulate);
        pass_turn();
        ptx::wgmma_wait<1>();
        ptx::pin(s);

        const Softmax finished = softmax;
        if (ends) softmax = Softmax();
        bool kept = false;  // the softmax's reference
        if (likely(!ends && block < masked)) kept = softmax.try_step(s, p.scale_log2);
        if (!likely(kept)) {
            if (block >= masked) {
                apply_mask(s);
            } else if (!ends) {
                multiply_keys_again(s, shared.query(query.stage, consumer), shared.key(key.stage));
            }
            softmax.step(s, p.scale_log2, correction);
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

    ptx::mbarrier_wait(shared.value_full(value.stage), value.parity);
    multiply_values(o, probabilities, value_tile(), accumulate);
    ptx::wgmma_wait<0>();
    ptx::pin(o);
    store_rows(p, o, softmax, read_tile(shared, old_slot), consumer);
}

}  // namespace hopper

extern "C" __global__ void __launch_bounds__(hopper::THREADS, hopper::BLOCKS_PER_MULTIPROCESSOR)
    attention_hopper(const __grid_constant__ hopper::Parameters parameters) {
    using namespace hopper;
    extern __shared__ unsigned char raw[];
    // Dynamic shared memory is only guaranteed to start on 16 bytes; the launch asks for 1024 more.
    const Shared shared{(shared_address(raw) + 1023) & ~1023u};

    const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x / 32), 0);
    const int warpgroup = warp / 4;
    if (warp == 0 && ptx::elect_lane()) {
        ptx::prefetch_map(parameters.query);
        ptx::prefetch_map(parameters.key);
        ptx::prefetch_map(parameters.value);
        initialise(shared);
    }
    __syncthreads();

    if (warpgroup == 0) {
        ptx::give_up_registers<PRODUCER_REGISTERS>();
        if (warp == 0) {
            if (ptx::elect_lane()) produce_keys(parameters, shared);
        } else if (warp == 1) {
            produce_values(parameters, shared);
        } else if (warp == 2) {
            produce_queries(parameters, shared);
        }
    } else {
        ptx::claim_registers<CONSUMER_REGISTERS>();
        consume(parameters, shared, warpgroup - 1);
    }
}

// Attention backward for Hopper (sm_90a) at large head dims, the gradient of the query: TMA, wgmma, specialised warpgroups.
//
// A block owns 128 query rows, 64 for each of two consumer warpgroups, and walks over the keys that they see, 64 at a step.
// The gradient stays in registers:
//   P = exp2(scale Q K^T - LSE);  dP = dO V^T;  dS = P (dP - delta);  dQ += dS K
// dS is an operand straight from registers, so the consumers never meet. The next step's products are issued right behind this
// step's, and its exponentials are taken under the second.
//
// Compile-time configuration: HEAD_DIM (192 or 256), CAUSAL, ELEMENT_BF16; ABLATE to leave something out (ablation.cuh).

#include "ablation.cuh"
#include "hopper_two_pass/parameters.cuh"
#include "hopper_two_pass/products.cuh"
#include "kept_stage.cuh"
#include "ptx/dependent_launch.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"

namespace two_pass {

constexpr int KEY_STAGES = 2;
constexpr int VALUE_STAGES = HEAD_DIM <= 192 ? 2 : 1;  // as many as there is room for

struct Shared {
    uint32 base;  // a multiple of 1024, so that the swizzle depends on the row alone

    static constexpr uint32 GRADIENTS = CONSUMERS * TILE_BYTES;
    static constexpr uint32 KEYS = GRADIENTS + CONSUMERS * TILE_BYTES;
    static constexpr uint32 VALUES = KEYS + KEY_STAGES * TILE_BYTES;
    static constexpr uint32 BARRIERS = VALUES + VALUE_STAGES * TILE_BYTES;
    static constexpr uint32 KEY_BARRIERS = BARRIERS + CONSUMERS * 16;
    static constexpr uint32 VALUE_BARRIERS = KEY_BARRIERS + KEY_STAGES * 16;
    static constexpr uint32 BYTES = VALUE_BARRIERS + VALUE_STAGES * 16;

    __device__ uint32 query(int consumer) const { return base + consumer * TILE_BYTES; }
    __device__ uint32 gradient(int consumer) const { return base + GRADIENTS + consumer * TILE_BYTES; }
    __device__ uint32 key(int stage) const { return base + KEYS + stage * TILE_BYTES; }
    __device__ uint32 value(int stage) const { return base + VALUES + stage * TILE_BYTES; }

    // Barriers: `full` once the data is there, `empty` once it has been used.
    __device__ uint32 query_full(int consumer) const { return base + BARRIERS + consumer * 16; }
    __device__ uint32 gradient_full(int consumer) const { return query_full(consumer) + 8; }
    __device__ uint32 key_full(int stage) const { return base + KEY_BARRIERS + stage * 16; }
    __device__ uint32 key_empty(int stage) const { return key_full(stage) + 8; }
    __device__ uint32 value_full(int stage) const { return base + VALUE_BARRIERS + stage * 16; }
    __device__ uint32 value_empty(int stage) const { return value_full(stage) + 8; }
};
static_assert(Shared::BYTES + 1024 <= 232448, "more shared memory than a block may have");

__device__ __forceinline__ void initialise(const Shared& shared) {
    for (int consumer = 0; consumer < CONSUMERS; ++consumer) {
        ptx::mbarrier_init(shared.query_full(consumer), 1);
        ptx::mbarrier_init(shared.gradient_full(consumer), 1);
    }
    for (int stage = 0; stage < KEY_STAGES; ++stage) {
        ptx::mbarrier_init(shared.key_full(stage), 1);
        ptx::mbarrier_init(shared.key_empty(stage), CONSUMERS * WARPGROUP_ARRIVALS);
    }
    for (int stage = 0; stage < VALUE_STAGES; ++stage) {
        ptx::mbarrier_init(shared.value_full(stage), 1);
        ptx::mbarrier_init(shared.value_empty(stage), CONSUMERS * WARPGROUP_ARRIVALS);
    }
    ptx::mbarrier_init_fence();
}

// The query rows of a block, and the keys that they see.
struct Tile {
    int row;  // the first
    int head;
    int kv_head;
    int batch;
    int steps;  // blocks of keys

    __device__ __forceinline__ Tile(const Parameters& p, int index) {
        constexpr int BLOCK_M = CONSUMERS * ROWS;
        const int m_blocks = (p.seqlen_q + BLOCK_M - 1) / BLOCK_M;
        const Job job = job_of(index, m_blocks, p.batch * p.num_heads, p.section, BLOCK_M);
        row = (CAUSAL ? m_blocks - 1 - job.block : job.block) * BLOCK_M;  // the longest first
        batch = job.head / p.num_heads;
        head = job.head - batch * p.num_heads;
        kv_head = head / (p.num_heads / p.num_kv_heads);
        const int keys = CAUSAL ? min(p.seqlen_k, row + BLOCK_M + p.seqlen_k - p.seqlen_q) : p.seqlen_k;
        steps = max(0, keys + ROWS - 1) / ROWS;
    }
};

// One lane: loads queries and output gradients, then keys and values.
__device__ __forceinline__ void produce(const Parameters& p, const Shared& shared, const Tile& tile) {
    const auto load_key = [&](int step, int stage) {
        if (keeps_stage(shared.key_full(stage), step, KEY_STAGES)) return;
        ptx::mbarrier_expect_bytes(shared.key_full(stage), TILE_BYTES);
        load_tile(p.key, shared.key(stage), shared.key_full(stage), ptx::EVICT_LAST, step * ROWS, tile.kv_head, tile.batch);
    };
    const auto load_value = [&](int step, int stage) {
        if (keeps_stage(shared.value_full(stage), step, VALUE_STAGES)) return;
        ptx::mbarrier_expect_bytes(shared.value_full(stage), TILE_BYTES);
        load_tile(p.value, shared.value(stage), shared.value_full(stage), ptx::EVICT_LAST, step * ROWS, tile.kv_head,
                  tile.batch);
    };
    const auto load_own = [&](const ptx::TensorMap& map, uint32 destination, uint32 full, int consumer) {
        ptx::mbarrier_expect_bytes(full, TILE_BYTES);
        load_tile(map, destination, full, ptx::EVICT_FIRST, tile.row + consumer * ROWS, tile.head, tile.batch);
    };
    Ring<KEY_STAGES> keys;
    Ring<VALUE_STAGES> values;
    for (int step = 0; step < tile.steps; ++step) {
        if (step == 0) load_own(p.query, shared.query(0), shared.query_full(0), 0);
        ptx::mbarrier_wait(shared.key_empty(keys.stage), keys.parity ^ 1);
        load_key(step, keys.stage);
        if (step == 0) {
            load_own(p.query, shared.query(1), shared.query_full(1), 1);
            load_own(p.grad_output, shared.gradient(0), shared.gradient_full(0), 0);
        }
        ptx::mbarrier_wait(shared.value_empty(values.stage), values.parity ^ 1);
        load_value(step, values.stage);
        if (step == 0) load_own(p.grad_output, shared.gradient(1), shared.gradient_full(1), 1);
        keys.advance();
        values.advance();
    }
}

// Sets scores to -inf from the column on at which this lane's two rows cease to see keys.
__device__ __forceinline__ void mask(float (&s)[ROWS / 2], int low, int high) {
#pragma unroll
    for (int i = 0; i < ROWS / 2; i += 4) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            if (2 * i + j >= low) s[i + j] = NEGATIVE_INFINITY;
            if (2 * i + j >= high) s[i + 2 + j] = NEGATIVE_INFINITY;
        }
    }
}

__device__ __forceinline__ void consume(const Parameters& p, const Shared& shared, const Tile& tile, int consumer) {
    const int thread = threadIdx.x % WARPGROUP;
    const int lane = thread % 32;
    const int column = 2 * (lane % 4);
    const int row = tile.row + consumer * ROWS + thread / 32 * 16 + lane / 4;

    float s[ROWS / 2];
    float dp[ROWS / 2];
    float dq[HEAD_DIM / 2] = {};
    uint32 gradients[ROWS / 4];

    if (tile.steps > 0) {
        const int64 statistic = static_cast<int64>(tile.batch * p.num_heads + tile.head) * p.statistic_rows + row;
        const float lse[2] = {p.lse[statistic], p.lse[statistic + 8]};
        const float delta[2] = {p.delta[statistic], p.delta[statistic + 8]};
        Ring<KEY_STAGES> keys;
        Ring<VALUE_STAGES> values;
        int first_key = 0;

        const auto probe = [&] {
            const int seen = CAUSAL ? row + 1 + p.seqlen_k - p.seqlen_q : p.seqlen_k;
            const int block_row = tile.row + consumer * ROWS;
            const bool hidden = CAUSAL && first_key + ROWS > block_row + 1 + p.seqlen_k - p.seqlen_q;
            if (!NO_MASK && (hidden || first_key + ROWS > p.seqlen_k)) {
                const int rest = min(p.seqlen_k, seen) - first_key - column;
                mask(s, rest, CAUSAL ? min(p.seqlen_k, seen + 8) - first_key - column : rest);
            }
#pragma unroll
            for (int i = 0; i < ROWS / 2; ++i) s[i] = exponential(fmaf(s[i], p.scale_log2, -lse[i / 2 % 2]));
        };

        ptx::mbarrier_wait(shared.query_full(consumer), 0);
        ptx::mbarrier_wait(shared.key_full(0), 0);
        multiply_rows(s, shared.query(consumer), shared.key(0));
        ptx::mbarrier_wait(shared.gradient_full(consumer), 0);
        ptx::mbarrier_wait(shared.value_full(0), 0);
        multiply_rows(dp, shared.gradient(consumer), shared.value(0));
        ptx::wgmma_wait<1>();
        ptx::pin(s);
        probe();

        // A step begins with its probabilities, and ends with those of the next.
        const auto step = [&](auto last) {
            constexpr bool LAST = decltype(last)::value;
            ptx::wgmma_wait<0>();
            ptx::pin(dp);
            release(shared.value_empty(values.stage));
#pragma unroll
            for (int i = 0; i < ROWS / 2; ++i) dp[i] = s[i] * (dp[i] - delta[i / 2 % 2]);
            pack_fragment(dp, gradients);
            const Ring<KEY_STAGES> now = keys;
            keys.advance();
            values.advance();
            first_key += ROWS;
            accumulate(dq, gradients, shared.key(now.stage));
            if constexpr (!LAST) {
                ptx::mbarrier_wait(shared.key_full(keys.stage), keys.parity);
                multiply_rows(s, shared.query(consumer), shared.key(keys.stage));
                ptx::mbarrier_wait(shared.value_full(values.stage), values.parity);
                multiply_rows(dp, shared.gradient(consumer), shared.value(values.stage));
                ptx::wgmma_wait<2>();
                ptx::pin(dq);
                release(shared.key_empty(now.stage));
                ptx::wgmma_wait<1>();
                ptx::pin(s);
                probe();
            } else {
                ptx::wgmma_wait<0>();
                ptx::pin(dq);
            }
        };
        for (int left = tile.steps; left > 1; --left) step(Flag<false>());
        step(Flag<true>());
    }
    // Held in registers throughout, these would not leave enough.
    const Tile again(p, static_cast<int>(opaque(blockIdx.x)));
    const int index = static_cast<int>(opaque(threadIdx.x)) - WARPGROUP;
    const int first_row = again.row + index / 32 * 16 + index % 32 / 4;
    uint16* start = p.grad_query + again.batch * p.grad_query_stride[0] + again.head * p.grad_query_stride[1];
    store_rows(dq, p.scale, start, p.grad_query_stride[2], first_row, p.seqlen_q, p.head_dim);
}

}  // namespace two_pass

extern "C" __global__ void __launch_bounds__(two_pass::THREADS, 1)
    attention_backward_two_pass_query(const __grid_constant__ two_pass::Parameters parameters) {
    using namespace two_pass;
    extern __shared__ unsigned char raw[];
    const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x / 32), 0);
    const Shared shared = begin<Shared>(parameters, shared_address(raw), warp);
    const Tile tile(parameters, static_cast<int>(blockIdx.x));

    if (warp < 4) {
        ptx::give_up_registers<PRODUCER_REGISTERS>();
        if (warp == 0 && ptx::elect_lane()) {
            produce(parameters, shared, tile);
            // Whatever comes after this pass must come after the one before it too.
            wait_for_predecessor();
        }
    } else {
        ptx::claim_registers<CONSUMER_REGISTERS>();
        consume(parameters, shared, tile, warp / 4 - 1);
    }
}

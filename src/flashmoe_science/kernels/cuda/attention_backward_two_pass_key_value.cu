// Attention backward for Hopper (sm_90a) at large head dims, the gradients of keys and values: TMA, wgmma, specialised warpgroups.
//
// A block owns 64 keys and walks over the query rows that see them, of every head that shares the keys. At a head dim of 256 one
// warpgroup's registers hold one gradient of 64 keys, so the two consumers share the work by product:
//   the first:   P = exp2(scale K Q^T - LSE), dV += P dO;
//   the second:  dP = V dO^T, dS = P (dP - delta), dK += dS Q.
// P goes from the first to the second in float32 through shared memory, in fragment order. docs/kernels/backward-two-pass.md
//
// Compile-time configuration: HEAD_DIM (192 or 256), CAUSAL, ELEMENT_BF16; ABLATE to leave something out (ablation.cuh).

#include "ablation.cuh"
#include "hopper_two_pass/parameters.cuh"
#include "hopper_two_pass/products.cuh"
#include "kept_stage.cuh"
#include "ptx/bulk.cuh"
#include "ptx/dependent_launch.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_floats.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"

namespace two_pass {

constexpr int STAGES = 2;
constexpr int NEVER = 1 << 30;
constexpr uint32 STATISTIC_BYTES = ROWS * 4;
constexpr uint32 EXCHANGE_BYTES = ROWS * ROWS * 4;

struct Shared {
    uint32 base;  // a multiple of 1024, so that the swizzle depends on the row alone

    static constexpr uint32 VALUE = TILE_BYTES;
    static constexpr uint32 QUERIES = VALUE + TILE_BYTES;
    static constexpr uint32 GRADIENTS = QUERIES + STAGES * TILE_BYTES;
    static constexpr uint32 EXCHANGES = GRADIENTS + STAGES * TILE_BYTES;
    static constexpr uint32 LSE = EXCHANGES + STAGES * EXCHANGE_BYTES;
    static constexpr uint32 DELTA = LSE + STAGES * STATISTIC_BYTES;
    static constexpr uint32 BARRIERS = DELTA + STAGES * STATISTIC_BYTES;
    static constexpr uint32 QUERY_BARRIERS = BARRIERS + 16;
    static constexpr uint32 GRADIENT_BARRIERS = QUERY_BARRIERS + STAGES * 16;
    static constexpr uint32 EXCHANGE_BARRIERS = GRADIENT_BARRIERS + STAGES * 16;
    static constexpr uint32 BYTES = EXCHANGE_BARRIERS + STAGES * 16;

    __device__ uint32 key() const { return base; }
    __device__ uint32 value() const { return base + VALUE; }
    __device__ uint32 query(int stage) const { return base + QUERIES + stage * TILE_BYTES; }
    __device__ uint32 gradient(int stage) const { return base + GRADIENTS + stage * TILE_BYTES; }
    __device__ uint32 exchange(int stage) const { return base + EXCHANGES + stage * EXCHANGE_BYTES; }
    __device__ uint32 lse(int stage) const { return base + LSE + stage * STATISTIC_BYTES; }
    __device__ uint32 delta(int stage) const { return base + DELTA + stage * STATISTIC_BYTES; }

    // Barriers: `full` once the data is there, `empty` once it has been used.
    __device__ uint32 key_full() const { return base + BARRIERS; }
    __device__ uint32 value_full() const { return base + BARRIERS + 8; }
    __device__ uint32 query_full(int stage) const { return base + QUERY_BARRIERS + stage * 16; }
    __device__ uint32 query_empty(int stage) const { return query_full(stage) + 8; }
    __device__ uint32 gradient_full(int stage) const { return base + GRADIENT_BARRIERS + stage * 16; }
    __device__ uint32 gradient_empty(int stage) const { return gradient_full(stage) + 8; }
    __device__ uint32 exchange_full(int stage) const { return base + EXCHANGE_BARRIERS + stage * 16; }
    __device__ uint32 exchange_empty(int stage) const { return exchange_full(stage) + 8; }
};
static_assert(Shared::BYTES + 1024 <= 232448, "more shared memory than a block may have");

__device__ __forceinline__ void initialise(const Shared& shared) {
    ptx::mbarrier_init(shared.key_full(), 1);
    ptx::mbarrier_init(shared.value_full(), 1);
    for (int stage = 0; stage < STAGES; ++stage) {
        ptx::mbarrier_init(shared.query_full(stage), 1);
        ptx::mbarrier_init(shared.query_empty(stage), CONSUMERS * WARPGROUP_ARRIVALS);
        ptx::mbarrier_init(shared.gradient_full(stage), 1);
        ptx::mbarrier_init(shared.gradient_empty(stage), CONSUMERS * WARPGROUP_ARRIVALS);
        ptx::mbarrier_init(shared.exchange_full(stage), WARPGROUP_ARRIVALS);
        ptx::mbarrier_init(shared.exchange_empty(stage), WARPGROUP_ARRIVALS);
    }
    ptx::mbarrier_init_fence();
}

// The keys of a block, and the query rows that see them.
struct Tile {
    int n_block;
    int head;   // of the keys
    int batch;
    int first;  // query block
    int last;
    int steps;  // of all query heads that share the keys

    __device__ __forceinline__ explicit Tile(const Parameters& p) {
        const Job job = job_of(static_cast<int>(blockIdx.x), (p.seqlen_k + ROWS - 1) / ROWS, p.batch * p.num_kv_heads,
                               p.section, ROWS);
        n_block = job.block;
        batch = job.head / p.num_kv_heads;
        head = job.head - batch * p.num_kv_heads;
        first = CAUSAL ? max(0, n_block * ROWS - (p.seqlen_k - p.seqlen_q)) / ROWS : 0;
        last = (p.seqlen_q - 1) / ROWS;
        steps = p.num_heads / p.num_kv_heads * (last - first + 1);
    }
};

// One lane: loads keys and values, then queries, output gradients and their rows' statistics.
__device__ __forceinline__ void produce(const Parameters& p, const Shared& shared, const Tile& tile) {
    Ring<STAGES> ring;
    int head = tile.head * (p.num_heads / p.num_kv_heads);
    int m_block = tile.last;
    for (int step = 0; step < tile.steps; ++step) {
        const int row = m_block * ROWS;
        const int64 statistic = static_cast<int64>(tile.batch * p.num_heads + head) * p.statistic_rows + row;
        if (step == 0) {
            ptx::mbarrier_expect_bytes(shared.key_full(), TILE_BYTES);
            load_tile(p.key, shared.key(), shared.key_full(), ptx::EVICT_FIRST, tile.n_block * ROWS, tile.head, tile.batch);
        }
        ptx::mbarrier_wait(shared.query_empty(ring.stage), ring.parity ^ 1);
        if (!keeps_stage(shared.query_full(ring.stage), step, STAGES)) {
            ptx::mbarrier_expect_bytes(shared.query_full(ring.stage), TILE_BYTES + STATISTIC_BYTES);
            load_tile(p.query, shared.query(ring.stage), shared.query_full(ring.stage), ptx::EVICT_LAST, row, head, tile.batch);
            if (step == 0) {
                // The pass over the queries may start once the statistics are there, which both passes read.
                wait_for_predecessor();
                allow_successor();
            }
            ptx::bulk_load(shared.lse(ring.stage), p.lse + statistic, STATISTIC_BYTES, shared.query_full(ring.stage));
        }
        if (step == 0) {
            ptx::mbarrier_expect_bytes(shared.value_full(), TILE_BYTES);
            load_tile(p.value, shared.value(), shared.value_full(), ptx::EVICT_FIRST, tile.n_block * ROWS, tile.head,
                      tile.batch);
        }
        ptx::mbarrier_wait(shared.gradient_empty(ring.stage), ring.parity ^ 1);
        if (!keeps_stage(shared.gradient_full(ring.stage), step, STAGES)) {
            ptx::mbarrier_expect_bytes(shared.gradient_full(ring.stage), TILE_BYTES + STATISTIC_BYTES);
            load_tile(p.grad_output, shared.gradient(ring.stage), shared.gradient_full(ring.stage), ptx::EVICT_LAST, row, head,
                      tile.batch);
            ptx::bulk_load(shared.delta(ring.stage), p.delta + statistic, STATISTIC_BYTES, shared.gradient_full(ring.stage));
        }
        ring.advance();
        if (--m_block < tile.first) {
            m_block = tile.last;
            ++head;
        }
    }
}

// The scores become probabilities. `lse`: of this lane's first column.
__device__ __forceinline__ void exponentiate(float (&s)[ROWS / 2], float scale_log2, uint32 lse) {
#pragma unroll
    for (int i = 0; i < ROWS / 2; i += 4) {
        const float2 reference = load_shared_pair(lse + 8 * i);
        s[i] = exponential(fmaf(s[i], scale_log2, -reference.x));
        s[i + 1] = exponential(fmaf(s[i + 1], scale_log2, -reference.y));
        s[i + 2] = exponential(fmaf(s[i + 2], scale_log2, -reference.x));
        s[i + 3] = exponential(fmaf(s[i + 3], scale_log2, -reference.y));
    }
}

// Sets scores to -inf whose query row lies before the first that sees the key. `low`, `high`: how many rows, from this
// lane's first column on, do not see its two keys.
__device__ __forceinline__ void mask(float (&s)[ROWS / 2], int low, int high) {
#pragma unroll
    for (int i = 0; i < ROWS / 2; i += 4) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            if (2 * i + j < low) s[i + j] = NEGATIVE_INFINITY;
            if (2 * i + j < high) s[i + 2 + j] = NEGATIVE_INFINITY;
        }
    }
}

__device__ __forceinline__ void store_probabilities(const float (&s)[ROWS / 2], uint32 address) {
#pragma unroll
    for (int i = 0; i < ROWS / 8; ++i) {
        store_shared_quad(address + i * WARPGROUP * 16, {s[4 * i], s[4 * i + 1], s[4 * i + 2], s[4 * i + 3]});
    }
}

// The gradients of probabilities become those of scores. `probabilities`: this lane's; `delta`: of its first column.
__device__ __forceinline__ void differentiate(float (&dp)[ROWS / 2], uint32 probabilities, uint32 delta) {
#pragma unroll
    for (int i = 0; i < ROWS / 2; i += 4) {
        float p[4];
        load_shared_quad(p, probabilities + i * WARPGROUP * 4);
        const float2 mean = load_shared_pair(delta + 8 * i);
        dp[i] = p[0] * (dp[i] - mean.x);
        dp[i + 1] = p[1] * (dp[i + 1] - mean.y);
        dp[i + 2] = p[2] * (dp[i + 2] - mean.x);
        dp[i + 3] = p[3] * (dp[i + 3] - mean.y);
    }
}

__device__ __forceinline__ void consume_values(const Parameters& p, const Shared& shared, const Tile& tile) {
    const int thread = threadIdx.x % WARPGROUP;
    const int lane = thread % 32;
    const int own_key = thread / 32 * 16 + lane / 4;
    const int column = 2 * (lane % 4);
    const int first_key = tile.n_block * ROWS;
    const int shift = p.seqlen_k - p.seqlen_q;

    float s[ROWS / 2];
    float dv[HEAD_DIM / 2] = {};
    uint32 probabilities[ROWS / 4];
    Ring<STAGES> ring;
    int m_block = tile.last;

    ptx::mbarrier_wait(shared.key_full(), 0);
    ptx::mbarrier_wait(shared.query_full(0), 0);
    multiply_rows(s, shared.key(), shared.query(0));
    ptx::wgmma_wait<0>();
    ptx::pin(s);

    // A step begins with its scores, and ends with those of the next.
    const auto step = [&](auto last) {
        constexpr bool LAST = decltype(last)::value;
        const int row = m_block * ROWS;
        if (!NO_MASK && ((CAUSAL && row < first_key + ROWS - 1 - shift) || first_key + ROWS > p.seqlen_k)) {
            const int key = first_key + own_key;
            const int first = (CAUSAL ? key - shift - row : -NEVER) - column;
            mask(s, key < p.seqlen_k ? first : NEVER, key + 8 < p.seqlen_k ? first + 8 : NEVER);
        }
        exponentiate(s, p.scale_log2, shared.lse(ring.stage) + column * 4);
        release(shared.query_empty(ring.stage));
        ptx::mbarrier_wait(shared.exchange_empty(ring.stage), ring.parity ^ 1);
        store_probabilities(s, shared.exchange(ring.stage) + thread * 16);
        release(shared.exchange_full(ring.stage));
        pack_fragment(s, probabilities);
        const Ring<STAGES> now = ring;
        ring.advance();
        if (--m_block < tile.first) m_block = tile.last;
        ptx::mbarrier_wait(shared.gradient_full(now.stage), now.parity);
        accumulate(dv, probabilities, shared.gradient(now.stage));
        if constexpr (!LAST) {
            ptx::mbarrier_wait(shared.query_full(ring.stage), ring.parity);
            multiply_rows(s, shared.key(), shared.query(ring.stage));
            ptx::wgmma_wait<1>();
            ptx::pin(dv);
            release(shared.gradient_empty(now.stage));
            ptx::wgmma_wait<0>();
            ptx::pin(s);
        }
    };
    for (int left = tile.steps; left > 1; --left) step(Flag<false>());
    step(Flag<true>());
    ptx::wgmma_wait<0>();
    ptx::pin(dv);

    uint16* start = p.grad_value + tile.batch * p.grad_value_stride[0] + tile.head * p.grad_value_stride[1];
    store_rows(dv, 1.f, start, p.grad_value_stride[2], first_key + own_key, p.seqlen_k, p.head_dim);
}

__device__ __forceinline__ void consume_keys(const Parameters& p, const Shared& shared, const Tile& tile) {
    const int thread = threadIdx.x % WARPGROUP;
    const int lane = thread % 32;
    const int column = 2 * (lane % 4);

    float dp[ROWS / 2];
    float dk[HEAD_DIM / 2] = {};
    uint32 gradients[ROWS / 4];
    Ring<STAGES> ring;

    ptx::mbarrier_wait(shared.value_full(), 0);
    ptx::mbarrier_wait(shared.gradient_full(0), 0);
    multiply_rows(dp, shared.value(), shared.gradient(0));
    ptx::wgmma_wait<0>();
    ptx::pin(dp);

    // A step begins with the gradients of its probabilities, and ends with those of the next.
    const auto step = [&](auto last) {
        constexpr bool LAST = decltype(last)::value;
        ptx::mbarrier_wait(shared.exchange_full(ring.stage), ring.parity);
        differentiate(dp, shared.exchange(ring.stage) + thread * 16, shared.delta(ring.stage) + column * 4);
        release(shared.exchange_empty(ring.stage));
        release(shared.gradient_empty(ring.stage));
        pack_fragment(dp, gradients);
        const Ring<STAGES> now = ring;
        ring.advance();
        ptx::mbarrier_wait(shared.query_full(now.stage), now.parity);
        accumulate(dk, gradients, shared.query(now.stage));
        if constexpr (!LAST) {
            ptx::mbarrier_wait(shared.gradient_full(ring.stage), ring.parity);
            multiply_rows(dp, shared.value(), shared.gradient(ring.stage));
            ptx::wgmma_wait<1>();
            ptx::pin(dk);
            release(shared.query_empty(now.stage));
            ptx::wgmma_wait<0>();
            ptx::pin(dp);
        }
    };
    for (int left = tile.steps; left > 1; --left) step(Flag<false>());
    step(Flag<true>());
    ptx::wgmma_wait<0>();
    ptx::pin(dk);

    uint16* start = p.grad_key + tile.batch * p.grad_key_stride[0] + tile.head * p.grad_key_stride[1];
    store_rows(dk, p.scale, start, p.grad_key_stride[2], tile.n_block * ROWS + thread / 32 * 16 + lane / 4, p.seqlen_k,
               p.head_dim);
}

}  // namespace two_pass

extern "C" __global__ void __launch_bounds__(two_pass::THREADS, 1)
    attention_backward_two_pass_key_value(const __grid_constant__ two_pass::Parameters parameters) {
    using namespace two_pass;
    extern __shared__ unsigned char raw[];
    const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x / 32), 0);
    const Shared shared = begin<Shared>(parameters, shared_address(raw), warp);
    const Tile tile(parameters);

    if (warp < 4) {
        ptx::give_up_registers<PRODUCER_REGISTERS>();
        if (warp == 0 && ptx::elect_lane()) produce(parameters, shared, tile);
    } else {
        ptx::claim_registers<CONSUMER_REGISTERS>();
        if (warp < 8) {
            consume_values(parameters, shared, tile);
        } else {
            consume_keys(parameters, shared, tile);
        }
    }
}

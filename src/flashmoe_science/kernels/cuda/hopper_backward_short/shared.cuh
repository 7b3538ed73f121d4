// Shared memory of the backward kernel for short sequences.
#pragma once

#include "hopper_backward/release.cuh"
#include "hopper_backward_short/parameters.cuh"
#include "mma/descriptor.cuh"
#include "ptx/mbarrier.cuh"

namespace backward {

constexpr int BLOCKS = 8;  // of query rows, over all heads that share keys: those whose sums of dQ there is room for
constexpr int HEADS = 2;   // of keys, whose rows' statistics are there
// A query is needed half a step sooner than its output gradient, and is let go later.
constexpr int QUERY_STAGES = 4;
constexpr int GRADIENT_STAGES = 2;
constexpr int DELTA_WARPS = 2;
constexpr uint32 KEY_BYTES = BLOCK_N * panel::ROW_BYTES;
constexpr uint32 QUERY_BYTES = BLOCK_M * panel::ROW_BYTES;
constexpr uint32 SUM_BYTES = BLOCK_M * PIECE * 4;  // of a block of query rows and a consumer
constexpr uint32 STATISTIC_BYTES = BLOCKS * BLOCK_M * 4;

struct Shared {
    uint32 base;  // a multiple of 1024, so that the swizzle depends on the row alone

    static constexpr uint32 SCORES = KEY_BYTES;
    static constexpr uint32 QUERIES = SCORES + KEY_BYTES;
    static constexpr uint32 GRADIENTS = QUERIES + QUERY_STAGES * QUERY_BYTES;
    static constexpr uint32 OUTPUT = GRADIENTS + GRADIENT_STAGES * QUERY_BYTES;
    static constexpr uint32 SUMS = OUTPUT + QUERY_BYTES;
    static constexpr uint32 LSE = SUMS + BLOCKS * CONSUMERS * SUM_BYTES;
    static constexpr uint32 DELTA = LSE + HEADS * STATISTIC_BYTES;
    static constexpr uint32 BARRIERS = DELTA + HEADS * STATISTIC_BYTES;
    static constexpr uint32 QUERY_BARRIERS = BARRIERS + 7 * 8;
    static constexpr uint32 GRADIENT_BARRIERS = QUERY_BARRIERS + QUERY_STAGES * 16;
    static constexpr uint32 HEAD_BARRIERS = GRADIENT_BARRIERS + GRADIENT_STAGES * 16;
    static constexpr uint32 BYTES = HEAD_BARRIERS + HEADS * 16 + GRADIENT_STAGES * 8;

    __device__ uint32 key() const { return base; }
    // Score gradients of a block of keys, and before the first of them its values, which consumers then hold in registers.
    // A warp overwrites what it alone has read: a key's score gradients lie where its value was.
    __device__ uint32 scores() const { return base + SCORES; }
    __device__ uint32 query(uint32 stage) const { return base + QUERIES + stage * QUERY_BYTES; }
    __device__ uint32 gradient(uint32 stage) const { return base + GRADIENTS + stage * QUERY_BYTES; }
    __device__ uint32 output() const { return base + OUTPUT; }
    __device__ uint32 sum(int block, int consumer) const { return base + SUMS + (block * CONSUMERS + consumer) * SUM_BYTES; }
    // In log2; +inf where a row takes no part. `head`: the parity of its index.
    __device__ uint32 lse(int head, int block) const { return base + LSE + head * STATISTIC_BYTES + block * BLOCK_M * 4; }
    // Less the log-sum-exp's own gradient, which alone is there until the rest is added.
    __device__ uint32 delta(int head, int block) const { return lse(head, block) + (DELTA - LSE); }

    // Barriers: `full` once the data is there, `empty` once it has been used.
    __device__ uint32 key_full() const { return base + BARRIERS; }
    __device__ uint32 value_full() const { return base + BARRIERS + 8; }
    __device__ uint32 keys_empty() const { return base + BARRIERS + 16; }  // score gradients too
    __device__ uint32 scores_full() const { return base + BARRIERS + 24; }
    __device__ uint32 scores_empty() const { return base + BARRIERS + 32; }
    __device__ uint32 output_full() const { return base + BARRIERS + 40; }
    __device__ uint32 output_empty() const { return base + BARRIERS + 48; }
    __device__ uint32 query_full(uint32 stage) const { return base + QUERY_BARRIERS + stage * 16; }
    __device__ uint32 query_empty(uint32 stage) const { return query_full(stage) + 8; }
    __device__ uint32 gradient_full(uint32 stage) const { return base + GRADIENT_BARRIERS + stage * 16; }
    __device__ uint32 gradient_empty(uint32 stage) const { return gradient_full(stage) + 8; }
    __device__ uint32 statistics_full(int head) const { return base + HEAD_BARRIERS + head * 16; }
    __device__ uint32 statistics_empty(int head) const { return statistics_full(head) + 8; }
    __device__ uint32 delta_full(uint32 stage) const { return base + HEAD_BARRIERS + HEADS * 16 + stage * 8; }
};
static_assert(Shared::BYTES <= 232448, "more shared memory than a block may have");

// A place in a ring of buffers, and the parity of its current round.
template <int STAGES>
__device__ __forceinline__ uint32 stage_of(uint32 count) {
    return count % STAGES;
}
template <int STAGES>
__device__ __forceinline__ uint32 parity_of(uint32 count) {
    return count / STAGES & 1;
}

__device__ __forceinline__ void initialise(const Shared& shared) {
    ptx::mbarrier_init(shared.key_full(), 1);
    ptx::mbarrier_init(shared.value_full(), 1);
    ptx::mbarrier_init(shared.keys_empty(), CONSUMERS * RELEASES);
    ptx::mbarrier_init(shared.scores_full(), CONSUMERS * RELEASES);
    ptx::mbarrier_init(shared.scores_empty(), CONSUMERS * RELEASES);
    ptx::mbarrier_init(shared.output_full(), 1);
    ptx::mbarrier_init(shared.output_empty(), DELTA_WARPS * RELEASES_OF_WARP);
    for (int stage = 0; stage < QUERY_STAGES; ++stage) {
        ptx::mbarrier_init(shared.query_full(stage), 1);
        ptx::mbarrier_init(shared.query_empty(stage), CONSUMERS * RELEASES);
    }
    for (int stage = 0; stage < GRADIENT_STAGES; ++stage) {
        ptx::mbarrier_init(shared.gradient_full(stage), 1);
        ptx::mbarrier_init(shared.gradient_empty(stage), CONSUMERS * RELEASES + DELTA_WARPS * RELEASES_OF_WARP);
        ptx::mbarrier_init(shared.delta_full(stage), DELTA_WARPS * RELEASES_OF_WARP);
    }
    for (int head = 0; head < HEADS; ++head) {
        ptx::mbarrier_init(shared.statistics_full(head), RELEASES_OF_WARP);
        ptx::mbarrier_init(shared.statistics_empty(head), CONSUMERS * RELEASES);
    }
    ptx::mbarrier_init_fence();
}

}  // namespace backward

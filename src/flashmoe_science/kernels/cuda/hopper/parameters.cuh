// What the host passes to the Hopper kernel, and the compile-time shape of it.
#pragma once

#include "types.cuh"
#include "ptx/tma.cuh"

namespace hopper {

// Macros from the configuration (configs/): HEAD_DIM, CONSUMERS, BLOCK_N, K_STAGES, V_STAGES, Q_STAGES, CAUSAL, PING_PONG.
constexpr int WARPGROUP = 128;
constexpr int ROWS = 64;  // of the query, per consumer warpgroup: wgmma's M
constexpr int BLOCK_M = ROWS * CONSUMERS;
constexpr int THREADS = WARPGROUP * (CONSUMERS + 1);
constexpr int PANELS = (HEAD_DIM + 63) / 64;

// Registers per thread after reallocation. The sum over all warps must fit what the launch got: 168 each for three
// warpgroups, 128 each for four.
constexpr int PRODUCER_REGISTERS = CONSUMERS == 3 ? 32 : 24;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 3 ? 160 : 240;
static_assert(CONSUMERS == 2 || CONSUMERS == 3, "two or three consumer warpgroups");
static_assert(PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <= (CONSUMERS == 3 ? 4 * 128 : 3 * 168),
              "register pool exceeded: setmaxnreg.inc would wait for ever");

struct Parameters {
    ptx::TensorMap query;
    ptx::TensorMap key;
    ptx::TensorMap value;
    uint16* output;
    float* lse;        // (batch, heads, seqlen_q), or null
    int* ticket;       // zero before and after every launch
    float scale_log2;  // softmax scale times log2(e)
    int seqlen_q;
    int seqlen_k;
    int num_heads;
    int group;  // query heads per key head
    int m_blocks;
    int head_count;  // batch * num_heads
    int section;     // heads that are worked on together, so that their keys and values stay in L2
    int tiles;
    int head_dim;
    int64 output_stride[3];  // of batch, head and row, in elements
};

}  // namespace hopper

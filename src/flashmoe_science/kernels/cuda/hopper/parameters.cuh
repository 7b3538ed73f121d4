// What the host passes to the Hopper kernel, and the compile-time shape of it.
#pragma once

#include "hopper/shape.cuh"
#include "ptx/tma.cuh"
#include "types.cuh"

namespace hopper {

// Macros from the configuration (configs/): HEAD_DIM, CONSUMERS, BLOCK_N, K_STAGES, V_STAGES, Q_STAGES, CAUSAL, PING_PONG.

// With one consumer, two blocks share a multiprocessor.
constexpr int BLOCKS_PER_MULTIPROCESSOR = CONSUMERS == 1 ? 2 : 1;

// Registers per thread after reallocation. The sum over all warps must fit what the launch got: 168 each for three
// warpgroups, 128 each for four, or for twice two.
constexpr int LAUNCHED_REGISTERS = CONSUMERS == 2 ? 168 : 128;
constexpr int PRODUCER_REGISTERS = CONSUMERS == 3 ? 32 : CONSUMERS == 2 ? 24 : 40;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 3 ? 160 : CONSUMERS == 2 ? 240 : 216;
static_assert(PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <= (CONSUMERS + 1) * LAUNCHED_REGISTERS,
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

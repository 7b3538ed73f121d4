// What the host passes to the Hopper kernel of attention's backward pass for short sequences, and its compile-time shape.
#pragma once

#include "ptx/tma.cuh"
#include "types.cuh"

namespace backward {

// Macros from the configuration (configs/): HEAD_DIM, CAUSAL.
constexpr int WARPGROUP = 128;
constexpr int ROWS = 64;  // of the keys, per consumer warpgroup: wgmma's M
constexpr int CONSUMERS = 2;
constexpr int BLOCK_N = ROWS * CONSUMERS;
constexpr int BLOCK_M = ROWS;  // of the queries, whose sums of dQ are products with these on the rows
constexpr int THREADS = WARPGROUP * (CONSUMERS + 1);
constexpr int PIECE = HEAD_DIM / CONSUMERS;  // head dims of dQ that each consumer sums up
constexpr bool TRANSPOSED = false;
static_assert(HEAD_DIM == 64, "a row is one panel, and the sums of more would leave no room");

constexpr int PRODUCER_REGISTERS = 56;
constexpr int CONSUMER_REGISTERS = 224;
static_assert(PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <= 3 * 168,
              "register pool exceeded: setmaxnreg.inc would wait for ever");

struct Parameters {
    ptx::TensorMap query;
    ptx::TensorMap key;
    ptx::TensorMap value;
    ptx::TensorMap grad_output;
    ptx::TensorMap output;
    uint16* grad_query;
    uint16* grad_key;
    uint16* grad_value;
    const float* lse;       // (batch, num_heads, seqlen_q), natural; -inf where a row sees no key
    const float* grad_lse;  // the same, with strides of its own; or null
    int64 grad_query_stride[3];  // of batch, head and row, in elements
    int64 grad_key_stride[3];
    int64 grad_value_stride[3];
    int64 grad_lse_stride[3];
    float scale;       // softmax scale
    float scale_log2;  // times log2(e)
    int seqlen_q;
    int seqlen_k;
    int num_heads;
    int num_kv_heads;
    int m_blocks;    // of BLOCK_M query rows, per head
    int n_blocks;    // of BLOCK_N keys
    int head_count;  // batch * num_kv_heads
    int head_dim;
};

}  // namespace backward

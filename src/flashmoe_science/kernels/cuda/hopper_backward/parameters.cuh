// What the host passes to the Hopper kernel of attention's backward pass, and the compile-time shape of it.
#pragma once

#include "types.cuh"
#include "ptx/tma.cuh"

namespace backward {

// Macros from the configuration (configs/): HEAD_DIM, BLOCK_M, CAUSAL, WINDOW, CONVERTS, STAGGERED. Of the launch: DRAWS_FIRST.
static_assert(!(STAGGERED && (CAUSAL || CONVERTS)), "tiles are of one length");
static_assert(!(STAGGERED && DRAWS_FIRST), "staggered tiles are dealt out");
static_assert(CAUSAL || !WINDOW, "a window ends at the diagonal");
constexpr int WARPGROUP = 128;
constexpr int ROWS = 64;       // of the keys, per consumer warpgroup: wgmma's M
constexpr int CONSUMERS = 2;
constexpr int BLOCK_N = ROWS * CONSUMERS;
constexpr int THREADS = WARPGROUP * (CONSUMERS + 1);
constexpr int PANELS = HEAD_DIM / 64;

// Of the piece of dQ that each consumer computes: a panel of 64 head dims or half of the query rows. Where the query rows are not
// whole rows of wgmma, dQ is transposed: head dims are.
constexpr bool TRANSPOSED = BLOCK_M % ROWS != 0;
constexpr int PIECE = TRANSPOSED ? BLOCK_M : 64;
constexpr int PIECE_FLOATS = ROWS * PIECE;
static_assert(!TRANSPOSED || (PANELS == 2 && !CONVERTS), "transposed: a piece is a panel of head dims");
constexpr uint32 PIECE_BYTES = PIECE_FLOATS * 4;
static_assert(BLOCK_M * HEAD_DIM == CONSUMERS * PIECE_FLOATS, "each consumer computes one piece of dQ");

constexpr int PRODUCER_REGISTERS = 24;
constexpr int CONSUMER_REGISTERS = 240;
static_assert(PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <= 3 * 168,
              "register pool exceeded: setmaxnreg.inc would wait for ever");

struct Parameters {
    ptx::TensorMap query;
    ptx::TensorMap key;
    ptx::TensorMap value;
    ptx::TensorMap grad_output;
    ptx::TensorMap grad_query;  // where CONVERTS
    uint16* grad_key;
    uint16* grad_value;
    const float* lse;     // (batch * num_heads, m_blocks * BLOCK_M), in log2; +inf where a row takes no part
    const float* delta;   // the same shape
    float* sums;          // of dQ: (batch * num_heads, m_blocks, CONSUMERS, PIECE_FLOATS), each piece in fragment order
    uint32* turns;        // (batch * num_heads, m_blocks, CONSUMERS): how many key blocks have been added
    int* ticket;          // zero at the start
    float scale;          // softmax scale
    float scale_log2;     // times log2(e)
    int seqlen_q;
    int seqlen_k;
    int num_heads;
    int num_kv_heads;
    int m_blocks;
    int n_blocks;
    int head_count;       // batch * num_kv_heads
    int section;          // key heads that are worked on together
    int tiles;            // head_count * n_blocks
    int head_dim;
    int64 grad_key_stride[3];    // of batch, head and row, in elements
    int64 grad_value_stride[3];
    int window_left;      // where WINDOW: how many keys before its diagonal a row sees
};

}  // namespace backward

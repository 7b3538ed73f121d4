// What the host passes to the Hopper kernel of grouped products, and the compile-time shape of it.
#pragma once

#include "moe/activation.cuh"
#include "ptx/tma.cuh"
#include "types.cuh"

#if CLUSTER > 1
#define BLOCKS_OF_A_CLUSTER __cluster_dims__(CLUSTER, 1, 1)
#else
#define BLOCKS_OF_A_CLUSTER
#endif

namespace moe {

// Macros from the configuration (configs/moe/hopper.py): TOKENS, STEP, STAGES, CLUSTER, GATHER, ACTIVATION; from the kernel:
// BACKWARD (1: weights lie across, as panels of 64 of the columns that become the product's rows) and THROUGH_SHARED (1:
// results leave through shared memory).
constexpr int WARPGROUP = 128;
constexpr int CONSUMERS = 2;
constexpr int THREADS = WARPGROUP * (CONSUMERS + 1);
constexpr int CONSUMER_WARPS = 4 * CONSUMERS;
constexpr int INNER = 64;            // columns of a stage: 128 bytes, what TMA swizzles by
constexpr int ROW_BYTES = 128;
constexpr int WEIGHT_ROWS = 256;     // of a tile; 128 a consumer, as two products of wgmma's 64
constexpr bool kPaired = kGated && !BACKWARD;  // a tile has gate rows and up rows
constexpr int OUTPUT_COLUMNS = kPaired ? WEIGHT_ROWS / 2 : WEIGHT_ROWS;
constexpr int PANEL_COLUMNS = 64;    // of a tile that lies across
constexpr int PANELS = WEIGHT_ROWS / PANEL_COLUMNS;
constexpr uint32 PANEL_BYTES = INNER * ROW_BYTES;

// Registers per thread after reallocation; the launch gives three warpgroups 168 each. Gathering keeps a row's number
// for each pass.
constexpr int PRODUCER_REGISTERS = GATHER && !THROUGH_SHARED ? 56 : 40;
constexpr int CONSUMER_REGISTERS = GATHER && !THROUGH_SHARED ? 224 : 232;
static_assert(PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <= 3 * 168,
              "register pool exceeded: setmaxnreg.inc would wait for ever");
static_assert(CLUSTER == 1 || CLUSTER == 2, "one block, or two that share what TMA loads");
static_assert(CLUSTER == 1 || !(BACKWARD && GATHER), "of the backward pass, the second product alone");
static_assert(TOKENS % STEP == 0 && STEP % 16 == 0, "widths are multiples of 16 rows, which are gathered at a time");

// The narrowest tile: where experts have fewer rows, their weights' bytes take longer than the product, and every width
// is a path of its own to compile.
constexpr int LEAST = TOKENS > 64 ? 64 : 32;

#if !BACKWARD
struct Parameters {
    ptx::TensorMap weights;  // boxes of 256 / CLUSTER rows; half of them gate, half up rows where gated
    ptx::TensorMap rows;     // without GATHER: the sorted rows, in boxes of STEP
    const char* tokens;      // with GATHER: the rows that slots stand for, `top_k` slots each
    uint16* output;          // (slots, columns): with GATHER in sorted order, without by slot
    const int* expert_offsets;
    const int* sorted_slots;
    int* ticket;   // zero at the start
    uint16* kept;  // KEEP: (slots, columns, twice if gated), sorted: what the activation is applied to, gates first
    const uint16* bias;  // null, or (experts, rows of the weight), which is added to the sums
    int experts;
    int inner;    // elements of a row
    int columns;  // of the output
    int weight_tiles;
    int top_k;
    int bias_column;  // elements from an output column's bias to the next column's
    int bias_part;    // elements from a gate's bias to its up's
};
#endif

}  // namespace moe

#if BACKWARD
#include "moe/backward_hopper_parameters.cuh"
#endif

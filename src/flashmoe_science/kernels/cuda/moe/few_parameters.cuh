// What the host passes to the kernels for few tokens, and how they cut weights into tiles.
//
// A tile is 16 weight rows, the A operand of one mma.m16n8k16 for each step of the inner dimension. Its rows 0 to 7 and
// its rows 8 to 15 are two runs: of a gated first product 8 gate rows and the 8 up rows of the same columns, so
// that a lane holds both factors of an output; otherwise 16 rows in a row.
//
// Macros of all of them: WARPS, M_TILES (tiles of a warp at a time), N_TILES (its columns of 8 tokens), K_STEPS (of 32
// elements, of a stage), STAGES (of the ring), DEPENDENT (ptx/dependent_launch.cuh),
// MAX_SLOTS (bound of tokens * top_k), DIRECT (few_routing.cuh), ACTIVATION (activation.cuh; 0 for the
// second product), BIASED (1: the product has a bias; may be left out) and those of types.cuh.
#pragma once
#include "moe/activation.cuh"
#include "types.cuh"

constexpr int kThreads = 32 * WARPS;
constexpr int kStepElements = 32;
constexpr int kStepBytes = kStepElements * kElementBytes;
constexpr int kLaneElements = 8;                // of a row's 32, that one lane holds
constexpr int kSlotBytes = 512;                 // 16 bytes of each lane of a warp
constexpr int kOutputs = kGated ? 8 : 16;       // output columns of a tile
constexpr int kColumns = 8 * N_TILES;           // tokens that meet a weight at a time

struct Parameters {
    const char* input;          // rows of `inner` elements: tokens (up) or slots (down)
    const char* weights;        // (experts, rows, inner)
    const float* topk_weights;  // (tokens, top_k)
    const void* topk_ids;       // (tokens, top_k), int32 or int64
    char* output;               // rows of `outer` elements: slots, or tokens where the kernel combines
    uint64 expert_bytes;
    uint32 tile_bytes;          // from a tile to the next one
    uint32 lane_bytes;          // from a row of a run to the next one
    uint32 high_bytes;          // from a run to the other one
    uint32 row_bytes;           // inner * 2
    int slots;
    int tokens;
    int top_k;
    int experts;
    int inner;
    int outer;
    int tiles;                  // of an expert
    int slabs;                  // units that an expert's tiles make
    int slots_per_input_row;    // top_k (up) or 1 (down)
    int ids64;                  // ids are int64, otherwise int32
#if BIASED
    const uint16* bias;         // (experts, rows of weights)
    int bias_rows;              // of an expert
    int bias_column;            // from an output column's bias to the next column's
    int bias_part;              // from a gate's bias to its up's
#endif
};

// What the host passes to the Hopper kernels of the backward pass. `moe_backward_hopper.cu` has two products.
#pragma once

#include "ptx/tma.cuh"
#include "types.cuh"

namespace moe {

struct Parameters {
    ptx::TensorMap weights;  // boxes of 64 columns and 64 inner rows
    ptx::TensorMap rows;     // GATHER: what the forward pass kept, else the sorted rows; in boxes of 64 columns and STEP rows
#if GATHER
    ptx::TensorMap gradient;        // `output` as (columns, parts, slots, 1), in boxes of 64 columns and 32 rows
    ptx::TensorMap activated_rows;  // `activated` as (columns, 1, slots, 1), in such boxes
#endif
    const char* tokens;      // GATHER: the rows that slots stand for, `top_k` slots each
    const float* topk_weights;  // GATHER: by slot
    uint16* output;     // GATHER: gradient of what was kept, (slots, kept columns), sorted; else (slots, columns) by slot
    uint16* activated;  // GATHER: (slots, columns), sorted: activated rows times their slot's weight
    float* sums;        // GATHER: (16 * weight_tiles, slots), sorted: of the gradient times the activated row
    const int* expert_offsets;
    const int* sorted_slots;
    int* ticket;  // zero at the start
    int experts;
    int inner;    // elements of a row; without GATHER, of one of its parts
    int columns;  // of the output
    int weight_tiles;
    int top_k;
    int slots;
};

}  // namespace moe

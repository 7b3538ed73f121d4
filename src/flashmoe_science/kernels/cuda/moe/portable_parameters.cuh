// One grouped product: rows sorted by expert, times their expert's weights.
#pragma once
#include "types.cuh"

struct ProductParameters {
    const char* input;          // (tokens, inner) or (rows, inner)
    const char* weights;        // (experts, rows of weights, inner)
    char* output;               // (rows, columns)
    const int* expert_offsets;  // (experts + 1): where each expert's rows begin in the sorted order
    const int* sorted_slots;    // (rows): token * top_k + j, sorted by expert
    int* ticket;                // zero before the launch
    const uint16* bias;         // null, or (experts, rows of weights): where the sums begin
    int64 weight_expert;        // bytes from one expert's weights to the next one's
    int64 weight_column;        // bytes from an output column's row of weights to the next column's
    int64 weight_part;          // bytes from a gate row to its up row
    int experts;
    int top_k;
    int inner;                  // elements of a row that is multiplied, a multiple of 16
    int columns;                // of the output, a multiple of 16
    int column_tiles;
    int section;                // row tiles of an expert that are worked on side by side
    int bias_column;            // elements from an output column's bias to the next column's
    int bias_part;              // elements from a gate's bias to its up's
};

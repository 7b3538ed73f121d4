// Parameters of the portable kernels of the backward pass of a mixture of experts.
#pragma once
#include "types.cuh"

// Rows of each expert times its weight, whose rows lie along the inner dimension.
struct BackwardProductParameters {
    const char* input;          // FIRST: (tokens, inner), the output's gradient; else (slots, inner), sorted
    const char* weights;        // (experts, inner, columns)
    char* output;               // FIRST: (slots, columns * parts), sorted: the gradient of z; else (slots, columns), by slot
    const int* expert_offsets;  // (experts + 1): where each expert's rows begin in the sorted order
    const int* sorted_slots;    // (rows): token * top_k + j, sorted by expert
    // FIRST alone:
    const char* z;              // (slots, columns * parts), sorted: what the activation is applied to, in the order of w13's rows
    const float* topk_weights;  // (slots)
    char* activated;            // (slots, columns), sorted: activated rows times their routing weight
    float* sums;                // (parts of 16 columns, slots), sorted: <d, activated>
    int experts;
    int top_k;
    int inner;         // a multiple of 16
    int columns;       // a multiple of 16
    int column_tiles;
    int slots;
    int gate_step;     // in z: elements from a column's gate to the next column's
    int gate_to_up;    // and from a gate to its up
};

// Of each expert: the sum over its rows of left (as a column) times right (as a row).
struct BackwardWeightsParameters {
    const char* left;           // (tokens, rows) where it is gathered, else (slots, rows), sorted
    const char* right;          // (tokens, columns) where it is gathered, else (slots, columns), sorted
    char* output;               // (experts, rows, columns), 16 bits, or float32 that is added to
    const int* expert_offsets;
    const int* sorted_slots;
    int top_k;
    int rows;          // a multiple of 16
    int columns;       // a multiple of 16
    int row_tiles;
    int column_tiles;
};

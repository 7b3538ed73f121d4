// Biases of the kernels for few tokens: added to a product's sums before anything is made of them.
#pragma once
#include "moe/few_parameters.cuh"

#if BIASED
#include "ptx/element.cuh"

// That of an output column of an expert; with a gate the gate's.
__device__ __forceinline__ float bias_of(const Parameters& p, int expert, int column) {
    return load_element(p.bias + static_cast<int64>(expert) * p.bias_rows + column * p.bias_column);
}

__device__ __forceinline__ float bias_of_up(const Parameters& p, int expert, int column) {
    return load_element(p.bias + static_cast<int64>(expert) * p.bias_rows + column * p.bias_column + p.bias_part);
}

// Of this lane's accumulators of a tile: row g, and row g + 8 or, with a gate, the up row of the same column.
struct TileBias {
    float low, high;

    __device__ __forceinline__ TileBias(const Parameters& p, int expert, int tile) {
        const int column = tile * kOutputs + static_cast<int>(threadIdx.x % 32) / 4;
        low = bias_of(p, expert, column);
        high = kGated ? bias_of_up(p, expert, column) : bias_of(p, expert, column + 8);
    }
};
#endif

// The two products of attention by mma.sync: scores from the query and a block of keys, output from probabilities and
// its values.
#pragma once
#include "mma/m16n8k16.cuh"
#include "portable/tile_shape.cuh"
#include "ptx/ldmatrix.cuh"

using Scores = float[kRowTiles][kKeyTiles][4];
using Output = float[kRowTiles][kOutTiles][4];

struct Query {
    uint32 fragments[QUERY_STEPS > 0 ? QUERY_STEPS : 1][kRowTiles][4];
    uint32 address;  // this lane's ldmatrix row and chunk in the warp's part of the query tile

    __device__ __forceinline__ void load_registers() {
#pragma unroll
        for (int k = 0; k < QUERY_STEPS; ++k) {
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) load_shared_fragment(k, m, fragments[k][m]);
        }
    }
    __device__ __forceinline__ void load_shared_fragment(int k, int m, uint32 (&a)[4]) const {
        load_matrices(a, T::advance(address, k) + m * 16 * T::kRowBytes);
    }
    __device__ __forceinline__ void fragment(int k, int m, uint32 (&a)[4]) const {
        if (k < QUERY_STEPS) {
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = fragments[k][m][i];
        } else {
            load_shared_fragment(k, m, a);
        }
    }
};

// Scores of 16 keys: tiles 2g and 2g + 1.
__device__ __forceinline__ void multiply_keys(Scores& scores, const Query& query, uint32 key_address, int g) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[m][2 * g][i] = scores[m][2 * g + 1][i] = 0.0f;
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
        uint32 b[4];
        load_matrices(b, T::advance(key_address, k) + g * 16 * T::kRowBytes);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
            uint32 a[4];
            query.fragment(k, m, a);
            mma(scores[m][2 * g], a, b[0], b[1]);
            mma(scores[m][2 * g + 1], a, b[2], b[3]);
        }
    }
}

// Scores of the whole block, reading each query fragment once.
__device__ __forceinline__ void multiply_keys(Scores& scores, const Query& query, uint32 key_address) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) scores[m][n][i] = 0.0f;
        }
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
        uint32 a[kRowTiles][4];
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) query.fragment(k, m, a[m]);
#pragma unroll
        for (int g = 0; g < kKeyGroups; ++g) {
            uint32 b[4];
            load_matrices(b, T::advance(key_address, k) + g * 16 * T::kRowBytes);
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) {
                mma(scores[m][2 * g], a[m], b[0], b[1]);
                mma(scores[m][2 * g + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// Output += P V for the 16 keys of group g.
__device__ __forceinline__ void multiply_values(Output& out, const uint32 (&p)[kRowTiles][4], uint32 value_address,
                                                int g) {
#pragma unroll
    for (int d = 0; d < kValueSteps; ++d) {
        uint32 b[4];
        load_matrices_transposed(b, V::advance(value_address, d) + g * 16 * V::kRowBytes);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
            mma(out[m][2 * d], p[m], b[0], b[1]);
            mma(out[m][2 * d + 1], p[m], b[2], b[3]);
        }
    }
}

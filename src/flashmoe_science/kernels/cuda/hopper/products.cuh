// The products of a consumer warpgroup of the Hopper attention kernels, and what lies between them.
//
// Macros: HEAD_DIM, VALUE_DIM, BLOCK_N.
#pragma once

#include "hopper/shape.cuh"
#include "mma/descriptor.cuh"
#include "mma/m16n8k16.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/wgmma.cuh"

namespace hopper {

using Scores = ptx::Wgmma<BLOCK_N>;
using Output = ptx::Wgmma<VALUE_DIM>;

// Keeps the usual path through the main loop in one piece.
__device__ __forceinline__ bool likely(bool condition) { return __builtin_expect(condition, 1); }

// S = Q K^T for 64 query rows and BLOCK_N keys; issued, not awaited.
__device__ __forceinline__ void multiply_keys(float (&s)[BLOCK_N / 2], uint64 query, uint64 key) {
    ptx::pin(s);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; ++k) {
        Scores::ss(s, query + panel::k_major_offset<ROWS>(k), key + panel::k_major_offset<BLOCK_N>(k), k != 0);
    }
    ptx::wgmma_commit();
}

// O += P V, or O = P V; issued, not awaited.
__device__ __forceinline__ void multiply_values(float (&o)[VALUE_DIM / 2], const uint32 (&p)[BLOCK_N / 4], uint64 value,
                                                bool accumulate) {
    ptx::pin(o);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < BLOCK_N / 16; ++k) {
        Output::rs(o, p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3], value + panel::mn_major_offset(k),
                   k != 0 || accumulate);
    }
    ptx::wgmma_commit();
}

// The same scores once more, by one warp alone, where the softmax has spoilt them: wgmma needs all four warps, mma.sync
// does not, and its accumulators lie as wgmma's do.
__device__ __forceinline__ void multiply_keys_again(float (&s)[BLOCK_N / 2], uint32 query, uint32 key) {
    const int lane = threadIdx.x % 32;
    const uint32 row = threadIdx.x / 32 % 4 * 16 + lane % 16;
    const uint32 column = lane / 16 * 8 + lane % 8;  // of 16: two blocks of eight keys
#pragma unroll
    for (int i = 0; i < BLOCK_N / 16; ++i) {
        float left[4] = {};
        float right[4] = {};
#pragma unroll 1
        for (int k = 0; k < HEAD_DIM / 16; ++k) {
            uint32 a[4];
            uint32 b[4];
            load_matrices(a, panel::chunk_address<ROWS>(query, row, 2 * k + lane / 16));
            load_matrices(b, panel::chunk_address<BLOCK_N>(key, i * 16 + column, 2 * k + lane / 8 % 2));
            mma(left, a, b[0], b[1]);
            mma(right, a, b[2], b[3]);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            s[8 * i + j] = left[j];
            s[8 * i + 4 + j] = right[j];
        }
    }
}

// The accumulator fragment of S is, pairwise packed, the operand fragment of P V.
__device__ __forceinline__ void pack_probabilities(const float (&s)[BLOCK_N / 2], uint32 (&p)[BLOCK_N / 4]) {
#pragma unroll
    for (int i = 0; i < BLOCK_N / 4; ++i) p[i] = pack(s[2 * i], s[2 * i + 1]);
}

__device__ __forceinline__ void rescale(float (&o)[VALUE_DIM / 2], const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < VALUE_DIM / 2; i += 4) {
        o[i] *= factor[0];
        o[i + 1] *= factor[0];
        o[i + 2] *= factor[1];
        o[i + 3] *= factor[1];
    }
}

}  // namespace hopper

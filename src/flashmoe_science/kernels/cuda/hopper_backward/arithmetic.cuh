// What both of Hopper's kernels that walk over query rows do at a step: their products, and the arithmetic between them. P and
// dS are held as wgmma holds accumulators, 64 keys by BLOCK_M query rows.
//
// Before it: HEAD_DIM, BLOCK_M, BLOCK_N, TRANSPOSED.
#pragma once

#include "ablation.cuh"
#include "mma/descriptor.cuh"
#include "mma/narrow_panel.cuh"
#include "ptx/shared_floats.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/wgmma.cuh"
#include "types.cuh"

namespace backward {

using Scores = ptx::Wgmma<BLOCK_M>;
using Gradient = ptx::Wgmma<HEAD_DIM>;
constexpr int CHUNKS = BLOCK_M / 16;
constexpr int NEVER = 1 << 30;

// The same number, of which the compiler knows nothing: what is computed from it is computed again at each step, instead
// of taking up registers throughout.
__device__ __forceinline__ uint32 opaque(uint32 x) {
    asm volatile("" : "+r"(x));
    return x;
}

// 64 keys (or values) times BLOCK_M query rows (or output gradients), both along the head dimension; issued, not awaited.
__device__ __forceinline__ void multiply_rows(float (&s)[BLOCK_M / 2], uint64 keys, uint64 rows) {
    if constexpr (TRANSPOSED) {
        ptx::pin(s);  // the compiler then leaves probabilities in the scores' registers
    } else {
        ptx::forget(s);
    }
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; ++k) {
        Scores::ss(s, keys + panel::k_major_offset<BLOCK_N>(k), rows + panel::k_major_offset<BLOCK_M>(k), k != 0);
    }
    ptx::wgmma_commit();
}

// sum += weights rows, along the query rows, by chunks of 16; issued, not awaited.
template <int BEGIN, int END>
__device__ __forceinline__ void accumulate(float (&sum)[HEAD_DIM / 2], const uint32 (&weights)[BLOCK_M / 4],
                                           uint64 rows) {
    if constexpr (BEGIN == 0) ptx::pin(sum);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = BEGIN; k < END; ++k) {
        Gradient::rs(sum, weights[4 * k], weights[4 * k + 1], weights[4 * k + 2], weights[4 * k + 3],
                     rows + panel::mn_major_offset(k), 1);
    }
}

// An accumulator fragment, pairwise packed, is the operand fragment of a product along its columns.
template <int BEGIN, int END>
__device__ __forceinline__ void pack_fragment(const float (&s)[BLOCK_M / 2], uint32 (&packed)[BLOCK_M / 4]) {
#pragma unroll
    for (int i = 4 * BEGIN; i < 4 * END; ++i) packed[i] = pack(s[2 * i], s[2 * i + 1]);
}

// The scores become probabilities. `lse`: of this lane's first column.
__device__ __forceinline__ void exponentiate(float (&s)[BLOCK_M / 2], float scale_log2, uint32 lse) {
#pragma unroll
    for (int i = 0; i < BLOCK_M / 2; i += 4) {
        const float2 reference = load_shared_pair(lse + 8 * i);
        s[i] = exponential(fmaf(s[i], scale_log2, -reference.x));
        s[i + 1] = exponential(fmaf(s[i + 1], scale_log2, -reference.y));
        s[i + 2] = exponential(fmaf(s[i + 2], scale_log2, -reference.x));
        s[i + 3] = exponential(fmaf(s[i + 3], scale_log2, -reference.y));
    }
}

// The gradients of probabilities become those of scores, by chunks of 16 query rows.
template <int BEGIN, int END>
__device__ __forceinline__ void differentiate(float (&dp)[BLOCK_M / 2], const float (&p)[BLOCK_M / 2], uint32 delta) {
#pragma unroll
    for (int i = 8 * BEGIN; i < 8 * END; i += 4) {
        const float2 mean = load_shared_pair(delta + 8 * i);
        dp[i] = p[i] * (dp[i] - mean.x);
        dp[i + 1] = p[i + 1] * (dp[i + 1] - mean.y);
        dp[i + 2] = p[i + 2] * (dp[i + 2] - mean.x);
        dp[i + 3] = p[i + 3] * (dp[i + 3] - mean.y);
    }
}

// Sets scores to -inf whose query row lies before the first that sees the key. `low`, `high`: how many rows, from this
// lane's first column on, do not see its two keys.
__device__ __forceinline__ void mask(float (&s)[BLOCK_M / 2], int low, int high) {
#pragma unroll
    for (int i = 0; i < BLOCK_M / 2; i += 4) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            if (2 * i + j < low) s[i + j] = NEGATIVE_INFINITY;
            if (2 * i + j < high) s[i + 2 + j] = NEGATIVE_INFINITY;
        }
    }
}

// The same of those that lie after the last that sees the key. `low`, `high`: how many rows, from this lane's first column on,
// lie before the first that does not see its two keys any more.
__device__ __forceinline__ void mask_after(float (&s)[BLOCK_M / 2], int low, int high) {
#pragma unroll
    for (int i = 0; i < BLOCK_M / 2; i += 4) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            if (2 * i + j >= low) s[i + j] = NEGATIVE_INFINITY;
            if (2 * i + j >= high) s[i + 2 + j] = NEGATIVE_INFINITY;
        }
    }
}

// Score gradients to shared memory, [key][query row], in panels of 64 query rows, or of 16.
template <int BEGIN, int END>
__device__ __forceinline__ void store_scores(const uint32 (&packed)[BLOCK_M / 4], uint32 scores, int row) {
    const int half = threadIdx.x % 32 / 16;
#pragma unroll
    for (int k = BEGIN; k < END; ++k) {
        const uint32 address = TRANSPOSED ? narrow_panel::chunk_address<BLOCK_N>(scores, row, 2 * k + half)
                                          : panel::chunk_address<BLOCK_N>(scores, row, 2 * k + half);
        store_matrices(address, packed[4 * k], packed[4 * k + 1], packed[4 * k + 2], packed[4 * k + 3]);
    }
}

}  // namespace backward

// Tiles of weights and columns of tokens: copied asynchronously, multiplied from shared memory.
//
// The inner index of a product may be permuted if both sides agree: a lane (g = lane / 4, t = lane % 4) takes the 8
// contiguous elements 8t.. of every 32 (16 bytes) and calls them k = {2t, 2t+1, 2t+8, 2t+9} of two steps of 16. So it
// copies what it will multiply, rows g and g + 8 of a tile, to a place of its own (slot + 16 * lane), and needs no barrier,
// no swizzle and no ldmatrix to read it back: shared memory is a queue behind its registers.
#pragma once
#include "mma/m16n8k16.cuh"
#include "moe/few_parameters.cuh"
#include "moe/few_routing.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/vector.cuh"

constexpr int kWeightSlots = 2 * M_TILES * K_STEPS;  // of a warp and stage: [step][tile][run]
constexpr int kWeightBytes = kWeightSlots * kSlotBytes;

using Accumulators = float[M_TILES][N_TILES][4];

__device__ __forceinline__ void clear(Accumulators& sums) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int n = 0; n < N_TILES; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[m][n][e] = 0.0f;
}

// This lane's part of row 0 of the first of M_TILES tiles of an expert.
__device__ __forceinline__ const char* weights_at(const Parameters& p, int expert, int first_tile) {
    const int lane = threadIdx.x % 32;
    return p.weights + expert * p.expert_bytes + static_cast<uint64>(first_tile) * p.tile_bytes +
           (lane / 4) * p.lane_bytes + (lane % 4) * kChunkBytes;
}

// Copies one stage of weights; `to` is this lane's place in its first slot. Elements past the end of a row become zero;
// `tiles`, which may be negative, are left of the expert, and what is not there is not read.
__device__ __forceinline__ void copy_weights(const Parameters& p, uint32 to, const char* from, int tiles, int chunk,
                                             uint64 policy) {
#pragma unroll
    for (int s = 0; s < K_STEPS; ++s) {
        const int step = chunk * K_STEPS + s;
        const bool valid = step * kStepElements + static_cast<int>(threadIdx.x % 4) * kLaneElements < p.inner;
        const char* const low = from + step * kStepBytes;
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
            if (m < tiles) {
                const uint32 slot = to + (s * M_TILES + m) * 2 * kSlotBytes;
                const char* const tile = low + static_cast<uint64>(m) * p.tile_bytes;
                copy_chunk(slot, tile, valid, policy);
                copy_chunk(slot + kSlotBytes, tile + p.high_bytes, valid, policy);
            }
    }
}

// Copies this lane's 16 bytes of a step of its token's row.
__device__ __forceinline__ void copy_row(const Parameters& p, uint32 to, const char* row, int step) {
    const int lane_element = static_cast<int>(threadIdx.x % 4) * kLaneElements;
    copy_chunk(to, row + step * kStepBytes, step * kStepElements + lane_element < p.inner);
}

// This lane's part of the row of the input that a slot multiplies.
__device__ __forceinline__ const char* row_at(const Parameters& p, int slot) {
    return p.input + static_cast<uint64>(slot / p.slots_per_input_row) * p.row_bytes + (threadIdx.x % 4) * kChunkBytes;
}

// The rows that this lane copies of each 8 tokens of a group; null where there is none.
__device__ __forceinline__ void enter_rows(const Parameters& p, const Routing& routing, const Group& group,
                                           const char* (&row)[N_TILES]) {
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) {
        const int column = 8 * n + static_cast<int>(threadIdx.x % 32) / 4;
        row[n] = column < group.rows ? row_at(p, routing.slot(group.first + column)) : nullptr;
    }
}

// Copies their part of one stage; `to` is this lane's place in the first of its slots, [column of 8][step].
__device__ __forceinline__ void copy_rows(const Parameters& p, uint32 to, const char* const (&row)[N_TILES], int chunk) {
#pragma unroll
    for (int n = 0; n < N_TILES; ++n)
        if (row[n] != nullptr)
#pragma unroll
            for (int s = 0; s < K_STEPS; ++s)
                copy_row(p, to + (n * K_STEPS + s) * kSlotBytes, row[n], chunk * K_STEPS + s);
}

// sums += weights x tokens of the first N columns of 8, of a stage; this lane's places in the first slots of both.
template <int N>
__device__ __forceinline__ void multiply_columns(Accumulators& sums, uint32 weights, uint32 tokens) {
#pragma unroll
    for (int s = 0; s < K_STEPS; ++s) {
        Chunk column[N];
#pragma unroll
        for (int n = 0; n < N; ++n) column[n] = load_shared(tokens + (n * K_STEPS + s) * kSlotBytes);
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
            const uint32 slot = weights + (s * M_TILES + m) * 2 * kSlotBytes;
            const Chunk low = load_shared(slot), high = load_shared(slot + kSlotBytes);
#pragma unroll
            for (int n = 0; n < N; ++n) mma(sums[m][n], {low.x, high.x, low.y, high.y}, column[n].x, column[n].y);
#pragma unroll
            for (int n = 0; n < N; ++n) mma(sums[m][n], {low.z, high.z, low.w, high.w}, column[n].z, column[n].w);
        }
    }
}

// The same for so many rows: one branch, and straight code behind it, which the compiler can overlap.
template <int N = N_TILES>
__device__ __forceinline__ void multiply(Accumulators& sums, uint32 weights, uint32 tokens, int rows) {
    if constexpr (N > 1) {
        if (rows <= 8 * (N - 1)) {
            multiply<N - 1>(sums, weights, tokens, rows);
            return;
        }
    }
    multiply_columns<N>(sums, weights, tokens);
}

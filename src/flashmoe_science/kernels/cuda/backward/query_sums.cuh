// The gradients of query rows where blocks of keys make them: in turn, so that there is one order of sums, the first block of
// a head's keys stores its share in float32, those between add theirs, the last adds up and rounds. Blocks before it are
// before it in the grid, too, and GPUs start blocks in that order (as CUB's scans rely on it, too), so that none waits for
// one that waits for its multiprocessor.
//
// A block keeps dSᵀ of two steps in shared memory, a row for each key: while the warps make the next one, each multiplies 32
// rows of the last with a part of the columns of the keys.
#pragma once
#include "backward/parameters.cuh"
#include "backward/products.cuh"
#include "ptx/arrival.cuh"
#include "ptx/vector.cuh"
#include "swizzle.cuh"
#include "types.cuh"

constexpr int kSumRowTiles = 2;
constexpr int kSumRows = 16 * kSumRowTiles;  // of a warp
constexpr int kSumRowParts = BLOCK_M / kSumRows;
constexpr int kSumColumns = HEAD_DIM / (WARPS / kSumRowParts);
constexpr int kTurnRows = 32;  // that a counter of turns is there for; a tile of more rows uses the first of its counters

using WeightTile = Tile<BLOCK_M>;
constexpr int kWeightGradientBytes = BLOCK_N * WeightTile::kRowBytes;  // of one step

static_assert(BLOCK_M % kSumRows == 0 && WARPS % kSumRowParts == 0, "whole rows of warps");
static_assert(kSumColumns * (WARPS / kSumRowParts) == HEAD_DIM, "whole columns of warps");
static_assert((kSumColumns & (kSumColumns - 1)) == 0 && kSumColumns >= 16, "addresses are advanced in two steps");

// dSᵀ of 16-key tiles from `key` on and of 8-row tiles [first, last), counted from the step's chunk `chunk_tile` on.
template <int RowTiles, int ColumnTiles>
__device__ __forceinline__ void store_weight_gradients(const float (&sums)[RowTiles][ColumnTiles][4], int first, int last,
                                                       uint32 tile, int key, int chunk_tile) {
    const int lane = thread_index() % 32;
#pragma unroll
    for (int m = 0; m < RowTiles; ++m) {
#pragma unroll
        for (int n = first; n < last; ++n) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                store_shared(tile + WeightTile::offset(key + m * 16 + h * 8 + lane / 4, chunk_tile + n) + 4 * (lane % 4),
                             pack(sums[m][n][2 * h], sums[m][n][2 * h + 1]));
            }
        }
    }
}

// Of the counters in `turns`.
__device__ __forceinline__ uint32 turn_of(const BackwardParameters& p, int slice, int row_block) {
    return slice * ((p.statistics_rows + kTurnRows - 1) / kTurnRows) + row_block * (BLOCK_M / kTurnRows);
}

// This warp's share of dQ / scale of one step.
struct QueryShare {
    float sums[kSumRowTiles][kSumColumns / 8][4];
    int row, column;  // first, in the step's tile

    // `tile`: dSᵀ. `Guarded`: keys that are not finite count as zero.
    template <bool Guarded>
    __device__ __forceinline__ void multiply(uint32 tile, uint32 keys) {
        const int thread = thread_index();
        const int lane = thread % 32;
        const int warp = thread / 32;
        row = warp % kSumRowParts * kSumRows;
        column = warp / kSumRowParts * kSumColumns;
        const uint32 left = WeightTile::advance(tile + lane_along<BLOCK_M>(lane), row / 16);
        const uint32 right = Tile<HEAD_DIM>::advance(keys + lane_across<HEAD_DIM>(lane), column / 16);
        clear(sums);
#pragma unroll
        for (int k = 0; k < BLOCK_N / 16; ++k) {
            uint32 a[kSumRowTiles][4];
#pragma unroll
            for (int m = 0; m < kSumRowTiles; ++m) {
                load_matrices_transposed(a[m], WeightTile::advance(left, m) + k * 16 * WeightTile::kRowBytes);
            }
#pragma unroll
            for (int d = 0; d < kSumColumns / 16; ++d) {
                uint32 b[4];
                load_matrices_transposed(b, Tile<HEAD_DIM>::advance(right, d) + k * 16 * Tile<HEAD_DIM>::kRowBytes);
                if (Guarded) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) b[i] &= ~not_finite(b[i]);
                }
#pragma unroll
                for (int m = 0; m < kSumRowTiles; ++m) {
                    mma(sums[m][2 * d], a[m], b[0], b[1]);
                    mma(sums[m][2 * d + 1], a[m], b[2], b[3]);
                }
            }
        }
    }

    // `row_block`: the step's tile, of query head `slice` (of batch x heads). `key_block`: this block's turn of `turn`, of
    // which lane 0 has `seen` a value.
    __device__ __forceinline__ void add(const BackwardParameters& p, const uint32* turn, uint32 seen, int slice, int row_block,
                                        int key_block) {
        const int lane = thread_index() % 32;
        const int warp = thread_index() / 32;
        const int row_blocks = (p.seqlen_q + BLOCK_M - 1) / BLOCK_M;
        const int last_key = min(p.seqlen_k, min((row_block + 1) * BLOCK_M, p.seqlen_q) + p.causal_offset) - 1;
        const bool is_last = last_key / BLOCK_N == key_block;
        const bool reads = key_block > 0 && (is_last || !ADDS_IN_MEMORY);
        float4* target = p.query_sums + (static_cast<int64>(slice) * row_blocks + row_block) * (BLOCK_M * HEAD_DIM / 4) +
                         warp * (kSumRows * kSumColumns / 4) + lane;
        if (key_block > 0) {
            // What is added needs the turn's value alone; what is read, all that was written before it.
            if (lane == 0 && (reads || seen != key_block)) await_turn(turn, key_block);
            __syncwarp();
        }
        const auto each = [&](auto body) {
#pragma unroll
            for (int m = 0; m < kSumRowTiles; ++m) {
#pragma unroll
                for (int n = 0; n < kSumColumns / 8; ++n) body(target + (m * (kSumColumns / 8) + n) * 32, sums[m][n]);
            }
        };
        if (reads) {  // all loads are under way before the first is waited for
            each([](float4* at, float(&x)[4]) {
                const float4 before = load_partial(at);
                x[0] += before.x, x[1] += before.y, x[2] += before.z, x[3] += before.w;
            });
        }
#if ADDS_IN_MEMORY
        if (!reads && key_block > 0) {
            each([](float4* at, float(&x)[4]) { add_partial(at, float4{x[0], x[1], x[2], x[3]}); });
            return;
        }
#endif
        if (!is_last) {
            each([](float4* at, float(&x)[4]) { store_partial(at, float4{x[0], x[1], x[2], x[3]}); });
            return;
        }
        const int first = row_block * BLOCK_M + row + lane / 4;
        const int first_column = column + 2 * (lane % 4);
        char* rows = p.grad_query + slice / p.num_heads * p.grad_query_batch + slice % p.num_heads * p.grad_query_head;
#pragma unroll
        for (int m = 0; m < kSumRowTiles; ++m) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int at = first + m * 16 + h * 8;
                if (at >= p.seqlen_q) continue;
                char* to = rows + at * p.grad_query_row + first_column * kElementBytes;
#pragma unroll
                for (int n = 0; n < kSumColumns / 8; ++n) {
                    if (first_column + n * 8 < p.head_dim) {
                        store_global(to + n * kChunkBytes, pack(sums[m][n][2 * h] * p.scale, sums[m][n][2 * h + 1] * p.scale));
                    }
                }
            }
        }
    }
};

// Whether one of the elements of this thread's share of a tile is infinite or not a number.
template <int Threads, int Rows>
__device__ __forceinline__ bool has_not_finite(uint32 tile) {
    constexpr int chunks = Rows * Tile<HEAD_DIM>::kRowBytes / kChunkBytes;
    uint32 bits = 0;
    for (int i = thread_index(); i < chunks; i += Threads) {
        const Chunk c = load_shared(tile + i * kChunkBytes);
        bits |= not_finite(c.x) | not_finite(c.y) | not_finite(c.z) | not_finite(c.w);
    }
    return bits != 0;
}

// Rows before `end` see no key: zeros. All threads of a block.
template <int Threads>
__device__ __forceinline__ void write_rows_without_keys(const BackwardParameters& p, int batch, int head, int end) {
    const int chunks = p.head_dim / kChunkElements;
    char* rows = p.grad_query + batch * p.grad_query_batch + head * p.grad_query_head;
    for (int i = thread_index(); i < min(end, p.seqlen_q) * chunks; i += Threads) {
        store_global(rows + i / chunks * p.grad_query_row + i % chunks * kChunkBytes, Chunk{0, 0, 0, 0});
    }
}

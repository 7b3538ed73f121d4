// Grouped products of the backward pass of a mixture of experts for sm_80 and later, on mma.sync, ldmatrix and cp.async: a
// block has BLOCK_M rows of an expert and BLOCK_N columns of its weight. The product runs along the weight's rows, so that its
// tiles lie across, and ldmatrix transposes them.
//
// FIRST: d = w2^T g for each slot, g the gradient of its token's output, gathered by the copies. With z, what the activation is
// applied to, its routing weight s and y = act(z), it becomes dz = act'(z) s d and s y; and <d, y>, the gradient of s,
// leaves a part for each 16 columns. Otherwise: the gradient of the input by slot, w13^T dz. As many blocks are launched as
// there can be tiles; one without a tile ends.
//
// Macros: BLOCK_M, BLOCK_N, BLOCK_K, STAGES, WARPS_M, WARPS_N, MIN_BLOCKS (launch_bounds.cuh), FIRST, ACTIVATION
// (moe/activation.cuh; 0 unless FIRST), and those of types.cuh.
#include "moe/activation.cuh"
#include "moe/backward_portable_fragments.cuh"
#include "moe/backward_portable_parameters.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/element.cuh"
#include "ptx/global.cuh"

// The tile of an expert's rows that a block has, where as many blocks are launched as there can be tiles.
struct ExpertTile {
    int expert;
    int first;  // row, in sorted order
    int rows;   // 0: there is no such tile
};

// Row tile `index`: experts one after another, of each as many as hold its rows. By one warp, whose lanes get the same.
template <int Rows>
__device__ __forceinline__ ExpertTile expert_tile(const int* expert_offsets, int experts, int index) {
    const int lane = threadIdx.x % 32;
    int before = 0;
    for (int base = 0; base < experts; base += 32) {
        const int expert = base + lane;
        const int begin = expert_offsets[min(expert, experts)], end = expert_offsets[min(expert + 1, experts)];
        const int tiles = (end - begin + Rows - 1) / Rows;
        int sum = tiles;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, sum, distance);
            if (lane >= distance) sum += other;
        }
        const int local = index - before - (sum - tiles);  // this expert's, if it is one
        const uint32 owner = __ballot_sync(0xffffffffu, local >= 0 && local < tiles);
        if (owner != 0) {
            const int source = __ffs(owner) - 1;
            const int its = __shfl_sync(0xffffffffu, local, source);
            const int first = __shfl_sync(0xffffffffu, begin, source) + its * Rows;
            return {base + source, first, min(Rows, __shfl_sync(0xffffffffu, end, source) - first)};
        }
        before += __shfl_sync(0xffffffffu, sum, 31);
    }
    return {0, 0, 0};
}

constexpr int kThreads = 32 * WARPS_M * WARPS_N;
constexpr int kWarpM = BLOCK_M / WARPS_M, kWarpN = BLOCK_N / WARPS_N;
constexpr int kRowTiles = kWarpM / 16, kColumnTiles = kWarpN / 8;
constexpr int kParts = kGated ? 2 : 1;

using Rows = Tile<BLOCK_K>;     // of the input
using Weights = Tile<BLOCK_N>;  // of the weight, BLOCK_K of them
constexpr int kRowBytes = BLOCK_M * Rows::kRowBytes;
constexpr int kStageBytes = kRowBytes + BLOCK_K * Weights::kRowBytes;
constexpr int kRowPasses = BLOCK_M * Rows::kChunks / kThreads;
constexpr int kWeightPasses = BLOCK_K * Weights::kChunks / kThreads;
constexpr int kRowsPerPass = kThreads / Rows::kChunks, kWeightsPerPass = kThreads / Weights::kChunks;

static_assert(kWarpM % 16 == 0 && kWarpN % 32 == 0 && BLOCK_K % 16 == 0 && MMA_K == 16, "tiles of m16n8k16");
static_assert(kRowPasses * kThreads == BLOCK_M * Rows::kChunks, "whole passes");
static_assert(kWeightPasses * kThreads == BLOCK_K * Weights::kChunks, "whole passes");
static_assert(BLOCK_N % 128 == 0, "parts of the routing weights' gradient are added by eights");

using Sums = float[kRowTiles][kColumnTiles][4];

// What this thread copies of each slice of BLOCK_K.
struct Loader {
    const char* row[kRowPasses];  // its chunk of the first slice
    uint32 row_valid;             // a bit each
    const char* weights;
    bool column_valid;

    __device__ __forceinline__ Loader(const BackwardProductParameters& p, const ExpertTile& tile, int first_column) {
        row_valid = 0;
#pragma unroll
        for (int i = 0; i < kRowPasses; ++i) {
            const int local = threadIdx.x / Rows::kChunks + i * kRowsPerPass;
            const bool valid = local < tile.rows;
            int64 at = valid ? tile.first + local : 0;
            if (FIRST && valid) at = p.sorted_slots[tile.first + local] / p.top_k;
            row[i] = p.input + (at * p.inner + threadIdx.x % Rows::kChunks * kChunkElements) * kElementBytes;
            row_valid |= static_cast<uint32>(valid) << i;
        }
        const int column = first_column + threadIdx.x % Weights::kChunks * kChunkElements;
        column_valid = column < p.columns;
        const int64 weight_row = static_cast<int64>(tile.expert) * p.inner + threadIdx.x / Weights::kChunks;
        weights = p.weights + (weight_row * p.columns + column) * kElementBytes;
    }

    // What lies beyond the rows, the columns or the inner dimension becomes zero, and is not read.
    __device__ __forceinline__ void copy(const BackwardProductParameters& p, uint32 stage, int k) const {
        const int chunk = threadIdx.x % Rows::kChunks, first = threadIdx.x / Rows::kChunks;
        const bool inside = k + chunk * kChunkElements < p.inner;
#pragma unroll
        for (int i = 0; i < kRowPasses; ++i)
            copy_chunk(stage + Rows::offset(first + i * kRowsPerPass, chunk), row[i] + k * kElementBytes,
                       inside && (row_valid >> i & 1));
        const int weight_chunk = threadIdx.x % Weights::kChunks, weight_first = threadIdx.x / Weights::kChunks;
#pragma unroll
        for (int i = 0; i < kWeightPasses; ++i) {
            const int local = weight_first + i * kWeightsPerPass;
            copy_chunk(stage + kRowBytes + Weights::offset(local, weight_chunk),
                       weights + static_cast<int64>(k + i * kWeightsPerPass) * p.columns * kElementBytes,
                       column_valid && k + local < p.inner);
        }
    }
};

__device__ __forceinline__ void multiply(Sums& sums, uint32 stage) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32 rows = stage + warp / WARPS_N * kWarpM * Rows::kRowBytes + Rows::offset(lane % 16, lane / 16);
    const uint32 weights =
        stage + kRowBytes + Weights::advance(Weights::offset(lane % 16, lane / 16), warp % WARPS_N * (kWarpN / 16));
#pragma unroll
    for (int slice = 0; slice < BLOCK_K / 16; ++slice) {
        uint32 a[kRowTiles][4];
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m)
            load_matrices(a[m], Rows::advance(rows, slice) + m * 16 * Rows::kRowBytes);
        multiply_across<Weights>(sums, a, weights + slice * 16 * Weights::kRowBytes);
    }
}

#if FIRST

// Two neighbouring columns of a row: d becomes the gradient of z, which is written, and so are the activated ones. Returns their
// part of <d, y>.
__device__ __forceinline__ float differentiate(const BackwardProductParameters& p, int64 row, int column, float weight,
                                               float first, float second) {
    const int64 at = row * (kParts * p.columns) + column * p.gate_step;
    const uint16* const gates = reinterpret_cast<const uint16*>(p.z) + at;
    const float d[2] = {first, second};
    float to_gate[2], to_up[2], activated[2], sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const Activated gate = activate_with_slope(load_element(gates + i * p.gate_step));
        const float up = kGated ? load_element(gates + i * p.gate_step + p.gate_to_up) : 1.0f;
        const float factor = kGated ? factor_of(up) : 1.0f;
        const float value = gate.value * factor, weighted = d[i] * weight;
        to_gate[i] = weighted * gate.slope * factor;
        to_up[i] = weighted * gate.value * slope_of_factor(up);
        activated[i] = value * weight;
        sum += d[i] * value;
    }
    char* const to = p.output + at * kElementBytes;
    if (!kGated) {
        store_global(to, pack(to_gate[0], to_gate[1]));
    } else if (p.gate_step == 1) {
        store_global(to, pack(to_gate[0], to_gate[1]));
        store_global(to + p.gate_to_up * kElementBytes, pack(to_up[0], to_up[1]));
    } else {
        store_global(to, pack(to_gate[0], to_up[0]));
        store_global(to + 2 * kElementBytes, pack(to_gate[1], to_up[1]));
    }
    store_global(p.activated + (row * p.columns + column) * kElementBytes, pack(activated[0], activated[1]));
    return sum;
}

__device__ __forceinline__ void store(const BackwardProductParameters& p, const ExpertTile& tile, int first_column,
                                      const Sums& sums) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int local = warp / WARPS_N * kWarpM + m * 16 + h * 8 + lane / 4;
            const bool valid = local < tile.rows;
            const int64 row = tile.first + local;
            const float weight = valid ? p.topk_weights[p.sorted_slots[row]] : 0.0f;
#pragma unroll
            for (int n = 0; n < kColumnTiles; n += 2) {
                const int column = first_column + warp % WARPS_N * kWarpN + n * 8;  // 16 are inside, or none
                float sum = 0.0f;
                if (valid && column < p.columns) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const float* const d = sums[m][n + i] + 2 * h;
                        sum += differentiate(p, row, column + i * 8 + lane % 4 * 2, weight, d[0], d[1]);
                    }
                }
                sum += __shfl_xor_sync(0xffffffffu, sum, 1);
                sum += __shfl_xor_sync(0xffffffffu, sum, 2);
                if (valid && lane % 4 == 0) p.sums[static_cast<int64>(column / 16) * p.slots + row] = sum;
            }
        }
}

#else

__device__ __forceinline__ void store(const BackwardProductParameters& p, const ExpertTile& tile, int first_column,
                                      const Sums& sums) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int local = warp / WARPS_N * kWarpM + m * 16 + h * 8 + lane / 4;
            if (local >= tile.rows) continue;
            const int64 slot = p.sorted_slots[tile.first + local];
#pragma unroll
            for (int n = 0; n < kColumnTiles; ++n) {
                const int column = first_column + warp % WARPS_N * kWarpN + n * 8 + lane % 4 * 2;
                if (column < p.columns)
                    store_global(p.output + (slot * p.columns + column) * kElementBytes,
                                 pack(sums[m][n][2 * h], sums[m][n][2 * h + 1]));
            }
        }
}

#endif

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
moe_backward_portable(const __grid_constant__ BackwardProductParameters p) {
    extern __shared__ __align__(1024) char shared_memory[];
    const uint32 stages = shared_address(shared_memory);
    const ExpertTile tile = expert_tile<BLOCK_M>(p.expert_offsets, p.experts, blockIdx.x / p.column_tiles);
    if (tile.rows == 0) return;
    const int first_column = blockIdx.x % p.column_tiles * BLOCK_N;
    const Loader loader(p, tile, first_column);
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) {
        if (s * BLOCK_K < p.inner) loader.copy(p, stages + s * kStageBytes, s * BLOCK_K);
        copy_commit();
    }
    Sums sums;
    clear(sums);
    int read = 0, write = STAGES - 1;
    for (int k = 0; k < p.inner; k += BLOCK_K) {
        // This slice has arrived, and all warps have left the one before it, whose place is taken.
        copy_wait<STAGES - 2>();
        __syncthreads();
        const int next = k + (STAGES - 1) * BLOCK_K;
        if (next < p.inner) loader.copy(p, stages + write * kStageBytes, next);
        copy_commit();
        multiply(sums, stages + read * kStageBytes);
        read = read + 1 == STAGES ? 0 : read + 1;
        write = write + 1 == STAGES ? 0 : write + 1;
    }
    copy_wait<0>();
    store(p, tile, first_column, sums);
}

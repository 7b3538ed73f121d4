// Gradients of the experts' weights for sm_80 and later: products along an expert's rows, as many as there are. A block has
// BLOCK_M rows and BLOCK_N columns of an expert's weight. Both operands lie across, and ldmatrix transposes both; rows past the
// expert's last become zero. Each result is one sum in the order of the rows.
//
// Macros: BLOCK_M, BLOCK_N, BLOCK_K (of the sorted rows at a time), STAGES, WARPS_M, WARPS_N, MIN_BLOCKS, GATHER_LEFT (1: the left
// operand's rows are those of tokens, and the right one's are sorted; 0: the other way about), ACCUMULATE (1: the output is
// float32, and added to; an expert without rows is left as it is), and those of types.cuh.
#include "moe/backward_portable_fragments.cuh"
#include "moe/backward_portable_parameters.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/global.cuh"

constexpr int kThreads = 32 * WARPS_M * WARPS_N;
constexpr int kWarpM = BLOCK_M / WARPS_M, kWarpN = BLOCK_N / WARPS_N;
constexpr int kRowTiles = kWarpM / 16, kColumnTiles = kWarpN / 8;

using Left = Tile<BLOCK_M>;
using Right = Tile<BLOCK_N>;
constexpr int kLeftBytes = BLOCK_K * Left::kRowBytes;
constexpr int kStageBytes = kLeftBytes + BLOCK_K * Right::kRowBytes;

static_assert(kWarpM % 32 == 0 && kWarpN % 32 == 0 && BLOCK_K % 16 == 0 && MMA_K == 16, "tiles of m16n8k16");

using Sums = float[kRowTiles][kColumnTiles][4];

// BLOCK_K rows of an operand into shared memory, from row `first` of the sorted order on.
template <int Width, bool Gather>
__device__ __forceinline__ void copy_operand(const BackwardWeightsParameters& p, uint32 to, const char* from, int columns,
                                             int first_column, int first, int end) {
    using Layout = Tile<Width>;
    constexpr int kPasses = BLOCK_K * Layout::kChunks / kThreads, kPerPass = kThreads / Layout::kChunks;
    static_assert(kPasses * kThreads == BLOCK_K * Layout::kChunks, "whole passes");
    const int chunk = threadIdx.x % Layout::kChunks;
    const int column = first_column + chunk * kChunkElements;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
        const int local = threadIdx.x / Layout::kChunks + i * kPerPass;
        const bool valid = first + local < end && column < columns;
        int64 row = valid ? first + local : 0;
        if (Gather && valid) row = p.sorted_slots[first + local] / p.top_k;
        copy_chunk(to + Layout::offset(local, chunk), from + (row * columns + (valid ? column : 0)) * kElementBytes, valid);
    }
}

__device__ __forceinline__ void multiply(Sums& sums, uint32 stage) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32 left = stage + Left::advance(Left::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2),
                                              warp / WARPS_N * (kWarpM / 16));
    const uint32 right = stage + kLeftBytes + Right::advance(Right::offset(lane % 16, lane / 16),
                                                             warp % WARPS_N * (kWarpN / 16));
#pragma unroll
    for (int slice = 0; slice < BLOCK_K / 16; ++slice) {
        uint32 a[kRowTiles][4];
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m)
            load_matrices_transposed(a[m], Left::advance(left + slice * 16 * Left::kRowBytes, m));
        multiply_across<Right>(sums, a, right + slice * 16 * Right::kRowBytes);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
moe_backward_portable_weights(const __grid_constant__ BackwardWeightsParameters p) {
    extern __shared__ __align__(1024) char shared_memory[];
    const uint32 stages = shared_address(shared_memory);
    const int tiles = p.row_tiles * p.column_tiles;
    const int expert = blockIdx.x / tiles;
    const int first_row = blockIdx.x % tiles / p.column_tiles * BLOCK_M;
    const int first_column = blockIdx.x % p.column_tiles * BLOCK_N;
    const int begin = p.expert_offsets[expert], end = p.expert_offsets[expert + 1];
    if (ACCUMULATE && begin == end) return;
    const auto copy = [&](int stage, int first) {
        const uint32 to = stages + stage * kStageBytes;
        copy_operand<BLOCK_M, GATHER_LEFT == 1>(p, to, p.left, p.rows, first_row, first, end);
        copy_operand<BLOCK_N, GATHER_LEFT == 0>(p, to + kLeftBytes, p.right, p.columns, first_column, first, end);
    };
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) {
        if (begin + s * BLOCK_K < end) copy(s, begin + s * BLOCK_K);
        copy_commit();
    }
    Sums sums;
    clear(sums);
    int read = 0, write = STAGES - 1;
    for (int first = begin; first < end; first += BLOCK_K) {
        copy_wait<STAGES - 2>();
        __syncthreads();
        const int next = first + (STAGES - 1) * BLOCK_K;
        if (next < end) copy(write, next);
        copy_commit();
        multiply(sums, stages + read * kStageBytes);
        read = read + 1 == STAGES ? 0 : read + 1;
        write = write + 1 == STAGES ? 0 : write + 1;
    }
    copy_wait<0>();

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = first_row + warp / WARPS_N * kWarpM + m * 16 + h * 8 + lane / 4;
            if (row >= p.rows) continue;
            const int64 at = (static_cast<int64>(expert) * p.rows + row) * p.columns;
#pragma unroll
            for (int n = 0; n < kColumnTiles; ++n) {
                const int column = first_column + warp % WARPS_N * kWarpN + n * 8 + lane % 4 * 2;
                if (column >= p.columns) continue;
                const float x = sums[m][n][2 * h], y = sums[m][n][2 * h + 1];
#if ACCUMULATE
                float* const to = reinterpret_cast<float*>(p.output) + at + column;
                const float2 there = load_pair(to);
                store_pair(to, make_float2(there.x + x, there.y + y));
#else
                store_global(p.output + (at + column) * kElementBytes, pack(x, y));
#endif
            }
        }
}

// Gradients of an expert's biases: the sum of its rows, in float32 and in a fixed order. A block takes 64 columns of an expert;
// a thread adds every 32nd row of eight columns, and the 32 sums of a column are added in their order.
//
// GATHER: the rows are those of the output's gradient, by token, times their slot's routing weight: for the second product's
// bias. Otherwise they are sorted, gates and then ups: for the first one's, whose layout the strides of the output give.
//
// Compile-time configuration: GATHER, DEPENDENT (ptx/dependent_launch.cuh), ELEMENT_BF16.
#if DEPENDENT
#include "ptx/dependent_launch.cuh"
#endif
#include "ptx/element.cuh"
#include "ptx/global.cuh"
#include "types.cuh"

constexpr int kThreads = 256;
constexpr int kTileColumns = 64;
constexpr int kChunksAcross = kTileColumns / kChunkElements;
constexpr int kRowsAtOnce = kThreads / kChunksAcross;

struct BiasGradientParameters {
    const char* rows;           // GATHER: (tokens, columns); else (slots, columns), sorted
    const float* topk_weights;  // GATHER: by slot
    char* output;               // (experts, columns)
    const int* expert_offsets;
    const int* sorted_slots;
    int columns;       // a multiple of 16
    int column_tiles;
    int part_columns;  // of the rows' first part
    int output_column;  // elements from a column to the next one of its part
    int output_part;    // elements from a column of the first part to that of the second
    int top_k;
};

extern "C" __global__ void __launch_bounds__(kThreads)
    moe_backward_bias(const __grid_constant__ BiasGradientParameters p) {
    __shared__ float sums[kRowsAtOnce * kTileColumns];
#if DEPENDENT
    wait_for_predecessor();
    allow_successor();
#endif
    const int expert = blockIdx.x / p.column_tiles;
    const int first_column = blockIdx.x % p.column_tiles * kTileColumns;
    const int chunk = threadIdx.x % kChunksAcross;
    const int column = first_column + chunk * kChunkElements;
    const int end = p.expert_offsets[expert + 1];
    float sum[kChunkElements] = {};
    if (column < p.columns) {
#pragma unroll 4
        for (int row = p.expert_offsets[expert] + threadIdx.x / kChunksAcross; row < end; row += kRowsAtOnce) {
            int64 at = row;
            float weight = 1.0f;
            if (GATHER) {
                const int slot = p.sorted_slots[row];
                at = slot / p.top_k;
                weight = p.topk_weights[slot];
            }
            const Chunk c = load_once(p.rows + (at * p.columns + column) * kElementBytes);
            const uint32 pairs[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 pair = unpack(pairs[i]);
                sum[2 * i] = fmaf(weight, pair.x, sum[2 * i]);
                sum[2 * i + 1] = fmaf(weight, pair.y, sum[2 * i + 1]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < kChunkElements; ++i)
        sums[threadIdx.x / kChunksAcross * kTileColumns + chunk * kChunkElements + i] = sum[i];
    __syncthreads();
    const int mine = first_column + threadIdx.x;
    if (threadIdx.x >= kTileColumns || mine >= p.columns) return;
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) total += sums[i * kTileColumns + threadIdx.x];
    const int part = mine / p.part_columns;
    const int64 to = static_cast<int64>(expert) * p.columns + mine % p.part_columns * p.output_column + part * p.output_part;
    store_element(p.output + to * kElementBytes, total);
}

// What a pass over keys needs to know of each query row where no pass over queries has published it: the log-sum-exp to base
// 2, and delta = rowsum(O ∘ dO) less the gradient of the log-sum-exp. Rows past the end, up to `statistics_rows`, get plus
// infinity and zero.
//
// A quad of lanes has one row. Macros: THREADS, and those of types.cuh. Grid: blocks_per_slice blocks of THREADS / 4 rows for
// each head.
#include "backward/parameters.cuh"
#include "backward/statistics.cuh"
#include "ptx/global.cuh"
#include "quad.cuh"
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
attention_backward_statistics(const __grid_constant__ BackwardParameters p) {
    if (p.turns != nullptr && threadIdx.x == 0) p.turns[blockIdx.x] = 0;  // THREADS / 4 rows: those of a counter
    const int slice = blockIdx.x / p.blocks_per_slice;
    const int row = blockIdx.x % p.blocks_per_slice * (THREADS / 4) + threadIdx.x / 4;
    const int batch = slice / p.num_heads;
    const int head = slice % p.num_heads;
    const char* output = p.output + batch * p.output_batch + head * p.output_head + row * p.output_row;
    const char* gradient =
        p.grad_output + batch * p.grad_output_batch + head * p.grad_output_head + row * p.grad_output_row;
    float sum = 0.0f;
    if (row < p.seqlen_q) {
        for (int c = threadIdx.x % 4; c < p.head_dim / kChunkElements; c += 4) {
            sum = dot(load_global(output + c * kChunkBytes), load_global(gradient + c * kChunkBytes), sum);
        }
    }
    sum = quad_sum(sum);
    if (threadIdx.x % 4 != 0 || row >= p.statistics_rows) return;
    const int64 at = static_cast<int64>(slice) * p.seqlen_q + row;
    const bool exists = row < p.seqlen_q;
    const float grad_lse = exists && p.grad_lse != nullptr ? p.grad_lse[at] : 0.0f;
    const int64 to = static_cast<int64>(slice) * p.statistics_rows + row;
    p.lse_log2[to] = exists ? to_log2(p.lse[at]) : POSITIVE_INFINITY;
    p.delta[to] = sum - grad_lse;
}

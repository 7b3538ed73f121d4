// What the backward pass needs of each query row beforehand: its log-sum-exp in log2, and delta, the sum over the head
// dimension of output times output gradient, less the log-sum-exp's own gradient (Dao et al., FlashAttention-2, 2023; the
// latter from d lse / d scores = probabilities). Also sets the turns of the query blocks, and the ticket behind them, to zero.
//
// A row without a key, and a row past the end, gets +inf and 0, so that its probabilities are zero. Where
// asked, the former's dQ is set to zero, as nobody adds to it.
//
// LANES lanes share a row, a chunk of 8 elements each, and have several rows on the way. Compile-time configuration: LANES, BLOCK_M, PIECES, ELEMENT_BF16.
#include "backward/statistics.cuh"
#include "ptx/dependent_launch.cuh"
#include "ptx/global.cuh"
#include "types.cuh"

struct Parameters {
    const char* output;
    const char* grad_output;
    const float* lse;       // (batch, heads, seqlen_q), natural
    const float* grad_lse;  // the same, with strides of its own; or null
    float* lse_log2;        // (batch * heads, m_blocks * BLOCK_M)
    float* delta;
    uint32* turns;  // (batch * heads, m_blocks, PIECES), and one more: the ticket
    char* grad_query;  // or null
    int64 output_stride[3];  // of batch, head and row, in bytes
    int64 grad_output_stride[3];
    int64 grad_lse_stride[3];  // in elements
    int64 grad_query_stride[3];  // in bytes
    int num_heads;
    int seqlen_q;
    int m_blocks;
    int head_dim;
};

constexpr int THREADS = 256;
constexpr int DEPTH = 2;  // rows of a thread
constexpr int ROWS = THREADS / LANES;  // at a time
constexpr bool EVEN = BLOCK_M % (DEPTH * ROWS) == 0;  // whether a head's last block of threads has no rows past its query blocks

extern "C" __global__ void __launch_bounds__(THREADS) attention_backward_prepare(const __grid_constant__ Parameters p) {
    allow_successor();
    const int row_head = blockIdx.y;
    const int first_row = blockIdx.x * ROWS * DEPTH + threadIdx.x / LANES;
    const int chunk = threadIdx.x % LANES;
    const int batch = row_head / p.num_heads;
    const int head = row_head - batch * p.num_heads;
    const char* output = p.output + batch * p.output_stride[0] + head * p.output_stride[1] + chunk * 16;
    const char* gradient = p.grad_output + batch * p.grad_output_stride[0] + head * p.grad_output_stride[1] + chunk * 16;

    Chunk a[DEPTH];
    Chunk b[DEPTH];
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
        const int row = first_row + i * ROWS;
        a[i] = b[i] = Chunk{};
        if (row < p.seqlen_q && chunk * 8 < p.head_dim) {
            a[i] = load_global(output + row * p.output_stride[2]);
            b[i] = load_global(gradient + row * p.grad_output_stride[2]);
        }
    }
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
        const int row = first_row + i * ROWS;
        const bool inside = row < p.seqlen_q;
        float sum = dot(a[i], b[i], 0.0f);
#pragma unroll
        for (int distance = LANES / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffff, sum, distance);
        if (!EVEN && row >= p.m_blocks * BLOCK_M) continue;
        if (chunk == 0) {
            float reference = NEGATIVE_INFINITY;
            if (inside) reference = p.lse[static_cast<int64>(row_head) * p.seqlen_q + row];
            const bool empty = reference == NEGATIVE_INFINITY;
            if (inside && p.grad_lse != nullptr) {
                sum -= p.grad_lse[batch * p.grad_lse_stride[0] + head * p.grad_lse_stride[1] + row * p.grad_lse_stride[2]];
            }
            const int64 index = static_cast<int64>(row_head) * p.m_blocks * BLOCK_M + row;
            p.lse_log2[index] = to_log2(reference);
            p.delta[index] = empty ? 0.f : sum;
        }
        if (p.grad_query != nullptr && inside && chunk * 8 < p.head_dim &&
            p.lse[static_cast<int64>(row_head) * p.seqlen_q + row] == NEGATIVE_INFINITY) {
            store_global(p.grad_query + batch * p.grad_query_stride[0] + head * p.grad_query_stride[1] +
                             row * p.grad_query_stride[2] + chunk * 16,
                         Chunk{});
        }
        if (row % BLOCK_M == 0 && chunk < PIECES) {
            p.turns[(static_cast<int64>(row_head) * p.m_blocks + row / BLOCK_M) * PIECES + chunk] = 0;
        }
    }
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
        p.turns[static_cast<int64>(gridDim.y) * p.m_blocks * PIECES] = 0;
    }
}

// The float32 sums of dQ, in fragment order as the Hopper kernel wrote them, become dQ.
//
// A block converts the pieces of one query block; a thread, the fragment that one of a consumer's threads held. Rows that see
// no key get zeros: nobody wrote their sums. Compile-time configuration: HEAD_DIM (64 or 128), BLOCK_M, ELEMENT_BF16.
#include "ptx/dependent_launch.cuh"
#include "ptx/global.cuh"
#include "types.cuh"

struct Parameters {
    const float* sums;  // (batch * heads, m_blocks, 2, PIECE_FLOATS)
    const float* lse_log2;  // (batch * heads, m_blocks * BLOCK_M)
    char* grad_query;
    int64 stride[3];  // of batch, head and row, in bytes
    float scale;
    int num_heads;
    int seqlen_q;
    int m_blocks;
    int head_dim;
};

constexpr int PIECE_FLOATS = BLOCK_M * HEAD_DIM / 2;
constexpr bool TRANSPOSED = BLOCK_M % 64 != 0;  // a fragment's rows are 64 head dims
constexpr int THREADS = BLOCK_M * HEAD_DIM / 32;

// Two query rows of 16 head dims; the eight lanes of a warp that hold them are four apart.
__device__ __forceinline__ void convert_transposed(const Parameters& p, int row_head, int m_block) {
    const int batch = row_head / p.num_heads;
    const int64 block = static_cast<int64>(row_head) * p.m_blocks + m_block;
    const float4* sums = reinterpret_cast<const float4*>(p.sums + block * 2 * PIECE_FLOATS);
    char* grad_query = p.grad_query + batch * p.stride[0] + (row_head - batch * p.num_heads) * p.stride[1];
    wait_for_predecessor();
    // A warp takes four neighbouring pairs of rows, whose fragments are 64 bytes in a row, and all head dims.
    const int group = threadIdx.x / 4 % (HEAD_DIM / 16);
    const int pair = threadIdx.x / 4 / (HEAD_DIM / 16) * 4 + threadIdx.x % 4;
    const float4* from = sums + group / 4 * (PIECE_FLOATS / 4) + pair / 4 * 128 + group % 4 * 32 + pair % 4;
    float4 x[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = from[4 * i];
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
        const int row = 2 * pair + odd;
        if (m_block * BLOCK_M + row >= p.seqlen_q) break;
        const bool empty = p.lse_log2[block * BLOCK_M + row] == -NEGATIVE_INFINITY;
        char* start = grad_query + (m_block * BLOCK_M + row) * p.stride[2] + group * 32;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (group * 16 + half * 8 >= p.head_dim) break;
            uint32 packed[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float4& left = x[2 * i];
                const float4& right = x[2 * i + 1];
                const float pairs[2][2][2] = {{{left.x, right.x}, {left.y, right.y}}, {{left.z, right.z}, {left.w, right.w}}};
                packed[i] = empty ? 0 : pack(pairs[half][odd][0] * p.scale, pairs[half][odd][1] * p.scale);
            }
            store_global(start + half * 16, Chunk{packed[0], packed[1], packed[2], packed[3]});
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) attention_backward_convert(const __grid_constant__ Parameters p) {
    const int row_head = blockIdx.y;
    const int m_block = blockIdx.x;
    if constexpr (TRANSPOSED) {
        convert_transposed(p, row_head, m_block);
        return;
    }
    const int batch = row_head / p.num_heads;
    const int head = row_head - batch * p.num_heads;
    const int piece = threadIdx.x / 128;
    const int thread = threadIdx.x % 128;
    const int lane = thread % 32;
    const bool odd = lane & 1;
    const int first_row = (HEAD_DIM == 64 ? 64 * piece : 0) + thread / 32 * 16 + lane / 4;
    const int first_column = (HEAD_DIM == 64 ? 0 : 64 * piece) + (odd ? 8 : 0) + (lane & 2) * 2;
    const int64 block = static_cast<int64>(row_head) * p.m_blocks + m_block;
    const float4* sums = reinterpret_cast<const float4*>(p.sums + (block * 2 + piece) * PIECE_FLOATS) + thread;

    wait_for_predecessor();
    bool empty[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        empty[half] = p.lse_log2[block * BLOCK_M + first_row + 8 * half] == -NEGATIVE_INFINITY;
    }
    float4 x[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = sums[i * 128];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = m_block * BLOCK_M + first_row + 8 * half;
        char* start = p.grad_query + batch * p.stride[0] + head * p.stride[1] + row * p.stride[2] + first_column * 2;
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            const uint32 left = half ? pack(x[i].z * p.scale, x[i].w * p.scale) : pack(x[i].x * p.scale, x[i].y * p.scale);
            const uint32 right =
                half ? pack(x[i + 1].z * p.scale, x[i + 1].w * p.scale) : pack(x[i + 1].x * p.scale, x[i + 1].y * p.scale);
            const uint32 received = __shfl_xor_sync(0xffffffff, odd ? left : right, 1);
            const uint32 low = odd ? received : left;
            const uint32 high = odd ? right : received;
            if (row < p.seqlen_q && i * 8 + first_column < p.head_dim) {
                store_global(start + i * 16, empty[half] ? 0 : low, empty[half] ? 0 : high);
            }
        }
    }
}

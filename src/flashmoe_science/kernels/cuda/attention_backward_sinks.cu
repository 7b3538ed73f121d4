// What sinks change of attention's backward pass, and their own gradient, in one launch and in a fixed order of sums.
//
// With total = log(exp(lse) + exp(sink)), weights are exp(score - total): the backward kernels get it in the place of lse.
// The log-sum-exp has no sink in it, so its gradient goes to them times exp(total - lse). A sink's gradient is the sum of
// -rowsum(output ∘ grad_output) exp(sink - total) over its head's rows. A row without keys has a share of zero in either.
//
// A thread has a row. Bound by memory: neighbouring lanes read the rows that they have one after another, 16 bytes each,
// DEPTH rows on the way. The last block of a head adds up what all of them left.
//
// Compile-time configuration: ELEMENT_BF16, MMA_K, DEPENDENT (ptx/dependent_launch.cuh).
#if DEPENDENT
#include "ptx/dependent_launch.cuh"
#endif
#include "backward/statistics.cuh"
#include "ptx/arrival.cuh"
#include "ptx/global.cuh"
#include "ptx/redux.cuh"
#include "types.cuh"

struct SinksParameters {
    const float* lse;         // (batch, heads, seqlen_q), natural; minus infinity: a row without keys
    const float* sinks;       // (heads)
    const char* output;       // this and the next one null: sinks have no gradient
    const char* grad_output;
    const float* grad_lse;    // of any strides; or null
    float* total;             // like lse; null: not wanted, and so is the next one
    float* scaled_grad_lse;   // like lse
    float* grad_sinks;        // (heads)
    float4* partials;         // (heads, batch * row_blocks): of each block's warps
    uint32* arrivals;         // (heads): zero before and after a launch
    int64 output_batch, output_head, output_row;  // bytes
    int64 grad_output_batch, grad_output_head, grad_output_row;
    int64 grad_lse_batch, grad_lse_head, grad_lse_row;  // elements
    int batch;
    int num_heads;
    int seqlen_q;
    int row_blocks;  // of THREADS rows, in a head
    int chunks;      // of a row, 16 bytes each
    int lanes;       // that read a row: the next power of two
};

constexpr int THREADS = 128;
constexpr int WARPS = THREADS / 32;
constexpr int DEPTH = 4;
constexpr int BLOCKS = 8;  // of a multiprocessor: room for all that is on the way
static_assert(WARPS == 4, "a block's partial sums are a float4");

__device__ __forceinline__ float sum_of_warp(float x) {
    return over_lanes<32>(x, [](float a, float b) { return a + b; });
}

// log(exp(a) + exp(b)), as torch.logaddexp has it; a is not minus infinity.
__device__ __forceinline__ float log_of_sum(float a, float b) {
    if (a == POSITIVE_INFINITY && b == a) return a;
    return fmaxf(a, b) + log1pf(expf(-fabsf(a - b)));
}

// rowsum(output ∘ grad_output) of the thread's row, if that exists. What is read in place of rows past the end, of chunks past a
// row's or, with fewer lanes than DEPTH, of others' rows is left out later: so all loads are on the way before any is waited for.
__device__ __forceinline__ float row_product(const SinksParameters& p, int batch, int head, int own_row) {
    const int lane = own_row & (p.lanes - 1);
    const bool inside = lane < p.chunks;
    const int64 column = inside ? lane * kChunkBytes : 0;
    const uint32 kept = inside ? 0xffffffffu : 0;  // a mask: the compiler made a branch of a choice, and a load went behind it
    int row = min(own_row - lane, p.seqlen_q - 1);
    const char* output = p.output + batch * p.output_batch + head * p.output_head + row * p.output_row + column;
    const char* gradient =
        p.grad_output + batch * p.grad_output_batch + head * p.grad_output_head + row * p.grad_output_row + column;
    float own = 0.0f;
    for (int begin = 0; begin < p.lanes; begin += DEPTH) {
        Chunk a[DEPTH];
        Chunk b[DEPTH];
#pragma unroll
        for (int i = 0; i < DEPTH; ++i) {
            a[i] = load_once(output);
            b[i] = load_once(gradient);
            const bool more = ++row < p.seqlen_q;
            output += more ? p.output_row : 0;
            gradient += more ? p.grad_output_row : 0;
        }
        float sums[DEPTH];
#pragma unroll
        for (int i = 0; i < DEPTH; ++i) sums[i] = __int_as_float(static_cast<int>(__float_as_uint(dot(a[i], b[i], 0.0f)) & kept));
        for (int distance = p.lanes / 2; distance > 0; distance /= 2) {
#pragma unroll
            for (int i = 0; i < DEPTH; ++i) sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], distance);
        }
#pragma unroll
        for (int i = 0; i < DEPTH; ++i) own = begin + i == lane ? sums[i] : own;
    }
    return own;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
attention_backward_sinks(const __grid_constant__ SinksParameters p) {
#if DEPENDENT
    wait_for_predecessor();
    allow_successor();
#endif
    __shared__ float of_warps[WARPS];
    __shared__ bool is_last;
    const int slice = blockIdx.x / p.row_blocks, row_block = blockIdx.x % p.row_blocks;
    const int batch = slice / p.num_heads, head = slice % p.num_heads;
    const int row = row_block * THREADS + threadIdx.x;
    const bool exists = row < p.seqlen_q;
    const int64 at = static_cast<int64>(slice) * p.seqlen_q + row;
    const float lse = exists ? p.lse[at] : NEGATIVE_INFINITY;
    const float sink = p.sinks[head];
    const bool has_gradient = p.output != nullptr;
    const float product = has_gradient ? row_product(p, batch, head, row) : 0.0f;
    const bool empty = lse == NEGATIVE_INFINITY;
    const float total = empty ? lse : log_of_sum(lse, sink);
    if (exists && p.total != nullptr) {
        p.total[at] = total;
        if (p.grad_lse != nullptr) {
            constexpr float most = 3.402823466e38f;
            const float ratio = empty ? 0.0f : expf(total - lse);
            const float gradient = p.grad_lse[batch * p.grad_lse_batch + head * p.grad_lse_head + row * p.grad_lse_row];
            p.scaled_grad_lse[at] = gradient * (ratio > most ? most : ratio);  // NaN stays
        }
    }
    if (!has_gradient) return;

    const float share = empty ? 0.0f : expf(sink - total);
    const float sum = sum_of_warp(exists ? product * share : 0.0f);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
    __syncthreads();
    const int parts = p.batch * p.row_blocks;
    float4* const partials = p.partials + static_cast<int64>(head) * parts;
    if (threadIdx.x == 0) {
        store_partial(&partials[batch * p.row_blocks + row_block],
                      make_float4(of_warps[0], of_warps[1], of_warps[2], of_warps[3]));
        is_last = arrive(&p.arrivals[head], parts) == static_cast<uint32>(parts - 1);
    }
    __syncthreads();
    if (!is_last) return;
    float all = 0.0f;
#pragma unroll 4
    for (int i = threadIdx.x; i < parts; i += THREADS) {
        const float4 x = load_partial(&partials[i]);
        all += (x.x + x.y) + (x.z + x.w);
    }
    all = sum_of_warp(all);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = all;
    __syncthreads();
    if (threadIdx.x == 0) p.grad_sinks[head] = -((of_warps[0] + of_warps[1]) + (of_warps[2] + of_warps[3]));
}

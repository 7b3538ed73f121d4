// The arguments of the attention backward kernels that read their tensors through plain pointers: one struct for all of
// them, which the host packs field by field in this order: pointers, 64-bit, 32-bit.
//
// P = 2^(scale_log2 Q Kᵀ - lse_log2), dP = dO Vᵀ, dS = P ∘ (dP - delta); then dV = Pᵀ dO, dQ = scale dS K and
// dK = scale dSᵀ Q (Dao, FlashAttention-2, 2023). `delta` is rowsum(O ∘ dO), less the gradient of the log-sum-exp.
#pragma once
#include "ptx/special_registers.cuh"
#include "types.cuh"

struct BackwardParameters {
    const char* query;
    const char* key;
    const char* value;
    const char* output;
    const char* grad_output;
    const float* lse;       // (batch, heads, seqlen_q), contiguous, natural logarithm; minus infinity: a row without keys
    const float* grad_lse;  // likewise; null: zero
    char* grad_query;       // null: not wanted; so are the next two
    char* grad_key;
    char* grad_value;
    float* lse_log2;  // (batch x heads, statistics_rows): the logarithm to base 2; plus infinity where a row has no keys
    float* delta;     // likewise. Rows past the end, up to a multiple of four, hold plus infinity and zero.
    float4* query_sums;  // (batch x heads, row blocks, fragments of float32): gradients of queries on their way
    uint32* turns;      // (batch x heads, statistics_rows / 32 rounded up): zeros before the blocks of keys begin; or null
    // Strides in bytes. The head dimension is contiguous.
    int64 query_batch, query_head, query_row;
    int64 key_batch, key_head, key_row;
    int64 value_batch, value_head, value_row;
    int64 output_batch, output_head, output_row;
    int64 grad_output_batch, grad_output_head, grad_output_row;
    int64 grad_query_batch, grad_query_head, grad_query_row;
    int64 grad_key_batch, grad_key_head, grad_key_row;
    int64 grad_value_batch, grad_value_head, grad_value_row;
    int num_heads;
    int heads_per_kv_head;
    int seqlen_q;
    int seqlen_k;
    int head_dim;
    int causal_offset;       // row i sees keys up to i + causal_offset: seqlen_k - seqlen_q + right, or 2^30 without a mask
    int statistics_rows;     // a multiple of four, at least seqlen_q
    int blocks_per_slice;    // of the rows or keys that a block of the grid owns
    int num_slices;          // batch x heads, of the query or of keys and values, whichever the grid goes over
    int slices_per_section;  // heads whose blocks are interleaved, so that what they read shares the L2 cache
    int last_blocks_first;
    int window_offset;       // WINDOW: row i sees keys from i + window_offset on: seqlen_k - seqlen_q - left, or -2^30
    float scale_log2;        // softmax scale times log2(e), of either sign; not zero, but so small that scores do not count
    float scale;
    float softcap_log2;      // SOFTCAP: cap x log2(e); one over it; and 2 x softmax scale x log2(e) / cap
    float softcap_inverse;
    float softcap_rate;
};

// Which part of the problem a block of the grid has: sections of heads one after another; inside a section block of rows
// by block of rows, all heads of each, those with the most work first. Cheap enough to be found anew where it is needed, so
// that nothing of it is held in registers in the main loop.
struct WorkItem {
    int lane, warp, slice, block;

    __device__ __forceinline__ explicit WorkItem(const BackwardParameters& p) {
        const int thread = thread_index();
        const int index = block_index();
        lane = thread % 32;
        warp = thread / 32;
        const int section_blocks = p.slices_per_section * p.blocks_per_slice;
        const int section = index / section_blocks;
        const int in_section = index % section_blocks;
        const int slices = min(p.slices_per_section, p.num_slices - section * p.slices_per_section);
        slice = section * p.slices_per_section + in_section % slices;
        block = in_section / slices;
        if (p.last_blocks_first) block = p.blocks_per_slice - 1 - block;
    }
};

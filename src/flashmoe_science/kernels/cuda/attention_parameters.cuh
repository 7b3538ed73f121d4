// The arguments of an attention forward kernel that reads its tensors through plain pointers. One struct, passed
// by value; the host packs it field by field in this order (all pointers first, then 64-bit, then 32-bit fields).
#pragma once
#include "types.cuh"

struct AttentionParameters {
    const char* query;
    const char* key;
    const char* value;
    char* output;
    float* lse;  // (batch, heads, seqlen_q), contiguous; null where it is not wanted
    // Strides in bytes. The head dimension is contiguous.
    int64 query_batch, query_head, query_row;
    int64 key_batch, key_head, key_row;
    int64 value_batch, value_head, value_row;
    int64 output_batch, output_head, output_row;
    int num_heads;
    int heads_per_kv_head;
    int seqlen_q;
    int seqlen_k;
    int head_dim;
    int causal_offset;      // row i sees keys up to i + causal_offset: seqlen_k - seqlen_q, or 2^30 without a mask
    int last_rows_first;    // 1: the grid starts with the last row blocks
    int num_row_blocks;     // blocks of BLOCK_M query rows per head
    int num_slices;         // batch x num_heads
    int slices_per_section;  // heads whose tiles are interleaved, so that their keys and values share the L2 cache
    float scale_log2;       // |softmax_scale| x log2(e), positive
    uint32 query_xor;       // query elements are q ^ query_xor, two at a time: a negative softmax scale flips signs
};

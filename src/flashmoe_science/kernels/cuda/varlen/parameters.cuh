// The arguments of attention over sequences of any lengths. One struct, passed by value; the host packs it field by field
// in this order. What may differ between two calls of a plan comes first.
#pragma once
#include "types.cuh"

struct VarlenParameters {
    const char* query;
    const char* key;
    const char* value;
    char* output;
    float* lse;                 // null where it is not wanted
    const int* query_starts;    // (batch + 1): first row of each sequence; null: each has seqlen_q
    const int* key_starts;      // (batch + 1): first key of each; null: see key_batch
    const int* key_counts;      // (batch): keys of each; null: by key_starts, or seqlen_k where they are null too
    const int* page_table;      // (batch, pages), rows of any stride
    const float* sinks;         // (heads); null for none
    const float* alibi_slopes;  // (heads), or a row of them for each sequence
    int64 table_row;            // elements
    int64 alibi_batch;          // elements
    int batch;
    int num_tokens;          // rows of the query; those of no sequence become zeros
    int num_tiles;           // upper bound of tiles of BLOCK_M rows over all sequences
    int slices_per_section;  // slices whose tiles are interleaved, so that their keys and values share the L2 cache
    // Strides in bytes. Head dimensions are contiguous. Those of batches are 0 where sequences are packed; with PAGED, key
    // and value have those of pages in their place.
    int64 query_batch, query_head, query_row;
    int64 key_batch, key_head, key_row;
    int64 value_batch, value_head, value_row;
    int64 output_batch, output_head, output_row;
    int64 lse_batch, lse_head, lse_row;  // elements
    int num_slices;  // heads, or with PACKED_HEADS key/value heads
    int heads_per_kv_head;
    int seqlen_q, seqlen_k;
    int tiles_per_sequence;  // where query_starts is null
    int head_dim, value_dim;
    int window_left;    // keys before a row's own position that it sees; read with LEFT_WINDOW
    int window_right;   // after it; 2^30: all
    uint32 page_size, page_multiplier, page_shift;  // x / page_size is umulhi(2 x, multiplier) >> shift
    uint32 group_multiplier, group_shift;           // x / heads_per_kv_head likewise
    float scale_log2;    // |softmax_scale| x log2(e), positive
    float softcap_log2;  // softcap x log2(e)
    float softcap_rate;  // 2 x softmax_scale x log2(e) / softcap, of the positive scale
    uint32 query_xor;    // see AttentionParameters
#if CHUNK || TREE
    int chunk;                             // keys of a chunk; a row sees those of its own
    uint32 chunk_multiplier, chunk_shift;  // x / chunk, as above
#endif
#if TREE
    const uint64* tree_mask;  // (num_tokens): see tree.cuh; it may differ between calls
#endif
};

// What one call of the backward pass asks for, how it is divided, and what a thread works with.
#pragma once

#include "problem.h"

// Mirrored by flashmoe_science.cpu. Strides are in bytes, for (batch, head, row). lse is contiguous.
struct AttentionBackwardProblem {
    int64_t element_type;
    int64_t batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim;
    int64_t query_stride[3], key_stride[3], value_stride[3], out_stride[3], grad_out_stride[3], grad_lse_stride[3];
    int64_t grad_query_stride[3], grad_key_stride[3], grad_value_stride[3];
    int64_t causal;
    double softmax_scale;
};

namespace {

// The order of the sums, and so the gradients' bits, follow from it.
constexpr int GRADIENT_TILE_QUERIES = 64;
constexpr int MAX_STRIP_TILES = 4;

struct BackwardJob {
    const AttentionBackwardProblem* problem;
    const char *query, *key, *value, *out, *grad_out, *grad_lse;  // grad_lse may be null
    const float* lse;
    char *grad_query, *grad_key, *grad_value;  // null: not needed
    float scale;               // softmax_scale
    bool causal;
    bool needs_score_gradients;  // for grad_query and grad_key
    bool on_amx;               // backward_amx.h: rows and keys are padded to whole registers, and a tile's grad_query is transposed
    int row;                   // floats in a row of sums along the head dimension: a multiple of W
    int64_t group;             // query heads that share a key/value head
    int64_t spaces;            // key/value heads of the batch
    int64_t blocks;            // of keys, in a space
    int64_t sum_rows;          // keys of a space, padded
    int tile_queries;          // a multiple of W
    int64_t strip_rows;        // queries that meet a prepared block of keys one after the other
    int64_t strips;            // of one query head
    bool whole_spaces;         // a ticket is a space, else a strip of one
    int64_t tickets;
    int64_t next_ticket;
    float* sums;               // of keys and values, `space_sums` floats for each space at work
    int64_t space_sums;
    int64_t next_sums;
    int* strips_done;          // [space][block], where a ticket is a strip
    int out_of_memory;
};

// Queries of one head. "Columns" are transposed: [d][query], for products over d; "rows" are [query][d], for products over
// queries. As pairs, one row or column holds two.
struct QueryTile {
    int64_t first_row;
    int rows;
    int64_t keys;      // keys that its last row sees
    int64_t diagonal;  // the last key that row 0 sees, and row i sees i more; NO_DIAGONAL without a mask
    int lone_columns;  // W queries each that see no key beyond the first block
    bool nonfinite;    // some query or gradient of an output is NaN or infinite; looked for under a mask only
    const char *query, *grad_out, *out;
    const float *query_rows, *grad_rows;
    ptrdiff_t query_step, grad_step;  // floats from row to row of these
    float *query_columns, *grad_columns;
    float *query_copy, *grad_copy;    // where rows go that cannot be read in place
    float* grad_query;                // [query][row], or [row][ld]: sums, not yet scaled
    float *lse, *delta;               // [ld]; delta: rowsum(out * grad_out) - grad_lse, see prepare_rows
};

struct BackwardWorkspace {
    QueryTile tile[MAX_STRIP_TILES];
    float *scores, *gradients;  // [key][ld]: scores, then weights; gradients of the weights, then of the scores
    float *weight_pairs, *gradient_pairs, *gradient_key_pairs;  // bf16: pairs along queries, and along keys
    float *key, *value;         // copies of a block
};

// Keys [first, first + count) as the products read them.
struct BackwardBlock {
    int64_t first;
    int count;
    int padded;                       // keys with sums
    const char *key, *value;          // as multiplied by columns of queries
    ptrdiff_t key_row, value_row;
    const float* key_rows;            // as summed over keys
    ptrdiff_t key_step;
    const char* raw_key;
    ptrdiff_t raw_key_row;
    float *grad_key, *grad_value;     // [key][row]: sums of the space; null: not needed
};

// How many keys of the block the first `rows` rows of the tile see: those of the last of them.
int visible_keys(const QueryTile& tile, const BackwardBlock& block, int rows) {
    const int64_t count = smaller<int64_t>(block.count, tile.keys - block.first);
    return (int)larger<int64_t>(0, smaller<int64_t>(tile.diagonal + rows - block.first, count));
}

}  // namespace

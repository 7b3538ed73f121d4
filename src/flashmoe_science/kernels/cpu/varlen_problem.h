// What a call of attention over sequences of any lengths asks for, and where its keys lie.
#pragma once

#include "problem.h"

// Mirrored by flashmoe_science.cpu.varlen. Strides are in bytes.
struct VarlenProblem {
    int64_t element_type;
    int64_t heads, kv_heads, head_dim, value_dim;
    int64_t page_size;         // 0: keys are packed
    int64_t query_stride[2];   // token, head
    int64_t key_stride[3];     // page, token, head
    int64_t value_stride[3];
    int64_t out_stride[2];     // token, head
    int64_t window_left, window_right;  // -1: no limit
    int64_t split_keys;        // 0: cut anywhere
    double softmax_scale;
    double softcap;            // 0: none
};

// One call. Addresses are null for what is not there.
struct VarlenCall {
    const char *query, *key, *value;
    char* out;
    float* lse;                // [tokens][heads]
    const int32_t *cu_seqlens_q, *cu_seqlens_k, *block_table, *seqused_k;
    const float *sinks, *alibi_slopes;
    int64_t batch, tokens;
    int64_t keys;              // packed keys, or pages
    int64_t table_row, table_pages;  // elements from row to row of the table; pages in a row
    int64_t alibi_row;         // elements from sequence to sequence; 0: the same for all
    int64_t fault_index, fault_number;  // with a VarlenStatus: which sequence or entry, and what it is
};

// What flashmoe_attention_varlen returns beside Status: an entry of cu_seqlens_q, cu_seqlens_k, seqused_k or block_table is outside
// what it speaks of.
enum VarlenStatus : int { QUERY_FAULT = 3, KEY_FAULT = 4, USED_FAULT = 5, PAGE_FAULT = 6 };

namespace {

// One sequence of a call.
struct Sequence {
    int64_t first_row;    // of query
    int64_t rows, keys;
    int64_t first_key;    // of packed keys
    const int32_t* pages;
    int64_t index;
};

// Rows [first_row, last_row) of the row space that the heads from `head` on share, against keys that lie in `keys`.
struct Task {
    int64_t sequence, head, first_row, last_row;
    int64_t first_key, last_key;
    int64_t part, parts;  // of the keys, each a task of its own
    int64_t sums;         // where the sums of the first of these parts are, in floats
    int64_t space;        // which of the row spaces with several parts this is
};

struct VarlenJob {
    const VarlenProblem* problem;
    const VarlenCall* call;
    float scale;        // what takes a score to a power of two: scores are in units of the scale, or of the cap
    float cap_factor;   // a product times this is the argument of tanh; 0: no cap
    float bias_factor;  // a slope times this is in units of scores
    const Task* tasks;
    int64_t task_count;
    int most_tiles;     // of a task
    float* part_sums;
    int* parts_done;
    int64_t next_task;
    int out_of_memory;
};

// Query heads whose rows share a task: those of a key/value head where there are few rows, else one.
int64_t folded_heads(const VarlenProblem& p, const Sequence& sequence) {
    return sequence.rows < FOLD_QUERIES ? p.heads / p.kv_heads : 1;
}

// Keys [first, last) that the query at this position sees; empty: both 0.
struct Span {
    int64_t first, last;
};
Span visible_to(const VarlenProblem& p, const Sequence& sequence, int64_t row) {
    const int64_t position = row + sequence.keys - sequence.rows;
    const int64_t first = p.window_left < 0 ? 0 : larger<int64_t>(0, position - p.window_left);
    const int64_t last =
        p.window_right < 0 ? sequence.keys : smaller<int64_t>(sequence.keys, position + p.window_right + 1);
    return first < last ? Span{first, last} : Span{0, 0};
}

// What any row of the sequence's rows [first_row, last_row) sees, from the first key of it to the last.
Span visible_to_rows(const VarlenProblem& p, const Sequence& sequence, int64_t first_row, int64_t last_row) {
    // Both ends of what a row sees rise from row to row. With more queries than keys, early rows may see nothing.
    const int64_t ahead = p.window_right < 0 ? sequence.rows : p.window_right;
    const int64_t sees = larger(first_row, -(sequence.keys - sequence.rows + ahead));
    if (sees >= last_row) return {0, 0};
    const Span low = visible_to(p, sequence, sees), high = visible_to(p, sequence, last_row - 1);
    return {low.first, larger(low.last, high.last)};
}

}  // namespace

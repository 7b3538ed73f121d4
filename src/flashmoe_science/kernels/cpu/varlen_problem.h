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
    int64_t chunk;             // a query sees keys of its own chunk of so many alone; 0: of all
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
    const int64_t* tree_mask;  // [tokens]: see Tree
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
    int64_t spaces;       // how many row spaces, one after another; more than 1 only where they have few rows
};

struct VarlenJob {
    const VarlenProblem* problem;
    const VarlenCall* call;
    float scale;        // what takes a score to a power of two: scores are in units of the scale, or of the cap
    float cap_factor;   // a product times this is the argument of tanh; 0: no cap
    float bias_factor;  // a slope times this is in units of scores
    const Task* tasks;
    int64_t task_count;
    int threads;
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
    int64_t first = p.window_left < 0 ? 0 : larger<int64_t>(0, position - p.window_left);
    int64_t last = p.window_right < 0 ? sequence.keys : smaller<int64_t>(sequence.keys, position + p.window_right + 1);
    if (p.chunk > 0) {
        if (position < 0) return {0, 0};
        const int64_t start = position - position % p.chunk;
        first = larger(first, start);
        last = smaller(last, start + p.chunk);
    }
    return first < last ? Span{first, last} : Span{0, 0};
}

// Queries of a sequence that are no row of tokens but a tree, or anything else: bit j of a row's word says whether it sees the
// key of the sequence's query j, within what it sees without. Sequences with more queries than bits have no tree.
constexpr int64_t TREE_QUERIES = 64;
struct Tree {
    int64_t first;   // the key of the sequence's first query; negative with more queries than keys
    uint64_t sees;   // of the keys from there on
    bool hides(int64_t key) const { return key >= first && (key - first >= TREE_QUERIES || !(sees >> (key - first) & 1)); }
};
constexpr Tree NO_TREE = {INT64_MAX, 0};

// That of a row which sees `seen` without it; `seen` becomes empty where nothing is left.
Tree tree_of(const VarlenCall& call, const Sequence& sequence, int64_t row, Span& seen) {
    if (!call.tree_mask || sequence.rows > TREE_QUERIES) return NO_TREE;
    const Tree tree = {sequence.keys - sequence.rows, (uint64_t)call.tree_mask[sequence.first_row + row]};
    int64_t key = seen.first;
    while (key < seen.last && tree.hides(key)) ++key;
    if (key == seen.last) seen = {0, 0};
    return tree;
}

// What any row of the sequence's rows [first_row, last_row) sees, from the first key of it to the last.
Span visible_to_rows(const VarlenProblem& p, const Sequence& sequence, int64_t first_row, int64_t last_row) {
    // Both ends of what a row sees rise from row to row. With more queries than keys, early rows may see nothing.
    const int64_t ahead = p.chunk > 0 ? 0 : p.window_right < 0 ? sequence.rows : p.window_right;
    const int64_t sees = larger(first_row, -(sequence.keys - sequence.rows + ahead));
    if (sees >= last_row) return {0, 0};
    const Span low = visible_to(p, sequence, sees), high = visible_to(p, sequence, last_row - 1);
    return {low.first, larger(low.last, high.last)};
}

}  // namespace

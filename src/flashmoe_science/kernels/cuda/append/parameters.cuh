// What the host passes to `paged_append`: flashmoe_science/varlen/append_arguments.py packs it field by field.
#pragma once
#include "types.cuh"

constexpr int kMostDim = 576;                 // of a row
constexpr float kSmallestScale = 0x1p-100f;   // of a row of zeros

// What a cache's elements are: the rows' type; e4m3 with a scale that is given, or null for 1; e4m3 with a scale for each key and
// head, which is chosen and written.
constexpr int kSameType = 0, kScaleGiven = 1;

// Rows (token, head). Strides in bytes.
struct AppendRows {
    const char* data;
    int64 token, head;
};

struct AppendCache {
    char* data;
    float* scale;
    int64 page, slot, head;                    // strides in bytes
    int64 scale_page, scale_slot, scale_head;  // in elements
    int64 form;
};

struct AppendParameters {
    AppendRows query, key, value;  // query: looked at where there are heads
    AppendCache key_cache, value_cache;
    char* query_out;        // (tokens, heads, head_dim)
    const void* slots;      // (tokens): page * page_size + slot in the page; negative: the row is not written
    const void* positions;  // (tokens)
    const void* cos_sin;    // (rows, rotary_dim): cosines, then sines; null: nothing is rotated
    const void* query_norm;  // (head_dim); null: no norm
    const void* key_norm;
    int64 cos_sin_row;  // stride in elements
    int64 cos_sin_rows;
    int tokens;
    int heads;  // of the query; 0: there is none
    int kv_heads, head_dim, value_dim, rotary_dim, page_size;
    int interleaved;                                    // pairs are neighbours, else halves of what is rotated
    int wide_slots, wide_positions;                     // 1: int64, 0: int32
    int float_cos_sin, float_query_norm, float_key_norm;  // 1: float32, 0: the elements' type
    float eps;
};

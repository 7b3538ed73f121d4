// What one call asks for, how it is divided, and what a thread works with.
#pragma once

#include "python_call.h"
#include "vector.h"

// Mirrored by flashmoe_science.cpu. Strides are in bytes, for (batch, head, row).
struct AttentionProblem {
    int64_t element_type;
    int64_t batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim;
    int64_t query_stride[3], key_stride[3], value_stride[3], out_stride[3];
    int64_t causal;
    double softmax_scale;
};

namespace {

constexpr int up_to_multiple(int64_t x, int of) { return (int)((x + of - 1) / of * of); }

// As many queries as one pass of the products keeps in registers: a tile's queries, scores and output are then contiguous.
constexpr int TILE_QUERIES = MAX_COLUMNS * W;
// The same of attention_forward.cpp, where there are many queries.
constexpr int WIDE_TILE_QUERIES = WIDE_COLUMNS * W;
constexpr int BLOCK_KEYS = 64;
// Queries that share a prepared block of keys, at most, and where threads leave it open, at least.
constexpr int MAX_TASK_QUERIES = 256;
constexpr int MIN_TASK_QUERIES = 64;
constexpr int MAX_TASK_TILES = MAX_TASK_QUERIES / W;
// The same of attention_forward.cpp, where the second-level cache has room for so many.
constexpr int MAX_DENSE_TASK_QUERIES = 1024;
constexpr int MAX_DENSE_TASK_TILES = larger(MAX_TASK_TILES, MAX_DENSE_TASK_QUERIES / TILE_QUERIES);
constexpr int64_t USUAL_CACHE = 512 << 10;
// What it takes to read and prepare a block of keys, in queries: about as long as the products of so many with it.
constexpr int QUERIES_PER_BLOCK = 16;
// Below this many queries the heads of a group share row spaces.
constexpr int FOLD_QUERIES = 64;
// Longest run of products summed in one register: a longer head dimension is summed in parts, for accuracy.
constexpr int MAX_DEPTH = 128;
// Where there are so few keys that each one's rounding shows, and time goes elsewhere.
constexpr int FEW_KEYS = 16;
constexpr int MAX_DEPTH_FEW_KEYS = 16;
// Rows of several heads may share keys: reading those is what takes time, and PyTorch sums the products of so few rows
// in vectors, lane by lane.
constexpr int FEW_ROWS = 3;
constexpr int MAX_DEPTH_FEW_ROWS = 16;
// Wide tiles: below so many rows in a row space many would not be full, below so many in all there would be too few for threads.
constexpr int MIN_WIDE_ROWS = 96;
constexpr int MIN_WIDE_QUERIES = 1024;
constexpr double LOG2_E = 1.4426950408889634;
constexpr int64_t NO_DIAGONAL = INT64_MAX / 4;

struct Job {
    const AttentionProblem* problem;
    const char *query, *key, *value;
    char* out;
    float* lse;
    float scale;          // |softmax_scale| * log2(e); 1 for a softmax_scale of 0
    float query_factor;   // softmax_scale's sign, 1, -1 or 0: it goes into the queries
    bool causal;
    int64_t fold;         // query heads whose rows share one row space: 1, or the group size
    int64_t rows;         // rows in one row space: fold * seqlen_q
    int64_t row_spaces;
    bool few;             // rows are so few that they take decode.h's way
    int tile_queries;     // a multiple of W
    int task_tiles;
    bool integers;        // products of 16-bit integers, where a block's numbers allow it
    bool wide;            // whole tiles have WIDE_TILE_QUERIES, not TILE_QUERIES
    int64_t tasks_per_space;
    int64_t tasks;
    int64_t parts;        // of the keys, each a task; 1: they are not split
    int64_t part_keys;
    float* part_sums;     // [row_spaces][parts]
    int* parts_done;      // [row_spaces]
    int64_t next_task;
    int out_of_memory;
};

// A tile's queries as 16-bit integers, see integer_tile.h.
struct IntegerQueries {
    float *pairs, *unit;  // [head_dim / 2][ld], [ld]: what an integer stands for
    float squares;        // of the longest row's length
    float errors;         // the square of what rounding takes from a row, at most, as a length
    int misses;           // blocks in a row that were left to fp32 numbers
};

struct Tile {
    int64_t first_row;
    int rows;
    int64_t keys;      // keys that its last row sees
    int64_t diagonal;  // the last key that row 0 sees, and row i sees i more; NO_DIAGONAL without a mask
    float *query, *out, *maximum, *sum;  // [head_dim][ld], [head_dim][ld], [ld], [ld]
    const char* query_row[WIDE_TILE_QUERIES];
    char* out_row[WIDE_TILE_QUERIES];
    IntegerQueries integers;
};

// A block's keys and values as 16-bit integers, see integer_tile.h.
struct IntegerBlock {
    int16_t* key;        // [BLOCK_KEYS][head_dim]
    float* value;        // [BLOCK_KEYS / 2][head_dim], pairs
    float* value_unit;   // [head_dim]: what an integer times a weight stands for
    float key_unit;
    float key_squares;   // of the longest key's length
    float key_errors;    // the square of what rounding takes from a key, at most, as a length
};

// What tiles of a task share.
struct Shared {
    float *scores, *pairs, *rescale, *block_max, *key, *value;
};

struct Workspace : Shared {
    Tile tile[MAX_DENSE_TASK_TILES];
    IntegerBlock integers;
    float* gain;  // [ld]: the factor of this block's sums, as `rescale` is that of those before
};

// Keys [first, first + count) as the products read them.
struct KeyBlock {
    int64_t first;
    int count;
    const char *key, *value;
    ptrdiff_t key_row, value_row;
    const char* raw_value;
    bool on_amx;  // values are transposed for the matrix unit, see amx.h
};

}  // namespace

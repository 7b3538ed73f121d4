// What the host passes to the Hopper kernel for sequences of any lengths, and the compile-time shape of it.
#pragma once

#include "hopper/shape.cuh"
#include "ptx/tma.cuh"
#include "types.cuh"
#if TREE
#include "tree.cuh"
#endif

namespace hopper {

// Macros from the configuration (configs/): HEAD_DIM, VALUE_DIM, CONSUMERS, BLOCK_N, K_STAGES, V_STAGES, Q_STAGES,
// PING_PONG, SECTION_MIB, CAUSAL, LEFT_WINDOW, SOFTCAP, PAGED, PAGE_ROWS; and CHUNK or TREE, or neither.
//
// GATHER: keys and values are copied row by row, as pages are no multiple of 8.
// LAST_ROWS: so many of each block a third warp copies, of keys and of values, whose own work another has; 0 with trees, as what
// nobody sees is taken out of all rows at once.
#define GATHER (PAGED && PAGE_ROWS == 1)
#if GATHER && !TREE
#define LAST_ROWS (BLOCK_N / 4)
#else
#define LAST_ROWS 0
#endif

constexpr int BOXES = PAGED ? BLOCK_N / PAGE_ROWS : 1;  // boxes of a panel of a block, each in a page
static_assert(!PAGED || BOXES * PAGE_ROWS == BLOCK_N, "a block is a number of boxes");

// Registers per thread after reallocation. The sum over all warps must fit what the launch got: 168 each for three
// warpgroups, 128 each for four. Producers look sequences and pages up and take more than those of the dense kernel, and more still
// where they copy rows and the consumers can spare them.
constexpr bool MANY_ADDRESSES = GATHER && HEAD_DIM <= 128;
constexpr int PRODUCER_REGISTERS = CONSUMERS == 3 ? 32 : MANY_ADDRESSES ? 56 : 40;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 3 ? 160 : MANY_ADDRESSES ? 224 : 232;
static_assert(CONSUMERS > 1, "two or three consumer warpgroups");
static_assert(PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <= (CONSUMERS == 3 ? 4 * 128 : 3 * 168),
              "register pool exceeded: setmaxnreg.inc would wait for ever");

// Where rows lie that no box of TMA fits, in the place of a tensor map.
struct alignas(64) RowMap {
    const char* start;
    int64 page, token, head;  // strides in bytes
    int chunks;               // of 16 bytes of a row
    char unused[sizeof(ptx::TensorMap) - 36];
};
#if GATHER
using KeyMap = RowMap;
#else
using KeyMap = ptx::TensorMap;
#endif

struct Parameters {
    ptx::TensorMap query;  // (head_dim, heads of a slice, tokens, slices)
    KeyMap key;            // (head_dim, rows, key heads, 1), or (head_dim, slots of a page, key heads, pages)
    KeyMap value;
    uint16* output;
    float* lse;               // (tokens, heads), or null
    int* ticket;              // zero before and after every launch
    const int* query_starts;  // (batch + 1): first row of each sequence
    const int* key_starts;    // (batch + 1): the same of packed keys
    const int* key_counts;    // (batch): keys of each sequence; null: by key_starts
    const int* page_table;    // (batch, any)
    const float* sinks;       // (heads), or null
    int64 table_row;          // stride of the table's rows
    int batch;
    int tokens;  // rows of the query; those of no sequence become zeros
    // All that follows is the same in all calls of a plan.
    int64 output_row;  // strides in elements
    int64 output_head;
    int slices;        // what a tile's rows are of: heads, or key heads whose query heads share a tile
    int heads_shift;   // log2 of the heads of a slice
    int group;         // slices per key head
    int window_left;   // keys before a row's position that it sees; read with LEFT_WINDOW
    int window_right;  // after it; read with CAUSAL
    int most_blocks;   // of keys that a tile's window can touch
    int value_dim;
    uint32 page_multiplier, page_shift;  // key / page size is umulhi(2 key, multiplier) >> shift
    int page_size;
    float scale_log2;    // softmax scale times log2(e)
    float softcap_log2;  // softcap times log2(e)
    float softcap_rate;  // 2 * softmax scale * log2(e) / softcap
#if CHUNK || TREE
    int chunk;                             // keys of a chunk; a row sees those of its own
    uint32 chunk_multiplier, chunk_shift;  // position / chunk, as above
#endif
#if TREE
    const uint64* tree_mask;  // (tokens): see tree.cuh; it may differ between calls
#endif
};

}  // namespace hopper

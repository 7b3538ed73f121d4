// What the host passes to the decode kernel, and the compile-time shape of it.
#pragma once
#include "types.cuh"

namespace {

constexpr int kTileKeys = 16;
constexpr int kRows = 8 * ROW_TILES;
constexpr int kChunks = (HEAD_DIM + 31) / 32;          // of 32 dims of a key: the dims of two k-steps of Q K^T
constexpr int kDimGroups = (VALUE_DIM + 63) / 64;      // of 64 dims of a value: four m-tiles of O^T
constexpr int kQuads = 4 * ROW_TILES * kDimGroups;     // float4 that a lane holds of the output
constexpr int kShares = (kQuads + WARPS - 1) / WARPS;  // of them, finished by one warp
constexpr int kPass = WARPS * KEY_TILES;               // key tiles that a block goes through at a time
constexpr int kUnlimited = 1 << 30;                    // a window's side that hides nothing

static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM >= 8, "HEAD_DIM must be a multiple of 8");
static_assert(VALUE_DIM % 8 == 0 && VALUE_DIM >= 8, "VALUE_DIM must be a multiple of 8");

}  // namespace

// What one block leaves of a quad of all lanes for the warp that combines the blocks.
struct Partial {
    float4 sums[32];
    float2 statistics[4];  // of the rows of lanes 0 to 3, which are those of all
};

// Keys or values: strides in bytes.
struct Cache {
    uint64 page, head;
    uint32 row;
};

struct Parameters {
    const char* query;
    const char* key;
    const char* value;
    char* output;
    float* lse;               // (tokens, heads), or null
    const int* query_starts;  // (batch + 1)
    const int* key_starts;    // (batch + 1), or null where keys lie in pages
    const int* key_lengths;   // (batch), or null: all keys between key_starts
    const int* pages;         // (batch, any): the page table, or null
    const float* sinks;       // (heads), or null
    const float* slopes;      // (batch, heads), or null
    Partial* partials;        // [slot][quad]
    uint32* arrivals;         // [block][warp]: zero before and after a launch
    int64 pages_row;          // stride of the table's rows
    int64 slopes_row;         // 0: the same slopes for all sequences
    int tokens;               // rows of query and output; those of no sequence become zero
    int batch;
    // All that follows is the same in all calls of a plan.
    uint64 query_row, query_head, output_row, output_head;  // strides in bytes
    Cache key_strides, value_strides;
    int kv_heads;
    int group;                // query heads per key/value head
    uint32 group_magic;       // floor(2^32 / group) + 1
    int page_size;
    int left, right;          // of the window; kUnlimited
    int split_tiles;          // partial sums begin at each multiple of so many tiles; 0: anywhere
    float scale_log2;         // softmax scale * log2(e)
    float softcap_log2;       // cap * log2(e)
    float softcap_scale;      // 2 * log2(e) * softmax scale / cap
};

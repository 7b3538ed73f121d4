// What the host passes to the small-shape kernel, and the compile-time shape of it.
#pragma once
#include "types.cuh"

namespace {

constexpr int kRows = 8 * ROW_TILES;
constexpr int kChunks = (HEAD_DIM + 31) / 32;       // of 32 dims: the dims of two k-steps of Q K^T
constexpr int kDimGroups = (HEAD_DIM + 63) / 64;    // of 64 dims: four m-tiles of O^T
constexpr int kQuads = 4 * ROW_TILES * kDimGroups;  // float4 that a lane holds of the output
constexpr int kShares = (kQuads + CLUSTER - 1) / CLUSTER;  // of them, finished by one block of the cluster
constexpr int kStep = WARPS * CLUSTER;              // key tiles between two tiles of one warp, times the splits

static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM >= 8, "HEAD_DIM must be a multiple of 8");

}  // namespace

struct Tensor {
    uint64 batch, head;  // strides in bytes
    uint32 row;
};

#if SPLIT
// What one split leaves of a quad of all lanes for the warp that combines the splits.
struct Partial {
    float4 sums[32];
    float2 statistics[4];  // of the rows of lanes 0 to 3, which are those of all
};
#endif

struct Parameters {
    const char* query;
    const char* key;
    const char* value;
    char* output;
    float* lse;  // (batch, heads, seqlen_q), or null
    Tensor query_strides, key_strides, value_strides, output_strides;
    int seqlen_q;
    int seqlen_k;
    int past;            // query i sees keys j <= i + past; 2^30 without a causal mask
    int group;           // query heads per key/value head
    uint32 group_magic;  // floor(2^32 / group) + 1
    float scale_log2;    // softmax scale * log2(e)
    int head_dim;        // at most HEAD_DIM; read if PADDED
#if SPLIT
    Partial* partials;  // [set of query rows][quad][split]
    uint32* arrivals;   // [set of query rows][block of the cluster][warp]: zero before and after a launch
    int splits;         // clusters that share the keys of one set of rows
    int row_blocks;     // sets of query rows of one key/value head
#endif
};

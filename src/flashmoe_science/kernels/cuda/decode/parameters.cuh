// What the host passes to the decode kernel, and the compile-time shape of it.
#pragma once
#include "types.cuh"
#if TREE
#include "tree.cuh"
#endif
#ifndef CLUSTER
#define CLUSTER 1
#endif
#ifndef PARTS
#define PARTS 1
#endif
#ifndef MIXED
#define MIXED 0
#endif
#ifndef ONLY  // of both kernels: 1, sequences of more than one token are another launch's; 2, those of one are
#define ONLY 0
#endif
#ifndef TILE_KEYS
#define TILE_KEYS 16
#endif
#ifndef PASS_TILES
#define PASS_TILES (WARPS * KEY_TILES)
#endif

#ifndef MORE_REGISTERS
#define MORE_REGISTERS 0
#endif

namespace {

constexpr int kTileKeys = TILE_KEYS;
constexpr int kRows = 8 * ROW_TILES;
constexpr int kChunks = (HEAD_DIM + 31) / 32;          // of 32 dims of a key: the dims of two k-steps of Q K^T
constexpr int kDimGroups = (VALUE_DIM + 63) / 64;      // of 64 dims of a value: four m-tiles of O^T
constexpr int kQuads = 4 * ROW_TILES * kDimGroups;     // float4 that a lane holds of the output
constexpr int kShares = (kQuads + WARPS - 1) / WARPS;  // of them, finished by one warp
constexpr int kPass = PASS_TILES;                      // key tiles that a block goes through at a time
constexpr int kMerges = VALUE_DIM <= 128 && WARPS * kQuads <= 64 ? 2 : 1;  // segments whose results warps may be merging at a time
// Quads of which a warp loads partial results at a time, and how many of each; more take more registers, and spill.
constexpr int kQuadsTogether =
    (MORE_REGISTERS || (ROW_TILES == 2 && PAGES < 2 && DEPENDENT)) && kQuads % (2 * WARPS * PARTS) == 0 ? 2 : 1;
constexpr int kTogether = VALUE_DIM <= 64 || VALUE_DIM > 128 || WARPS > 8 || (ROW_TILES > 2 && WARPS < 8) ||
                                  (kQuadsTogether > 1 && !MORE_REGISTERS)
                              ? 8
                              : 16;
constexpr int kPieceBytes = CACHE == 0 ? 16 : 8;       // of eight elements of a key or value
#if PAIRS
// Two neighbours of a lane's pieces lie together in the row, so that one load of 16 bytes has both.
constexpr bool kKeyPairs = HEAD_DIM % 64 == 0, kValuePairs = VALUE_DIM % 128 == 0;
#else
constexpr bool kKeyPairs = false, kValuePairs = false;
#endif

// The first dim of the piece that lane `lane` of `Lanes` has of group `group` of 8 * Lanes dims.
template <bool Pairs, int Lanes>
__device__ __forceinline__ constexpr int first_dim(int group, int lane) {
    return Pairs ? 16 * Lanes * (group / 2) + 16 * lane + 8 * (group % 2) : 8 * (Lanes * group + lane);
}
constexpr int kUnlimited = 1 << 30;                    // a window's side that hides nothing
#if TREE
constexpr int kTreeTiles = kTreeQueries / kTileKeys + 1;  // that the keys of a tree can lie in
#endif

static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM >= 8, "HEAD_DIM must be a multiple of 8");
static_assert(VALUE_DIM % 8 == 0 && VALUE_DIM >= 8, "VALUE_DIM must be a multiple of 8");

}  // namespace

// What one block leaves of a set for those that combine the blocks: for each quad the sums of 32 lanes of fragments, of which the i-th
// thread of a warp has the i-th when results meet.
struct Partial {
    float4 sums[kQuads][32];
    float2 statistics[kQuads][4];  // of the rows of lanes 0 to 3, which are those of all

    // With one tile of rows, of which a set often has half, what is one row's lies together: whole lines are left out. Of more rows
    // a call of four tokens was 1 % faster in the order of lanes.
    static constexpr bool BY_ROWS = ROW_TILES == 1;
    __device__ __forceinline__ static int lane_of(int i) { return BY_ROWS ? i % 8 * 4 + i / 8 : i; }
    __device__ __forceinline__ static int place_of(int lane) { return BY_ROWS ? lane % 4 * 8 + lane / 4 : lane; }
};

// Keys or values: strides in bytes.
struct Cache {
    uint64 page, head;
    uint32 row;
};

// Of e4m3 keys or values: how far it is, in elements, to the scale of the next page, head and key; 0 where they share one.
struct Scales {
    int64 page, head, row;
};

// x / divisor is umulhi(2 x, multiplier) >> shift, for x below 2^31.
struct Division {
    uint32 multiplier, shift;
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
    const float* key_scales;  // of e4m3 keys, or null: 1
    const float* value_scales;
    Partial* partials;        // [slot]; behind two slots a block, with TOGETHER, a word for each of its warps
    uint32* arrivals;         // [2][block][warp]: zero before and after a launch
    int64 pages_row;          // stride of the table's rows
    int64 slopes_row;         // 0: the same slopes for all sequences
    int tokens;               // rows of query and output; those of no sequence become zero
    int batch;
    // All that follows is the same in all calls of a plan.
    uint64 query_row, query_head, output_row, output_head;  // strides in bytes
    Cache key_strides, value_strides;
    Scales key_scale_strides, value_scale_strides;
    int kv_heads;
    int group;                // query heads per key/value head
    int page_size;
    Division by_teams, by_group, by_page;  // by_teams: by how many there are
    int left, right;          // of the window; kUnlimited
    int split_tiles;          // partial sums begin at each multiple of so many tiles; 0: anywhere
    float scale_log2;         // softmax scale * log2(e)
    float softcap_log2;       // cap * log2(e)
    float softcap_scale;      // 2 * log2(e) * softmax scale / cap
    int team;                 // blocks that go through the same keys, each for its heads; divides kv_heads and the grid
    Division by_team;
#if CHUNK || TREE
    int chunk;                // keys of a chunk; a query sees those of its own
    Division by_chunk;
#endif
#if TREE
    const uint64* tree_mask;  // (tokens); it may differ between calls
#endif
};

namespace {

__device__ __forceinline__ int divide(int x, const Division& by) {
    return static_cast<int>(__umulhi(2 * static_cast<uint32>(x), by.multiplier) >> by.shift);
}

// Strides and indices have 32 bits, their product 64.
__device__ __forceinline__ uint64 offset_of(int index, uint32 stride) {
    return static_cast<uint64>(static_cast<uint32>(index)) * stride;
}

// The first key that a query at this position sees, if any, and one past the last: what neither a segment nor a sequence bounds.
// Both rise with the position. Before a sequence's first key there is a chunk without keys.
__device__ __forceinline__ int begin_of_seen(const Parameters& p, int position) {
    int begin = position - p.left;
#if CHUNK
    if (position >= 0) begin = max(begin, divide(position, p.by_chunk) * p.chunk);
#endif
    return begin;
}

__device__ __forceinline__ int end_of_seen(const Parameters& p, int position) {
    int end = position + p.right + 1;
#if CHUNK
    end = position < 0 ? 0 : min(end, (divide(position, p.by_chunk) + 1) * p.chunk);
#endif
    return end;
}

// softcap * tanh(scale * x / softcap) in units of log2. 1 - 2 / (1 + exp(2 y)) is tanh(y), to float32's precision of 1.
__device__ __forceinline__ float capped(float x, const Parameters& p) {
    return p.softcap_log2 * (1.0f - 2.0f * reciprocal(1.0f + exp2_approx(x * p.softcap_scale)));
}

}  // namespace

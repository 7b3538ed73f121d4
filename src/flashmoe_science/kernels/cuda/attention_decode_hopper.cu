// Attention of few query rows over a cache whose lengths lie in device memory, for Hopper (sm_90a): docs/kernels/decode-hopper.md.
//
// The work is that of attention_decode.cu: equal shares of all keys (decode/schedule.cuh), sets of rows that blocks share
// (decode/results.cuh). Here TMA, or threads where pages are small, bring keys and values to shared memory. wgmma multiplies them, 64
// query rows at a time whatever their number, so that 64 rows take as long as one. Two warpgroups take the tiles of 64 keys in
// turns, each with a softmax of its own.
//
// Macros, all integers:
//   HEAD_DIM, VALUE_DIM  64 or 128
//   ELEMENT_BF16, QUERY_BF16, MMA_K  as in attention_decode.cu
//   ROW_TILES      query rows of a set / 8, at most 8
//   STAGES         tiles of keys, and of values, that there is room for
//   PAGES          0: keys of a sequence lie one after another; 1: in pages; 2: each key is looked up
//   BOX_ROWS       rows that TMA loads at a time: they lie in one page; with PAGES 2 there is no TMA
//   SCORE_CHANGES  1: scores may have a soft cap
//   CHUNK          as in attention_decode.cu
//   DEPENDENT      1: launched with programmatic stream serialization. It does not let its successor start early: beside a block
//                  of this one there is no room for another
//   TOGETHER       1: blocks that share a set finish it together, where they are many; may be left out
//   PARTS          blocks of a cluster that go through the same segments, each through a part of the keys; may be left out
#define WARPS 8
#define KEY_TILES 1
#define TILE_KEYS 64
#define PASS_TILES 2
#define CACHE 0
#define MORE_REGISTERS 1
#if ELEMENT_BF16
#define WGMMA_TYPES "bf16.bf16"
#else
#define WGMMA_TYPES "f16.f16"
#endif
#define BLOCK_N TILE_KEYS
#define CONSUMERS 2

#include "decode_hopper/block.cuh"

struct HopperParameters {
    Maps maps;
    Parameters rest;
};

#if PARTS > 1
#define CLUSTER_SHAPE __cluster_dims__(PARTS, 1, 1)
#else
#define CLUSTER_SHAPE
#endif

extern "C" __global__ void CLUSTER_SHAPE __launch_bounds__(kThreads, 1)
    attention_decode_hopper(const __grid_constant__ HopperParameters parameters) {
    extern __shared__ unsigned char raw[];
    __shared__ Segment segments[kSlots];
    __shared__ Meeting meetings[kSlots];
    __shared__ Cursor cursor[1];
    __shared__ float2 statistics[kRows][kConsumers];
    go_through_share(parameters.rest, parameters.maps, raw, Work{segments, meetings, cursor, statistics}, workers());
}

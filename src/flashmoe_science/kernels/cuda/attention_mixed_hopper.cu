// Attention over a batch of prompts and of decode steps in one launch, for Hopper (sm_90a): docs/kernels/mixed-hopper.md.
//
// Prompts keep the tensor cores busy, and caches memory. So some blocks go through the caches of sequences with few rows, as
// attention_decode_hopper.cu does, and the others through the tiles of all other sequences, as attention_hopper_varlen.cu does. How
// many, each block counts from the lengths.
//
// Macros, all integers: those of attention_hopper_varlen.cu, without TREE, and with CONSUMERS 2; of attention_decode_hopper.cu
// ROW_TILES, STAGES, PAGES, BOX_ROWS, SCORE_CHANGES, QUERY_BF16 and the NATIVE ones; and
//   MIXED  8 * ROW_TILES: sequences with so many packed rows or fewer are few
#define WARPS 8
#define KEY_TILES 1
#define TILE_KEYS BLOCK_N
#define PASS_TILES 2
#define CACHE 0
#define MORE_REGISTERS 1
#define DEPENDENT 0
#if ELEMENT_BF16
#define WGMMA_TYPES "bf16.bf16"
#else
#define WGMMA_TYPES "f16.f16"
#endif

#include "decode_hopper/block.cuh"
#include "hopper_varlen/block.cuh"

static_assert(MIXED == kRows, "all rows of a sequence with few are one set");
static_assert(kThreads == hopper::THREADS, "blocks of one grid");

struct MixedParameters {
    hopper::Parameters many;
    Maps maps;
    Parameters few;
};

namespace {

// Times of a block of BLOCK_N keys, over that of one for a tile of a prompt's rows. Of few rows it takes the whole GPU's memory so
// long for each multiprocessor, and one multiprocessor alone so long.
constexpr float kMemory = 1.28f, kAlone = 0.68f;

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
}

// All lanes of a warp: how many of the grid's blocks are for few rows. All blocks find the same.
__device__ __forceinline__ int blocks_of_few(const MixedParameters& p, int lane) {
    float few = 0.0f, many = 0.0f;
    for (int i = lane; i < p.few.batch; i += 32) {
        const int queries = p.few.query_starts[i + 1] - p.few.query_starts[i];
        if (queries == 0) continue;
        if (!is_others(p.few, queries)) {
            few += 1 + Extent(p.few, i).tiles;  // a row without keys is written, too
            continue;
        }
        const hopper::Sequence sequence(p.many, i);
        const int most = sequence.most_blocks(p.many);
        const int least = CAUSAL ? min(most, max(0, sequence.keys - sequence.tokens) / BLOCK_N + 1) : most;
        many += 0.5f * (least + most) * sequence.tiles(p.many);
    }
    few = sum_of_warp(few) * p.few.kv_heads;
    many = sum_of_warp(many) * p.many.slices;
    const int grid = static_cast<int>(gridDim.x), team = p.few.team;
    if (few == 0.0f) return 0;
    if (many == 0.0f) return grid / team * team;
    const float whole = max(kMemory * few, kAlone * few + many);  // of all multiprocessors
    const int of_many = static_cast<int>(grid * (many / whole)) + 1;
    return max(team, min(grid - of_many, grid - 1) / team * team);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_mixed_hopper(const __grid_constant__ MixedParameters parameters) {
    extern __shared__ unsigned char raw[];
    __shared__ Segment segments[kSlots];
    __shared__ Meeting meetings[kSlots];
    __shared__ Cursor cursor[1];
    __shared__ float2 statistics[kRows][kConsumers];
    __shared__ int of_few[1];
    if (threadIdx.x < 32) {
        const int count = blocks_of_few(parameters, threadIdx.x);
        if (threadIdx.x == 0) of_few[0] = count;
    }
    __syncthreads();
    // In turns: neighbours share a way to memory, and where all of them read caches they would be the last.
    const int grid = static_cast<int>(gridDim.x), count = of_few[0], index = static_cast<int>(blockIdx.x);
    const int number = index * count / grid;  // of this block, if it is for few rows
    if ((index + 1) * count / grid > number) {
        if (threadIdx.x == 0) number_of_worker() = number;
        __syncthreads();
        go_through_share(parameters.few, parameters.maps, raw, Work{segments, meetings, cursor, statistics}, count);
    } else {
        hopper::go_through_tiles(parameters.many, raw, index - number, grid - count);
    }
}

// What the host passes to the two-pass kernels of attention's backward pass, and what both have in common: tiles of 64 rows, as
// panels of 64 columns, and a producer warp beside two consumer warpgroups.
#pragma once

#include "hopper/ring.cuh"
#include "mma/descriptor.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "racecheck.cuh"
#include "types.cuh"

namespace two_pass {

using hopper::Ring;

constexpr int WARPGROUP = 128;
constexpr int ROWS = 64;  // of a tile, of queries or keys: wgmma's M
constexpr int CONSUMERS = 2;
constexpr int THREADS = WARPGROUP * (CONSUMERS + 1);
constexpr int PANELS = HEAD_DIM / 64;
constexpr uint32 PANEL_BYTES = ROWS * panel::ROW_BYTES;
constexpr uint32 TILE_BYTES = PANELS * PANEL_BYTES;

constexpr int PRODUCER_REGISTERS = 24;
constexpr int CONSUMER_REGISTERS = 240;
static_assert(PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <= 3 * 168,
              "register pool exceeded: setmaxnreg.inc would wait for ever");

struct Parameters {
    ptx::TensorMap query;
    ptx::TensorMap key;
    ptx::TensorMap value;
    ptx::TensorMap grad_output;
    uint16* grad_query;
    uint16* grad_key;
    uint16* grad_value;
    const float* lse;    // (batch * num_heads, statistic_rows), in log2; +inf where a row takes no part
    const float* delta;  // the same shape
    float scale;         // softmax scale
    float scale_log2;    // times log2(e)
    int seqlen_q;
    int seqlen_k;
    int num_heads;
    int num_kv_heads;
    int batch;
    int statistic_rows;  // a multiple of 128
    int head_dim;
    int section;         // heads that are worked on side by side
    int64 grad_query_stride[3];  // of batch, head and row, in elements
    int64 grad_key_stride[3];
    int64 grad_value_stride[3];
};

// Which block of rows of which head a thread block works on.
struct Job {
    int block;
    int head;  // batch * heads + head
};

// Sections of heads go through their blocks with all their heads side by side, so that what they read stays in L2. Under a
// causal mask the first blocks are the longest. Where there are many, an eighth of the blocks is worked off for all sections before
// the next, so that the blocks that end the grid are short, whichever head they are of; where there are few, reading keys or
// queries once for each part would cost more.
__device__ __forceinline__ Job job_of(int index, int blocks, int heads, int section, int rows_per_block) {
    constexpr int PARTS = 8;
    constexpr int ROWS_IN_ONE_PART = 2048;
    const bool divided = CAUSAL && blocks > ROWS_IN_ONE_PART / rows_per_block;
    const int per_part = divided ? (blocks + PARTS - 1) / PARTS : blocks;
    const int first = index / (per_part * heads) * per_part;
    const int count = min(per_part, blocks - first);
    const int in_part = index - first * heads;
    const int begin = in_part / (section * count) * section;
    const int rest = in_part - begin * count;
    const int wide = min(section, heads - begin);
    Job job;
    job.block = first + rest / wide;
    job.head = begin + rest % wide;
    return job;
}

__device__ __forceinline__ void load_tile(const ptx::TensorMap& map, uint32 destination, uint32 full, uint64 policy, int row,
                                          int head, int batch) {
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel) {
        ptx::tma_load(map, destination + panel * PANEL_BYTES, full, policy, panel * panel::PANEL_COLUMNS, row, head, batch);
    }
}

constexpr uint32 WARPGROUP_ARRIVALS = RACECHECK ? WARPGROUP : WARPGROUP / 32;

// Marks something that the whole warp is done with.
__device__ __forceinline__ void release(uint32 barrier) {
    __syncwarp();
    if (RACECHECK || threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
}

}  // namespace two_pass

// One product of a mixture of experts for a few tokens an expert, by slots, as in moe_few_split.cu, but every warp of a block
// has M_TILES tiles of its own, over the whole inner dimension. The columns of tokens are copied by all warps for all warps,
// which takes a barrier for each stage: for so many tokens that their rows should be copied once for many rows of weights.
//
// Macros: those of moe_few_split.cu.
#include "moe/few_bias.cuh"
#include "moe/few_operands.cuh"
#include "moe/few_parameters.cuh"
#include "moe/few_routing.cuh"
#include "ptx/dependent_launch.cuh"
#include "ptx/ldmatrix.cuh"

constexpr int kUnitTiles = WARPS * M_TILES;
constexpr int kTokenSlots = N_TILES * K_STEPS;                         // of a stage: [tile][step]
constexpr int kOwnSlots = (kTokenSlots + WARPS - 1) / WARPS;           // that one warp copies
constexpr int kStageBytes = WARPS * kWeightBytes + kTokenSlots * kSlotBytes;
constexpr int kRingBytes = STAGES * kStageBytes;
constexpr int kAhead = STAGES - 1;

static_assert(Routing::kScratchBytes <= kRingBytes, "the ring lends its place to the sort");
static_assert(!DIRECT, "every group has rows");
static_assert(STAGES >= 2, "one stage is multiplied while another arrives");

// Where the next copy comes from.
struct Cursor {
    int unit, chunk, tiles;
    const char* weights;
    const char* row[kOwnSlots];

    __device__ __forceinline__ void enter(const Parameters& p, const Routing& routing, int units, int warp) {
        if (unit >= units) return;
        const Group group = routing.group(unit / p.slabs);
        const int first_tile = unit % p.slabs * kUnitTiles + warp * M_TILES;
        tiles = min(p.tiles - first_tile, M_TILES);
        weights = weights_at(p, group.expert, first_tile);
#pragma unroll
        for (int i = 0; i < kOwnSlots; ++i) {
            const int slot = warp + i * WARPS;
            const int column = 8 * (slot / K_STEPS) + static_cast<int>(threadIdx.x % 32) / 4;
            row[i] = slot < kTokenSlots && column < group.rows ? row_at(p, routing.slot(group.first + column)) : nullptr;
        }
    }

    __device__ __forceinline__ void copy_tokens(const Parameters& p, uint32 stage, int warp) const {
#pragma unroll
        for (int i = 0; i < kOwnSlots; ++i) {
            const int slot = warp + i * WARPS;
            if (row[i] != nullptr)
                copy_row(p, stage + WARPS * kWeightBytes + slot * kSlotBytes, row[i], chunk * K_STEPS + slot % K_STEPS);
        }
    }

    __device__ __forceinline__ void advance(const Parameters& p, const Routing& routing, int units, int chunks, int warp) {
        if (++chunk < chunks) return;
        chunk = 0;
        unit += gridDim.x;
        enter(p, routing, units, warp);
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1) moe_few_tiles(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(1024) char shared_memory[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#if DEPENDENT && !SECOND
    wait_for_predecessor();
    allow_successor();
#endif
    const Routing routing(p, shared_memory + kRingBytes, shared_memory);
    const int units = routing.groups * p.slabs;
    const int chunks = (p.inner + K_STEPS * kStepElements - 1) / (K_STEPS * kStepElements);
    const uint64 policy = evict_first_policy();
    const uint32 ring = shared_address(shared_memory) + lane * kChunkBytes;

    // Weights of the first stages, then the tokens' rows of the same.
    Cursor next;
    next.unit = blockIdx.x;
    next.chunk = 0;
    next.enter(p, routing, units, warp);
    Cursor late = next;
#pragma unroll
    for (int s = 0; s < kAhead; ++s)
        if (next.unit < units) {
            copy_weights(p, ring + s * kStageBytes + warp * kWeightBytes, next.weights, next.tiles, next.chunk, policy);
            next.advance(p, routing, units, chunks, warp);
        }
#if DEPENDENT && SECOND
    wait_for_predecessor();
    allow_successor();
#endif
#pragma unroll
    for (int s = 0; s < kAhead; ++s) {
        if (late.unit < units) {
            late.copy_tokens(p, ring + s * kStageBytes, warp);
            late.advance(p, routing, units, chunks, warp);
        }
        copy_commit();
    }

    uint32 stage = ring, free = ring + kAhead * kStageBytes;
    const auto following = [&](uint32 at) { return at == ring + kAhead * kStageBytes ? ring : at + kStageBytes; };
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
        const Group group = routing.group(unit / p.slabs);
        const int first_tile = unit % p.slabs * kUnitTiles + warp * M_TILES;
        Accumulators sums;
        clear(sums);
        for (int chunk = 0; chunk < chunks; ++chunk) {
            copy_wait<kAhead - 1>();
            __syncthreads();  // the stage has arrived for all, and all have left the one that is free
            if (next.unit < units) {
                copy_weights(p, free + warp * kWeightBytes, next.weights, next.tiles, next.chunk, policy);
                next.copy_tokens(p, free, warp);
                next.advance(p, routing, units, chunks, warp);
            }
            copy_commit();
            multiply(sums, stage + warp * kWeightBytes, stage + WARPS * kWeightBytes,
                                                       group.rows);
            stage = following(stage);
            free = following(free);
        }
#if BIASED
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
            if (first_tile + m >= p.tiles) break;
            const TileBias bias(p, group.expert, first_tile + m);
#pragma unroll
            for (int n = 0; n < N_TILES; ++n) {
                sums[m][n][0] += bias.low, sums[m][n][1] += bias.low;
                sums[m][n][2] += bias.high, sums[m][n][3] += bias.high;
            }
        }
#endif
        // Transposed, so that a lane has two neighbouring columns of a slot.
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) {
            if (8 * n >= group.rows) break;
            const int column = 8 * n + lane / 4;
            char* const to = p.output + (static_cast<uint64>(column < group.rows ? routing.slot(group.first + column) : 0) *
                                             p.outer + 2 * (lane % 4)) * kElementBytes;
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) {
                const auto& x = sums[m][n];
                const bool stored = column < group.rows && first_tile + m < p.tiles;
                char* const at = to + (first_tile + m) * kOutputs * kElementBytes;
                if (kGated) {
                    const uint32 pair = transpose_matrix(pack(activate(x[0]) * factor_of(x[2]), activate(x[1]) * factor_of(x[3])));
                    if (stored) store_global(at, pair);
                } else {
                    const uint32 low = transpose_matrix(pack(activate(x[0]), activate(x[1])));
                    const uint32 high = transpose_matrix(pack(activate(x[2]), activate(x[3])));
                    if (stored) {
                        store_global(at, low);
                        store_global(at + 8 * kElementBytes, high);
                    }
                }
            }
        }
    }
}

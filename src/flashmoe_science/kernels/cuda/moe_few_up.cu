// First product of a mixture of experts for few tokens, with its activation: (slots, intermediate) from (tokens, hidden).
//
// The time is that of reading the weights of the experts that were chosen. A unit is M_TILES tiles (few_parameters.cuh) of
// one group (few_routing.cuh); persistent blocks take every gridDim.x-th. The warps of a block share a unit by splitting
// its inner dimension: they read 32 * K_STEPS * WARPS contiguous elements of each row at about the same time. Every warp has
// a ring of its own, which goes on with the next unit while one ends: STAGES stages are in flight at all times.
// Partial sums meet in shared memory, added in the order of the warps.
#include "moe/few_parameters.cuh"
#include "moe/few_routing.cuh"
#include "moe/few_tiles.cuh"
#include "ptx/dependent_launch.cuh"
#include "ptx/element.cuh"

constexpr int kParts = M_TILES * N_TILES;
constexpr int kStageBytes = kWeightBytes + N_TILES * K_STEPS * kSlotBytes;
constexpr int kRingBytes = WARPS * STAGES * kStageBytes;
constexpr int kPartialBytes = 2 * WARPS * kParts * kSlotBytes;  // of two units in turn, so that one barrier is enough

static_assert(Routing::kScratchBytes <= kRingBytes, "the ring lends its place to the sort");

// Where a warp's next copy comes from.
struct Cursor {
    int unit, chunk, tiles, rows;
    const char* weights;
    const char* row[N_TILES];

    __device__ __forceinline__ void enter(const Parameters& p, const Routing& routing, int units) {
        if (unit >= units) return;
        const Group group = routing.group(unit / p.slabs);
        const int first_tile = unit % p.slabs * M_TILES;
        rows = group.rows;
        tiles = rows > 0 ? min(p.tiles - first_tile, M_TILES) : 0;
        weights = rows > 0 ? weights_at(p, group.expert, first_tile) : p.weights;
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) {
            const int column = 8 * n + static_cast<int>(threadIdx.x % 32) / 4;
            row[n] = column < rows ? row_at(p, routing.slot(group.first + column)) : nullptr;
        }
    }

    // Copies a stage to `to`, this lane's place in it, and moves on.
    __device__ __forceinline__ void copy(const Parameters& p, const Routing& routing, uint32 to, int units, int chunks,
                                         uint64 policy) {
        if (unit < units) {
            if (rows > 0) {
                copy_weights(p, to, weights, tiles, chunk, policy);
#pragma unroll
                for (int n = 0; n < N_TILES; ++n)
                    if (row[n] != nullptr)
#pragma unroll
                        for (int s = 0; s < K_STEPS; ++s)
                            copy_row(p, to + kWeightBytes + (n * K_STEPS + s) * kSlotBytes, row[n], chunk * K_STEPS + s);
            }
            chunk += WARPS;
            if (chunk >= chunks) {
                chunk = threadIdx.x / 32;
                unit += gridDim.x;
                enter(p, routing, units);
            }
        }
        copy_commit();
    }
};

// Two outputs of a lane's accumulators, or four without a gate: row g (and g + 8) of two neighbouring slots.
__device__ __forceinline__ void write(const Parameters& p, const Routing& routing, const Group& group, int tile, int column,
                                      int row, const float4& sum) {
    const float low[2] = {sum.x, sum.y}, high[2] = {sum.z, sum.w};
#pragma unroll
    for (int e = 0; e < 2; ++e)
        if (column + e < group.rows) {
            char* const to = p.output + (static_cast<uint64>(routing.slot(group.first + column + e)) * p.outer +
                                         tile * kOutputs + row) * kElementBytes;
            if (kGated) {
                store_element(to, activate(low[e]) * high[e]);
            } else {
                store_element(to, activate(low[e]));
                store_element(to + 8 * kElementBytes, activate(high[e]));
            }
        }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) moe_few_up(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(1024) char shared_memory[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#if DEPENDENT
    wait_for_predecessor();
    allow_successor();
#endif
    float4* const partial = reinterpret_cast<float4*>(shared_memory + kRingBytes);
    const Routing routing(p, shared_memory + kRingBytes + kPartialBytes, shared_memory);
    const int units = routing.groups * p.slabs;
    const int chunks = (p.inner + K_STEPS * kStepElements - 1) / (K_STEPS * kStepElements);
    const uint64 policy = evict_first_policy();

    const uint32 ring = shared_address(shared_memory) + warp * STAGES * kStageBytes + lane * kChunkBytes;
    Cursor next;
    next.unit = warp < chunks ? blockIdx.x : units;  // with fewer chunks than warps, some have nothing to do
    next.chunk = warp;
    next.enter(p, routing, units);
#pragma unroll
    for (int s = 0; s < STAGES; ++s) next.copy(p, routing, ring + s * kStageBytes, units, chunks, policy);

    uint32 stage = ring;
    int turn = 0;
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
        const Group group = routing.group(unit / p.slabs);
        const int first_tile = unit % p.slabs * M_TILES;
        Accumulators sums;
        clear(sums);
        for (int chunk = warp; chunk < chunks; chunk += WARPS) {
            copy_wait<STAGES - 1>();
            if (group.rows > 0)
                multiply(sums, stage, stage + kWeightBytes, group.rows);
            next.copy(p, routing, stage, units, chunks, policy);
            stage = stage == ring + (STAGES - 1) * kStageBytes ? ring : stage + kStageBytes;
        }
        float4* const mine = partial + turn * WARPS * kParts * 32;
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int n = 0; n < N_TILES; ++n) {
                const auto& x = sums[m][n];
                mine[(warp * kParts + m * N_TILES + n) * 32 + lane] = make_float4(x[0], x[1], x[2], x[3]);
            }
        __syncthreads();
        for (int i = threadIdx.x; i < kParts * 32; i += kThreads) {
            float4 sum = mine[i];
#pragma unroll
            for (int w = 1; w < WARPS; ++w) {
                const float4 other = mine[w * kParts * 32 + i];
                sum.x += other.x;
                sum.y += other.y;
                sum.z += other.z;
                sum.w += other.w;
            }
            const int tile = first_tile + i / 32 / N_TILES;
            const int column = 8 * (i / 32 % N_TILES) + 2 * (lane % 4);
            if (tile < p.tiles) write(p, routing, group, tile, column, lane / 4, sum);
        }
        turn ^= 1;
    }
}

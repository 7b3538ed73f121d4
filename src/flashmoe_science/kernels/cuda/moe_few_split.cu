// One product of a mixture of experts for few tokens, by slots: with its activation (slots, intermediate) from (tokens,
// hidden), or (slots, hidden) from (slots, intermediate). The warps of a block share the inner dimension.
//
// Persistent blocks take units (few_parameters.cuh, few_routing.cuh) one after another, and their warps split a unit's inner
// dimension, each with a ring of its own: docs/kernels/moe-few.md. Partial sums are added in the order of the warps.
//
// Macros besides those of few_parameters.cuh: SECOND (1: the second product, whose weights may be copied before the
// kernel ahead, whose results they meet, has ended).
#include "moe/few_bias.cuh"
#include "moe/few_operands.cuh"
#include "moe/few_parameters.cuh"
#include "moe/few_routing.cuh"
#include "ptx/dependent_launch.cuh"
#include "ptx/element.cuh"

constexpr int kStageBytes = kWeightBytes + N_TILES * K_STEPS * kSlotBytes;
constexpr int kRingBytes = WARPS * STAGES * kStageBytes;

// Tiles whose partial sums are exchanged at a time: all, or the most that divide them and keep the exchange small.
constexpr int tiles_together() {
    int tiles = 4 / N_TILES > 1 ? smaller(4 / N_TILES, M_TILES) : 1;
    while (M_TILES % tiles != 0) --tiles;
    return tiles;
}
constexpr int kTogether = tiles_together();
constexpr int kParts = kTogether * N_TILES;
constexpr int kPartialBytes = WARPS * kParts * kSlotBytes;

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
        enter_rows(p, routing, group, row);
    }

    __device__ __forceinline__ void copy_weights(const Parameters& p, uint32 to, uint64 policy) const {
        if (rows > 0) ::copy_weights(p, to, weights, tiles, chunk, policy);
    }

    __device__ __forceinline__ void copy_tokens(const Parameters& p, uint32 to) const {
        copy_rows(p, to + kWeightBytes, row, chunk);
    }

    __device__ __forceinline__ void advance(const Parameters& p, const Routing& routing, int units, int chunks) {
        chunk += WARPS;
        if (chunk < chunks) return;
        chunk = threadIdx.x / 32;
        unit += gridDim.x;
        enter(p, routing, units);
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
                store_element(to, activate(low[e]) * factor_of(high[e]));
            } else {
                store_element(to, activate(low[e]));
                store_element(to + 8 * kElementBytes, activate(high[e]));
            }
        }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) moe_few_split(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(1024) char shared_memory[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#if DEPENDENT && !SECOND
    wait_for_predecessor();
    allow_successor();
#endif
    const Routing routing(p, shared_memory + kRingBytes + 2 * kPartialBytes, shared_memory);
    const int units = routing.groups * p.slabs;
    const int chunks = (p.inner + K_STEPS * kStepElements - 1) / (K_STEPS * kStepElements);
    const uint64 policy = evict_first_policy();
    const uint32 ring = shared_address(shared_memory) + warp * STAGES * kStageBytes + lane * kChunkBytes;

    // Weights of the first stages, then the tokens' rows of the same.
    Cursor next;
    next.unit = warp < chunks ? blockIdx.x : units;  // with fewer chunks than warps, some have nothing to do
    next.chunk = warp;
    next.enter(p, routing, units);
    Cursor late = next;
#pragma unroll
    for (int s = 0; s < STAGES; ++s)
        if (next.unit < units) {
            next.copy_weights(p, ring + s * kStageBytes, policy);
            next.advance(p, routing, units, chunks);
        }
#if DEPENDENT && SECOND
    wait_for_predecessor();
    allow_successor();
#endif
#pragma unroll
    for (int s = 0; s < STAGES; ++s) {
        if (late.unit < units) {
            late.copy_tokens(p, ring + s * kStageBytes);
            late.advance(p, routing, units, chunks);
        }
        copy_commit();
    }

    uint32 stage = ring;
    int turn = 0;
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
        const Group group = routing.group(unit / p.slabs);
        const int first_tile = unit % p.slabs * M_TILES;
        Accumulators sums;
        clear(sums);
        for (int chunk = warp; chunk < chunks; chunk += WARPS) {
            copy_wait<STAGES - 1>();
            if (group.rows > 0) multiply(sums, stage, stage + kWeightBytes, group.rows);
            if (next.unit < units) {
                next.copy_weights(p, stage, policy);
                next.copy_tokens(p, stage);
                next.advance(p, routing, units, chunks);
            }
            copy_commit();
            stage = stage == ring + (STAGES - 1) * kStageBytes ? ring : stage + kStageBytes;
        }
        // Two places in turn, so that one barrier is enough.
#pragma unroll
        for (int m = 0; m < M_TILES; m += kTogether) {
            float4* const partial = reinterpret_cast<float4*>(shared_memory + kRingBytes + turn * kPartialBytes);
            turn ^= 1;
#pragma unroll
            for (int i = 0; i < kParts; ++i) {
                const auto& x = sums[m + i / N_TILES][i % N_TILES];
                if (N_TILES == 1 || 8 * (i % N_TILES) < group.rows)
                    partial[(warp * kParts + i) * 32 + lane] = make_float4(x[0], x[1], x[2], x[3]);
            }
            __syncthreads();
            for (int i = warp; i < kParts; i += WARPS) {
                const int tile = first_tile + m + i / N_TILES, n = i % N_TILES;
                if (tile >= p.tiles || 8 * n >= group.rows) continue;
                float4 sum = partial[i * 32 + lane];
#pragma unroll
                for (int w = 1; w < WARPS; ++w) {
                    const float4 other = partial[(w * kParts + i) * 32 + lane];
                    sum.x += other.x;
                    sum.y += other.y;
                    sum.z += other.z;
                    sum.w += other.w;
                }
#if BIASED
                const TileBias bias(p, group.expert, tile);
                sum.x += bias.low, sum.y += bias.low;
                sum.z += bias.high, sum.w += bias.high;
#endif
                write(p, routing, group, tile, 8 * n + 2 * (lane % 4), lane / 4, sum);
            }
        }
    }
}

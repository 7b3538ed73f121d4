// Second product and combination of a mixture of experts for few tokens: (tokens, hidden) from (slots, intermediate).
//
// A unit is M_TILES tiles of hidden columns, for all groups (few_routing.cuh): a block computes these columns of every
// slot, keeps them in shared memory and adds up each token's, weighted, in the order of its choices. Warps take different
// groups; where there are fewer groups than warps, PARTS warps split the inner dimension of one.
//
// With DEPENDENT, weights are on their way before the first product, whose results they meet, has ended.
//
// Macros besides those of few_parameters.cuh: PARTS (a power of two, at most WARPS).
#include "moe/few_bias.cuh"
#include "moe/few_operands.cuh"
#include "moe/few_parameters.cuh"
#include "moe/few_routing.cuh"
#include "ptx/dependent_launch.cuh"

constexpr int kStageBytes = kWeightBytes + N_TILES * K_STEPS * kSlotBytes;
constexpr int kRingBytes = WARPS * STAGES * kStageBytes;
constexpr int kUnitColumns = 16 * M_TILES;
constexpr int kGroupStride = WARPS / PARTS;
constexpr int kResultBytes = PARTS * MAX_SLOTS * kUnitColumns * 4;  // [part][slot][column], float32

static_assert(Routing::kScratchBytes <= kRingBytes, "the ring lends its place to the sort");
static_assert(WARPS % PARTS == 0, "every group has the same number of warps");

// Where a warp's next copy comes from.
struct Cursor {
    int slab, index, chunk, tiles, rows;
    const char* weights;
    const char* row[N_TILES];

    __device__ __forceinline__ bool more(const Parameters& p) const { return slab < p.slabs; }

    __device__ __forceinline__ void enter(const Parameters& p, const Routing& routing) {
        if (!more(p)) return;
        const Group group = routing.group(index);
        rows = group.rows;
        tiles = min(p.tiles - slab * M_TILES, M_TILES);
        weights = rows > 0 ? weights_at(p, group.expert, slab * M_TILES) : p.weights;
        enter_rows(p, routing, group, row);
    }

    __device__ __forceinline__ void copy_weights(const Parameters& p, uint32 to, uint64 policy) const {
        if (rows > 0) ::copy_weights(p, to, weights, tiles, chunk, policy);
    }

    __device__ __forceinline__ void copy_tokens(const Parameters& p, uint32 to) const {
        copy_rows(p, to + kWeightBytes, row, chunk);
    }

    __device__ __forceinline__ void advance(const Parameters& p, const Routing& routing, int chunks, int part, int first) {
        chunk += PARTS;
        if (chunk < chunks) return;
        chunk = part;
        index += kGroupStride;
        if (index >= routing.groups) {
            index = first;
            slab += gridDim.x;
        }
        enter(p, routing);
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1) moe_few_combined(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(1024) char shared_memory[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int part = warp % PARTS, first = warp / PARTS;
    float* const results = reinterpret_cast<float*>(shared_memory + kRingBytes);
    const Routing routing(p, shared_memory + kRingBytes + kResultBytes, shared_memory);
    const int chunks = (p.inner + K_STEPS * kStepElements - 1) / (K_STEPS * kStepElements);
    const uint64 policy = evict_first_policy();
    const uint32 ring = shared_address(shared_memory) + warp * STAGES * kStageBytes + lane * kChunkBytes;

    // Weights of the first stages, then, when they are there, the tokens' rows of the same.
    Cursor next;
    next.slab = part < chunks && first < routing.groups ? blockIdx.x : p.slabs;
    next.index = first;
    next.chunk = part;
    next.enter(p, routing);
    Cursor late = next;
#pragma unroll
    for (int s = 0; s < STAGES; ++s)
        if (next.more(p)) {
            next.copy_weights(p, ring + s * kStageBytes, policy);
            next.advance(p, routing, chunks, part, first);
        }
#if DEPENDENT
    wait_for_predecessor();
    allow_successor();
#endif
#pragma unroll
    for (int s = 0; s < STAGES; ++s) {
        if (late.more(p)) {
            late.copy_tokens(p, ring + s * kStageBytes);
            late.advance(p, routing, chunks, part, first);
        }
        copy_commit();
    }

    uint32 stage = ring;
    for (int slab = blockIdx.x; slab < p.slabs; slab += gridDim.x) {
        for (int index = first; index < routing.groups; index += kGroupStride) {
            const Group group = routing.group(index);
            Accumulators sums;
            clear(sums);
            for (int chunk = part; chunk < chunks; chunk += PARTS) {
                copy_wait<STAGES - 1>();
                if (group.rows > 0)
                    multiply(sums, stage, stage + kWeightBytes, group.rows);
                if (next.more(p)) {
                    next.copy_weights(p, stage, policy);
                    next.copy_tokens(p, stage);
                    next.advance(p, routing, chunks, part, first);
                }
                copy_commit();
                stage = stage == ring + (STAGES - 1) * kStageBytes ? ring : stage + kStageBytes;
            }
#pragma unroll
            for (int n = 0; n < N_TILES; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int column = 8 * n + 2 * (lane % 4) + e;
                    if (column < group.rows) {
                        const int slot = routing.slot(group.first + column);
                        float* const to = results + (part * MAX_SLOTS + slot) * kUnitColumns + lane / 4;
#pragma unroll
                        for (int m = 0; m < M_TILES; ++m) {
                            to[16 * m] = sums[m][n][e];
                            to[16 * m + 8] = sums[m][n][2 + e];
                        }
                    }
                }
        }
        __syncthreads();
        for (int i = threadIdx.x; i < p.tokens * kUnitColumns / 2; i += kThreads) {
            const int token = i / (kUnitColumns / 2), column = 2 * (i % (kUnitColumns / 2));
            float2 total = make_float2(0.0f, 0.0f);
            for (int j = 0; j < p.top_k; ++j) {
                const int slot = token * p.top_k + j;
                const uint16 expert = expert_of(p, slot);
                if (expert == kNoExpert) continue;
                float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
                for (int q = 0; q < PARTS; ++q) {
                    const float* const from = results + (q * MAX_SLOTS + slot) * kUnitColumns + column;
                    sum.x += from[0];
                    sum.y += from[1];
                }
#if BIASED
                const int at = slab * kUnitColumns + column;
                if (at < p.outer) {  // the last unit may have fewer columns
                    sum.x += bias_of(p, expert, at);
                    sum.y += bias_of(p, expert, at + 1);
                }
#endif
                total.x += p.topk_weights[slot] * sum.x;
                total.y += p.topk_weights[slot] * sum.y;
            }
            const int at = slab * kUnitColumns + column;
            if (at < p.outer)
                store_global(p.output + (static_cast<uint64>(token) * p.outer + at) * kElementBytes, pack(total.x, total.y));
        }
        __syncthreads();
    }
}

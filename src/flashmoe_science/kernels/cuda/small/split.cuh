// Keys split over the whole grid: every split leaves its result in global memory, and the last one to come combines all.
//
// A warp finishes the same quads in every split, so it meets only its counterparts: no barrier of blocks, and nobody waits
// for anybody. Results are read back in the order of the splits, so the output does not depend on who came last.
#pragma once
#include "ptx/arrival.cuh"
#include "small/merge.cuh"

namespace {

constexpr int kTogether = HEAD_DIM > 64 ? 16 : 8;  // partial results that a lane loads at a time; more take more registers

// Which part of the work a cluster has.
struct Part {
    int row_block, split;

    __device__ __forceinline__ explicit Part(const Parameters& p) {
        const uint32 index = blockIdx.x / CLUSTER;
        row_block = static_cast<int>(index / static_cast<uint32>(p.splits));
        split = static_cast<int>(index) - row_block * p.splits;
    }

    // Of all sets of query rows of the grid.
    __device__ __forceinline__ uint32 set(const Parameters& p) const {
        return (blockIdx.z * gridDim.y + blockIdx.y) * p.row_blocks + row_block;
    }
};

__device__ __forceinline__ Partial* partials_of(const Parameters& p, const Part& part, int index) {
    return p.partials + static_cast<uint64>(part.set(p) * kQuads + index) * p.splits;
}

// Leaves one quad. Rows past the end are neither left nor combined.
__device__ __forceinline__ void leave(const Parameters& p, const Part& part, bool used, int lane, int index,
                                      const float4& x, const Statistics& total) {
    Partial& own = partials_of(p, part, index)[part.split];
    if (!used) return;
    store_partial(&own.sums[lane], x);
    if (lane < 4) store_partial(&own.statistics[lane], make_float2(total.maximum, total.sum));
}

// All lanes, after `leave`: whether all other splits have left what this warp of theirs has.
__device__ __forceinline__ bool last_to_arrive(const Parameters& p, const Part& part, int rank, int warp, int lane) {
    __syncwarp();
    uint32 before = 0;
    if (lane == 0) before = arrive(&p.arrivals[(part.set(p) * CLUSTER + rank) * WARPS + warp], p.splits);
    before = __shfl_sync(0xffffffffu, before, 0);
    __syncwarp();
    return before == static_cast<uint32>(p.splits - 1);
}

// One quad of all splits.
__device__ __forceinline__ Statistics combine_splits(const Parameters& p, const Part& part, bool used, int lane,
                                                     int index, float4& merged) {
    const Partial* const partials = partials_of(p, part, index);
    Statistics total = {NEGATIVE_INFINITY, 0.0f};
    merged = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (!used) return total;
    for (int first = 0; first < p.splits; first += kTogether) {
        float4 sums[kTogether];
        float2 sets[kTogether + 1];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            const bool inside = first + i < p.splits;
            sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            sets[i] = make_float2(NEGATIVE_INFINITY, 0.0f);
            if (inside) sets[i] = load_partial(&partials[first + i].statistics[lane % 4]);
            if (inside) sums[i] = load_partial(&partials[first + i].sums[lane]);
        }
        sets[kTogether] = make_float2(total.maximum, total.sum);
        float weights[kTogether + 1];
        total = combine<kTogether + 1>(sets, 1, weights);
        float4 before = merged;
        merged = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        accumulate(merged, weights[kTogether], before);
#pragma unroll
        for (int i = 0; i < kTogether; ++i) accumulate(merged, weights[i], sums[i]);
    }
    return total;
}

}  // namespace

// With PARTS: what the blocks of a cluster have of a segment meets in their shared memory. Each finishes some quads, which the others
// send it.
#pragma once

#include "decode/results.cuh"
#include "decode_hopper/shared.cuh"
#include "ptx/cluster.cuh"
#include "ptx/cluster_barrier.cuh"

namespace {

struct Gathered {
    const Shared& shared;
    const char* memory;  // of the block's dynamic shared memory, where `shared` begins

    // Of the k-th own quad of a part, and of a row's statistics.
    __device__ __forceinline__ static uint32 quad(int of_part, int k, int lane) {
        return Shared::GATHERED + ((of_part * kOwnQuads + k) * 32 + lane) * 16;
    }
    __device__ __forceinline__ static uint32 statistics(int of_part, int row) {
        return Shared::GATHERED + kQuads * 32 * 16 + (of_part * kRows + row) * 8;
    }

    // One thread, once for a segment: how much will come.
    __device__ __forceinline__ void expect() const { ptx::mbarrier_expect_bytes(shared.gathered_full(), Shared::GATHERED_BYTES); }

    // All lanes, before they send what they have of the s-th segment: nobody reads the one before any more.
    __device__ __forceinline__ void wait_for_room(int s) const {
        if (s > 0) ptx::mbarrier_wait(shared.gathered_empty(), (s - 1) % 2);
    }

    // All lanes of the warp that has a quad of this part's keys.
    __device__ __forceinline__ void send(int lane, int index, const float4& x, const Statistics& total) const {
        const uint32 owner = index % PARTS;
        ptx::post(ptx::in_block(shared.base + quad(part(), index / PARTS, lane), owner),
                  ptx::in_block(shared.gathered_full(), owner), x);
        const Quad quad(index);
        if (quad.group == 0 && quad.half == 0 && lane / 4 < PARTS)
            ptx::post(ptx::in_block(shared.base + statistics(part(), quad.row(lane)), lane / 4),
                      ptx::in_block(shared.gathered_full(), lane / 4), make_float2(total.maximum, total.sum));
    }

    // All warps, after they have sent theirs: own quads of the s-th segment.
    __device__ __forceinline__ void finish(const Parameters& p, const Segment& segment, int s, int warp, int lane) const {
        ptx::mbarrier_wait_for_posts(shared.gathered_full(), s % 2);
        for (int k = warp; k < kOwnQuads; k += WARPS) {
            const int index = own_quad(k), of = lane_of_thread();
            float weights[PARTS];
            const Statistics total = combine<PARTS>(reinterpret_cast<const float2*>(memory + statistics(0, Quad(index).row(of))),
                                                    kRows, weights);
            float4 merged = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
            for (int i = 0; i < PARTS; ++i) accumulate(merged, weights[i], *reinterpret_cast<const float4*>(memory + quad(i, k, of)));
            hand_on(p, segment, of, index, merged, total);
        }
        // What was read is used by now. That a peer's later post comes after the reads is no rule of the memory model: the arrival
        // orders no memory among blocks, and a release at the cluster's scope would be a fence of all of it.
        __syncwarp();
        if (lane < PARTS) ptx::mbarrier_arrive_at(ptx::in_block(shared.gathered_empty(), lane));
    }
};

}  // namespace

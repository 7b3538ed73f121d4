// The parts of a set that the blocks of a cluster have: each block finishes some quads, which the others send it.
#pragma once
#include "decode/results.cuh"
#if CLUSTER > 1
#include "ptx/cluster.cuh"

namespace {

constexpr int kOwned = (kQuads + CLUSTER - 1) / CLUSTER;  // quads that a block finishes, at most

// In shared memory.
struct Gathering {
    float4 quads[CLUSTER][kOwned][32];
    float2 statistics[CLUSTER][kRows];
    uint64 mailbox;

    // All threads, at first; before anything is sent, `cluster::wait_for_peers`.
    __device__ __forceinline__ void open() {
        const int owned = (kQuads - static_cast<int>(cluster::rank()) + CLUSTER - 1) / CLUSTER;
        if (threadIdx.x == 0) cluster::open_mailbox(&mailbox, CLUSTER * (owned * sizeof(quads[0][0]) + sizeof(statistics[0])));
        cluster::announce();
    }

    // All lanes of the warp that has a quad of this block's keys.
    __device__ __forceinline__ void send(int lane, int index, const float4& x, const Statistics& total) {
        const uint32 own = cluster::rank(), owner = index % CLUSTER;
        cluster::post(cluster::peer_address(&quads[own][index / CLUSTER][lane], owner),
                      cluster::peer_address(&mailbox, owner), x);
        // Every block that finishes something needs the statistics.
        constexpr int kReceivers = CLUSTER < kQuads ? CLUSTER : kQuads;
        static_assert(kReceivers <= 8, "four lanes send a block its statistics");
        const Quad quad(index);
        if (quad.group == 0 && quad.half == 0 && lane / 4 < kReceivers)
            cluster::post(cluster::peer_address(&statistics[own][quad.row(lane)], lane / 4),
                          cluster::peer_address(&mailbox, lane / 4), make_float2(total.maximum, total.sum));
    }

    // All warps: once all have sent theirs.
    __device__ __forceinline__ void finish(const Parameters& p, const Segment& segment, int warp, int lane) {
        const int rank = static_cast<int>(cluster::rank());
        if (rank + CLUSTER * warp >= kQuads) return;
        cluster::wait_for_mail(&mailbox);
        for (int index = rank + CLUSTER * warp; index < kQuads; index += CLUSTER * WARPS) {
            float weights[CLUSTER];
            const Statistics total = combine<CLUSTER>(&statistics[0][Quad(index).row(lane)], kRows, weights);
            float4 merged = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
            for (int part = 0; part < CLUSTER; ++part) accumulate(merged, weights[part], quads[part][index / CLUSTER][lane]);
            write(p, segment, lane, index, merged, total);
        }
    }
};

}  // namespace
#endif

// The warpgroups that multiply, in turns, the tiles of a segment, and what becomes of their results at its end.
#pragma once

#include "decode/results.cuh"
#if PARTS > 1
#include "decode_hopper/parts.cuh"
#endif
#include "decode_hopper/shared.cuh"
#include "hopper/products.cuh"
#include "hopper/softmax.cuh"
#include "ptx/bulk.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/shared_floats.cuh"
#include "racecheck.cuh"

namespace {

// Named barriers: of all consumers, and of each warpgroup.
constexpr int kOfConsumers = 1, kOfWarpgroup = 2;

// By all consumers: asks for the queries of a segment. Rows past the end are zeros.
__device__ __forceinline__ void request_queries(const Parameters& p, const Shared& shared, const Segment& segment) {
    constexpr int kRowChunks = HEAD_DIM / 8;
    for (int i = threadIdx.x; i < kProductRows * kRowChunks; i += kConsumerThreads) {
        const int chunk = i % kRowChunks, of_set = i / kRowChunks, row = segment.first_row + of_set;
        const bool valid = of_set < kRows && row < segment.rows;
        const Row at = locate(valid ? row : 0, p);
        const uint64 token = static_cast<uint32>(segment.query_start + at.position);
        const uint64 head = static_cast<uint32>(segment.head * p.group + at.head);
        copy_chunk(panel::chunk_address<kProductRows>(shared.query(), of_set, chunk),
                   p.query + token * p.query_row + head * p.query_head + chunk * kChunkBytes, valid);
    }
    copy_commit();
}

// By all consumers: they are there.
__device__ __forceinline__ void wait_for_queries() {
    copy_wait<0>();
    ptx::fence_async_shared();
    ptx::barrier_sync(kOfConsumers, kConsumerThreads);
}

// Whether two segments are of the same rows.
__device__ __forceinline__ bool same_set(const Segment& a, const Segment& b) {
    return a.sequence == b.sequence && a.head == b.head && a.first_row == b.first_row;
}

// Whether a segment from one key of a tile to another has all of it.
__device__ __forceinline__ bool is_whole(int from, int to) { return from <= 0 && to >= kTileKeys; }

// With RACECHECK the other warpgroup meets this one: see racecheck.cuh.
__device__ __forceinline__ void wait_for_warpgroup(int warpgroup) {
    if (RACECHECK) ptx::barrier_sync(kOfConsumers, kConsumerThreads);
    else ptx::barrier_sync(kOfWarpgroup + warpgroup, kWarpgroup);
}

// By a warpgroup: values of a tile that are none of the segment's become zeros, as zero times NaN is NaN.
__device__ __forceinline__ void clear_others(const Segment& segment, int first, uint32 values, int warpgroup) {
    const int from = segment.first_key - first, to = segment.last_key - first;
    if (is_whole(from, to)) return;
    constexpr int kRowChunks = VALUE_DIM / 8;
    for (int i = threadIdx.x % kWarpgroup; i < kTileKeys * kRowChunks; i += kWarpgroup) {
        const int row = i / kRowChunks;
        if (row < from || row >= to) store_shared(panel::chunk_address<kTileKeys>(values, row, i % kRowChunks), Chunk{0, 0, 0, 0});
    }
    ptx::fence_async_shared();
    wait_for_warpgroup(warpgroup);
}

// Keys of a tile that a lane's rows do not see.
__device__ __forceinline__ void hide(const Parameters& p, const Segment& segment, int first, float (&s)[kTileKeys / 2]) {
    const int lane = threadIdx.x % 32, column = first + 2 * (lane % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = segment.first_row + threadIdx.x / 32 % 4 * 16 + lane / 4 + 8 * half;
        const int position = locate(min(row, segment.rows - 1), p).position + segment.past;
        const int begin = max(segment.first_key, begin_of_seen(p, position)) - column;
        const int end = min(segment.last_key, end_of_seen(p, position)) - column;
#pragma unroll
        for (int i = 0; i < kTileKeys / 2; i += 4)
#pragma unroll
            for (int j = 0; j < 2; ++j)
                if (2 * i + j < begin || 2 * i + j >= end) s[i + 2 * half + j] = NEGATIVE_INFINITY;
    }
}

// A warp's 16 rows of a warpgroup's output, in the order in which quads lie (small/fragments.cuh).
__device__ __forceinline__ void leave_output(const float (&o)[VALUE_DIM / 2], uint32 results, int warp) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < VALUE_DIM / 8; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row_tile = 2 * warp + half, group = i / 8;
            if (row_tile >= ROW_TILES) continue;
            const int index = 4 * (row_tile * kDimGroups + group) + 2 * (g % 2) + t / 2;
            const uint32 at = results + (index * 32 + 4 * (i % 8) + g / 2) * 16 + t % 2 * 8;
            store_shared_pair(at, o[4 * i + 2 * half], o[4 * i + 2 * half + 1]);
        }
}

// `memory`: where `shared` begins.
__device__ __forceinline__ void consume(const Parameters& p, const Shared& shared, const char* memory, const Segment* segments,
                                        const Meeting* meetings, float2 (*statistics)[kConsumers]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warpgroup = warp / 4;
    const uint32 own_results = shared.base + Shared::RESULTS + warpgroup * kQuads * 32 * 16;
    const float4* const results = reinterpret_cast<const float4*>(memory + Shared::RESULTS);
#if PARTS > 1
    const Gathered gathered{shared, memory};
#endif
    hopper::Ring<STAGES> ring;
    int turn = 0;  // of the warpgroup that takes the next tile
    for (int s = 0;; ++s) {
        const int slot = s % kSlots, before = (s + kSlots - 1) % kSlots;
        ptx::mbarrier_wait(shared.segment_full(slot), s / kSlots % 2);
        const Segment& segment = segments[slot];
        // While results of the segment before meet. All have multiplied its queries.
        if (segment.passes > 0 && (s == 0 || !same_set(segments[before], segment))) request_queries(p, shared, segment);
        if (s > 0) {
            if (segments[before].slot >= 0 && warp < kOwnQuads) meet(p, segments[before], meetings[before], warp, lane);
            hopper::release(shared.segment_empty(before));
        }
        if (segment.passes == 0) return;
        wait_for_queries();

        float o[VALUE_DIM / 2] = {};
        hopper::Softmax softmax;
        const int first_turn = turn;
        const int end = segment.tile + tiles_of_segment(segment);
        for (int tile = segment.tile; tile < end; ++tile, ring.advance(), turn ^= 1) {
            if (turn != warpgroup) {
                const int first = kTileKeys * tile;
                if (RACECHECK && PAGES < 2 && !is_whole(segment.first_key - first, segment.last_key - first))
                    wait_for_warpgroup(warpgroup);
                continue;
            }
            const int first = kTileKeys * tile;
            float scores[kTileKeys / 2], correction[2];
            uint32 probabilities[kTileKeys / 4];
            ptx::mbarrier_wait(shared.key_full(ring.stage), ring.parity);
            if (PAGES == 2) ptx::fence_async_shared();  // threads wrote them
            hopper::multiply_keys(scores, panel::k_major(shared.query()), panel::k_major(shared.key(ring.stage)));
            ptx::wgmma_wait<0>();
            ptx::pin(scores);
            hopper::release(shared.key_empty(ring.stage));
            if (SCORE_CHANGES) {
#pragma unroll
                for (int i = 0; i < kTileKeys / 2; ++i)
                    scores[i] = p.softcap_log2 != 0.0f ? capped(scores[i], p) : scores[i] * p.scale_log2;
            }
            if (first < segment.all_begin || first + kTileKeys > segment.all_end) hide(p, segment, first, scores);
            softmax.step(scores, SCORE_CHANGES ? 1.0f : p.scale_log2, correction);
            if (__any_sync(0xffffffffu, correction[0] != 1.0f || correction[1] != 1.0f)) hopper::rescale(o, correction);
            hopper::pack_probabilities(scores, probabilities);
            ptx::mbarrier_wait(shared.value_full(ring.stage), ring.parity);
            if (PAGES == 2) ptx::fence_async_shared();
            else clear_others(segment, first, shared.value(ring.stage), warpgroup);
            hopper::multiply_values(o, probabilities, panel::mn_major<kTileKeys>(shared.value(ring.stage)), true);
            ptx::wgmma_wait<0>();
            ptx::pin(o);
            hopper::release(shared.value_empty(ring.stage));
        }

        // The warpgroups' results meet in shared memory, where nobody reads those of the segment before any more. They are added in
        // the order of their first tiles, so that bits do not depend on the segments before.
        if (16 * (warp % 4) < kRows) {
            const int row = warp % 4 * 16 + lane / 4;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float sum = quad_sum(softmax.sum[half]);
                if (lane % 4 == 0 && row + 8 * half < kRows)
                    statistics[row + 8 * half][warpgroup] = make_float2(softmax.reference[half], sum);
            }
            leave_output(o, own_results, warp % 4);
        }
        ptx::barrier_sync(kOfConsumers, kConsumerThreads);
#if PARTS > 1
        if (threadIdx.x == 0) gathered.expect();
        gathered.wait_for_room(s);
#endif
        const int of = PARTS > 1 ? lane : lane_of_thread();  // parts send each other what they have
#pragma unroll
        for (int i = 0; i < kShares; ++i) {
            const int index = warp + i * WARPS;
            if (kQuads % WARPS != 0 && index >= kQuads) break;
            float weights[kConsumers];
            const float2* const first = &statistics[Quad(index).row(of)][first_turn];
            const Statistics total = combine<kConsumers>(first, 1 - 2 * first_turn, weights);
            float4 merged = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
            for (int w = 0; w < kConsumers; ++w)
                accumulate(merged, weights[w], results[((w ^ first_turn) * kQuads + index) * 32 + of]);
#if PARTS > 1
            gathered.send(lane, index, merged, total);
#else
            hand_on(p, segment, of, index, merged, total);
#endif
        }
#if PARTS > 1
        gathered.finish(p, segment, s, warp, lane);
#endif
    }
}

}  // namespace

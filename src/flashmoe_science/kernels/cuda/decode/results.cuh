// From partial results to rows of the output: blocks that share a set of query rows leave theirs in device memory, and the
// last one to come combines them, or what others have not begun.
//
// A warp finishes the same quads in every block, so it meets only its counterparts: no barrier of blocks, and nobody has to
// wait for another. Results are read back in the order of their keys, so the output does not depend on who came last.
#pragma once
#include "decode/schedule.cuh"
#include "ptx/arrival.cuh"
#if CLUSTER > 1
#include "ptx/cluster.cuh"
#endif
#include "ptx/fp8.cuh"
#include "ptx/global.cuh"
#include "small/fragments.cuh"

namespace {

using Quad = QuadOf<kDimGroups>;

// Of the quads, the parts of a worker (schedule.cuh) finish every PARTS-th each: this one's k-th.
constexpr int kOwnQuads = kQuads / PARTS;
static_assert(kOwnQuads * PARTS == kQuads, "the same number for each part");
__device__ __forceinline__ int own_quad(int k) { return k * PARTS + part(); }

// Partial results that a lane loads at a time, of so many quads; more take more registers, and spill on sm_120.
constexpr int kTogether = VALUE_DIM <= 64 || VALUE_DIM > 128 || (ROW_TILES > 2 && WARPS < 8) ? 8 : 16;
#ifndef TOGETHER
#define TOGETHER 0
#endif
#ifndef MORE_REGISTERS
#define MORE_REGISTERS 0
#endif
constexpr int kQuadsTogether =
    (MORE_REGISTERS || (ROW_TILES == 2 && PAGES < 2 && DEPENDENT)) && kQuads % (2 * WARPS * PARTS) == 0 ? 2 : 1;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kNaturalLogOf2 = 0.6931471805599453f;

// Normalises and writes one quad, and with the row's first quad its lse. Rows without keys: zeros and -inf.
__device__ __forceinline__ void write(const Parameters& p, const Segment& segment, int lane, int index, const float4& x,
                                      const Statistics& total) {
    const Quad quad(index);
    const int row = segment.first_row + quad.row(lane);
    const int dim = first_dim<kValuePairs, 8>(quad.group, lane / 4) + quad.dim(lane) % 8;
    if (row >= segment.rows) return;
    const Row at = locate(row, p);
    const int head = segment.head * p.group + at.head;
    const uint64 token = static_cast<uint32>(segment.query_start + at.position);
    float scale = total.sum == 0.0f ? 0.0f : reciprocal(total.sum);
    if (p.sinks != nullptr && total.sum != 0.0f) {
        // One more term of the sum, without a value.
        const float sink = p.sinks[head] * kLog2E;
        const float maximum = fmaxf(total.maximum, sink);
        const float shrink = exp2_approx(total.maximum - maximum);
        scale = shrink * reciprocal(fmaf(total.sum, shrink, exp2_approx(sink - maximum)));
    }
    if (64 * (quad.group + 1) <= VALUE_DIM || dim < VALUE_DIM) {
        const uint64 offset = token * p.output_row + static_cast<uint32>(head) * p.output_head + dim * kElementBytes;
        uint32 low = pack_result(x.x * scale, x.y * scale), high = pack_result(x.z * scale, x.w * scale);
#if TREE
        if (total.sum == 0.0f) low = high = 0;  // a product is NaN where another row of the set sees one
#endif
        store_global(p.output + offset, low, high);
    }
    if (p.lse != nullptr && quad.group == 0 && quad.half == 0 && lane < 4)
        p.lse[token * (p.kv_heads * p.group) + head] =
            total.sum == 0.0f ? NEGATIVE_INFINITY : (total.maximum + log2_approx(total.sum)) * kNaturalLogOf2;
}

// All lanes: rows [from, to) of the output become zero, and their lse minus infinity.
__device__ __forceinline__ void write_nothing(const Parameters& p, int from, int to, int lane) {
    const int heads = p.kv_heads * p.group;
    for (int token = from; token < to; ++token) {
        const uint64 at = static_cast<uint32>(token);
        for (int i = lane; i < heads * (VALUE_DIM / 4); i += 32) {
            const int head = i / (VALUE_DIM / 4), dim = 4 * (i % (VALUE_DIM / 4));
            store_global(p.output + at * p.output_row + static_cast<uint32>(head) * p.output_head + dim * kElementBytes, 0, 0);
        }
        if (p.lse != nullptr)
            for (int head = lane; head < heads; head += 32) p.lse[at * heads + head] = NEGATIVE_INFINITY;
    }
}

// Rows without keys, and of no sequence. Warps 1 to WARPS - 1 of so many blocks, one of whose others looks for the share meanwhile.
__device__ __forceinline__ void write_rows_without_keys(const Parameters& p, int warp, int lane, int blocks) {
    const int each = WARPS - 1, first = (MIXED > 0 ? worker() : static_cast<int>(blockIdx.x)) * each + warp - 1;
    for (int sequence = first; sequence <= p.batch; sequence += blocks * each) {
        const int from = p.query_starts[sequence];
        if (sequence == p.batch) {
            // With MIXED others have these rows, if there are any others.
            if (MIXED == 0 || blocks == static_cast<int>(gridDim.x)) write_nothing(p, from, p.tokens, lane);
            continue;
        }
        const int to = p.query_starts[sequence + 1];
        if (!is_others(p, to - from) && Extent(p, sequence).rows == 0) write_nothing(p, from, to, lane);
    }
}

__device__ __forceinline__ Partial& partial_at(const Parameters& p, int slot, int index) {
    return p.partials[static_cast<uint64>(slot) * kQuads + index];
}

// Leaves one quad. Rows past the end are neither left nor combined.
__device__ __forceinline__ void leave(const Parameters& p, const Segment& segment, int slot, int lane, int index,
                                      const float4& x, const Statistics& total) {
    if (segment.first_row + Quad(index).row(lane) >= segment.rows) return;
    Partial& own = partial_at(p, slot, index);
    store_partial(&own.sums[lane], x);
    if (lane < 4) store_partial(&own.statistics[lane], make_float2(total.maximum, total.sum));
}

// One quad of a segment: to the output if that is the whole set, else to those who combine the set's.
__device__ __forceinline__ void hand_on(const Parameters& p, const Segment& segment, int lane, int index, const float4& x,
                                        const Statistics& total) {
    if (segment.slot == kWhole) write(p, segment, lane, index, x, total);
    else leave(p, segment, segment.slot, lane, index, x, total);
}

// Each part of a worker has its own.
__device__ __forceinline__ int counter_of(int of_worker) { return of_worker * PARTS + part(); }

// All lanes, after `leave`: whether `all` have arrived at a counter of this warp and its counterparts.
__device__ __forceinline__ bool last_to_arrive(const Parameters& p, int counter, int all, int warp, int lane) {
    __syncwarp();
    uint32 before = 0;
    if (lane == 0) before = arrive(&p.arrivals[counter * WARPS + warp], all);
    before = __shfl_sync(0xffffffffu, before, 0);
    __syncwarp();
    return before == static_cast<uint32>(all - 1);
}

#if ROW_TILES > 2 && (WARPS < 8 || TOGETHER)
#define MEET_INLINE __noinline__  // inlined, it takes registers from what is on the way
#else
#define MEET_INLINE __forceinline__
#endif

// Where the pieces of a set lie, as `slot_of_piece` says. What is shared by all is read once: each look at it would wait for the one before.
struct Pieces {
    const char* origin;
    uint32 stride, extra;  // the first of the set lies so much further

    __device__ __forceinline__ Pieces(const Parameters& p, const Meeting& meeting) {
        constexpr uint32 kSlot = kQuads * sizeof(Partial);
        const int second = slot_of_piece(p, meeting, 1), step = slot_of_piece(p, meeting, 2) - second;
        origin = reinterpret_cast<const char*>(&partial_at(p, second - step, 0));
        stride = step * kSlot;
        extra = (slot_of_piece(p, meeting, 0) - (second - step)) * kSlot;
    }
    __device__ __forceinline__ const Partial& at(int i, int index) const {
        return reinterpret_cast<const Partial*>(origin + offset_of(i, stride) + (i == 0 ? extra : 0))[index];
    }
};

// Of `Quads` own quads, `WARPS` apart, every `step`th piece from `first` to before `end`. All lanes.
template <int Quads>
__device__ __forceinline__ void combine_pieces(const Pieces& pieces, int rows, int first, int end, int step, int lane, int k,
                                               float4 (&merged)[Quads], Statistics (&total)[Quads]) {
#pragma unroll
    for (int q = 0; q < Quads; ++q) {
        total[q] = {NEGATIVE_INFINITY, 0.0f};
        merged[q] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    for (; first < end; first += kTogether * step) {
        float4 sums[Quads][kTogether];
        float2 sets[Quads][kTogether / 8];  // lane l has those of row l % 4 and of every eighth piece from l / 4 on
#pragma unroll
        for (int q = 0; q < Quads; ++q) {
            const int own = own_quad(k + q * WARPS), last = Quad(own).row(lane) < rows ? end : 0;
#pragma unroll
            for (int j = 0; j < kTogether / 8; ++j) {
                const int i = first + (lane / 4 + 8 * j) * step;
                const Partial& piece = pieces.at(i, own);
                sets[q][j] = make_float2(NEGATIVE_INFINITY, 0.0f);
                if (i < last) sets[q][j] = load_partial(&piece.statistics[lane % 4]);
            }
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                const Partial& piece = pieces.at(first + i * step, own);
                sums[q][i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (first + i * step < last) sums[q][i] = load_partial(&piece.sums[lane]);
            }
        }
#pragma unroll
        for (int q = 0; q < Quads; ++q) {
            float maximum = NEGATIVE_INFINITY, sum = 0.0f, weights[kTogether / 8];
#pragma unroll
            for (int j = 0; j < kTogether / 8; ++j) maximum = fmaxf(maximum, sets[q][j].x);
            maximum = fmaxf(max_over_keys(maximum), total[q].maximum);
            const float shift = finite_maximum(maximum), shrink = exp2_approx(total[q].maximum - shift);
#pragma unroll
            for (int j = 0; j < kTogether / 8; ++j) {
                weights[j] = exp2_approx(sets[q][j].x - shift);
                sum = fmaf(weights[j], sets[q][j].y, sum);
            }
            total[q] = {maximum, fmaf(total[q].sum, shrink, sum_over_keys(sum))};
            const float4 before = merged[q];
            merged[q] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            accumulate(merged[q], shrink, before);
#pragma unroll
            for (int i = 0; i < kTogether; ++i)
                accumulate(merged[q], __shfl_sync(0xffffffffu, weights[i / 8], i % 8 * 4 + lane % 4), sums[q][i]);
        }
    }
}

constexpr int kBundles = (kOwnQuads + kQuadsTogether * WARPS - 1) / (kQuadsTogether * WARPS);  // of quads that a warp combines at a time
constexpr uint32 kEvery = (1u << kBundles) - 1;
#if TOGETHER
constexpr int kLooks = 32;  // some 20 us
constexpr int kFewestTogether = 8;  // with fewer pieces the last block has less to do than the others have to wait

// Of a set whose pieces are one block's each: a block that has nothing else to do waits a while for the others, and each finishes some
// bundles. The last to come then finishes those that nobody has begun, so nobody waits for a block that may not run. Where two
// finish the same one they write the same.
struct Together {
    uint32 *arrivals, *begun;
    int all, warp, lane;
    bool is_last;

    __device__ __forceinline__ Together(const Parameters& p, const Meeting& meeting, int warp, int lane)
        : all(meeting.group_blocks), warp(warp), lane(lane), is_last(false) {
        const int counter = counter_of(meeting.group_first_block) * WARPS + warp;
        arrivals = &p.arrivals[counter];
        begun = reinterpret_cast<uint32*>(&partial_at(p, 2 * static_cast<int>(gridDim.x), 0)) + counter;
    }
    // All lanes, after their `leave`: the bundles that this block is to finish first.
    __device__ __forceinline__ uint32 meet(const Meeting& meeting) {
        uint32 own = 0;
#pragma unroll
        for (int i = 0; i < kBundles; ++i)
            if ((i * WARPS + warp) % all == meeting.own) own |= 1u << i;
        uint32 last = 0;
        if (lane == 0) {
            if (meeting.own == 0) *begun = 0;
            last = arrive(arrivals, all) == static_cast<uint32>(all - 1);
            if (last == 0 && own != 0 && !(meeting.ends && all_came(arrivals, kLooks))) own = 0;
            if (own != 0) set_bits(begun, own);
        }
        is_last = __shfl_sync(0xffffffffu, last, 0) != 0;
        own = __shfl_sync(0xffffffffu, own, 0);
        __syncwarp();
        return own;
    }
    // All lanes of the last warp.
    __device__ __forceinline__ uint32 not_begun() {
        uint32 bundles = 0;
        if (lane == 0) bundles = kEvery & ~load_word(begun);
        return __shfl_sync(0xffffffffu, bundles, 0);
    }
};
#endif

// All lanes of a warp, after it has left its quads of a piece. Pieces meet in groups, and where there is more than one, the
// results of groups meet, each in the slot of its group's first piece. A counter is that of the first block of those that
// share a group, or a set: as the block ends within it, it is the counter of no other.
__device__ MEET_INLINE void meet(const Parameters& p, const Segment& segment, const Meeting& meeting, int warp, int lane) {
    if (!meeting.complete) return;
    __syncwarp();
    uint32 bundles = kEvery;
#if TOGETHER
    Together together(p, meeting, warp, lane);
    const bool spread = meeting.groups == 1 && meeting.group_blocks >= kFewestTogether && p.split_tiles == 0;
    if (spread) bundles = together.meet(meeting);
    else
#endif
        if (meeting.group_blocks > 1 && !last_to_arrive(p, counter_of(meeting.group_first_block), meeting.group_blocks, warp, lane)) return;
    const int end = meeting.first_piece + meeting.group_pieces;
    const Pieces pieces(p, meeting);
    const int rows = segment.rows - segment.first_row;
    const auto combine_all = [&](int first, int last, int step, bool is_result) {
#pragma unroll 1
        for (int i = 0, k = warp; k < kOwnQuads; ++i, k += kQuadsTogether * WARPS) {
            if (TOGETHER && (bundles >> i & 1) == 0) continue;
            float4 merged[kQuadsTogether];
            Statistics total[kQuadsTogether];
            combine_pieces(pieces, rows, first, last, step, lane, k, merged, total);
            __syncwarp();  // other lanes have read the statistics that four overwrite
#pragma unroll
            for (int q = 0; q < kQuadsTogether; ++q) {
                const int own = own_quad(k + q * WARPS);
                if (is_result) write(p, segment, lane, own, merged[q], total[q]);
                else leave(p, segment, slot_of_piece(p, meeting, first), lane, own, merged[q], total[q]);
            }
        }
    };
#if TOGETHER
#pragma unroll 1
    for (int round = 0; round < 2; ++round) {
        combine_all(meeting.first_piece, end, 1, meeting.groups == 1);
        if (!spread) break;
        if (!together.is_last) return;
        bundles = together.not_begun();
    }
    if (spread) return;
#else
    combine_all(meeting.first_piece, end, 1, meeting.groups == 1);
#endif
    if (meeting.groups == 1) return;
    __syncwarp();
    if (meeting.several) {
        const int counter = static_cast<int>(gridDim.x) + counter_of(meeting.first_block);
        if (!last_to_arrive(p, counter, meeting.groups, warp, lane)) return;
    } else if (end < meeting.pieces) {
        return;  // the block itself goes on with the next group
    }
    combine_all(0, meeting.pieces, group_size(p), true);
}

#if CLUSTER > 1

// The parts of a set that the blocks of a cluster have: each block finishes some quads, which the others send it.
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

#endif

}  // namespace

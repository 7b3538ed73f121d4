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
#include "ptx/special_registers.cuh"
#include "small/fragments.cuh"

namespace {

using Quad = QuadOf<kDimGroups>;

// Of the quads, the parts of a worker (schedule.cuh) finish every PARTS-th each: this one's k-th.
constexpr int kOwnQuads = kQuads / PARTS;
static_assert(kOwnQuads * PARTS == kQuads, "the same number for each part");
__device__ __forceinline__ int own_quad(int k) { return k * PARTS + part(); }

#ifndef TOGETHER
#define TOGETHER 0
#endif
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kNaturalLogOf2 = 0.6931471805599453f;

// Which lane's sums a thread has when results meet, and on the way there.
__device__ __forceinline__ int lane_of_thread() { return Partial::lane_of(static_cast<int>(threadIdx.x) % 32); }

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

// Leaves one quad. Rows past the end are neither left nor combined.
__device__ __forceinline__ void leave(const Parameters& p, const Segment& segment, int slot, int lane, int index,
                                      const float4& x, const Statistics& total) {
    if (segment.first_row + Quad(index).row(lane) >= segment.rows) return;
    Partial& own = p.partials[static_cast<uint32>(slot)];
    store_partial(&own.sums[index][Partial::place_of(lane)], x);
    if (lane < 4) store_partial(&own.statistics[index][lane], make_float2(total.maximum, total.sum));
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

#if ROW_TILES > 2 && (WARPS < 8 || TOGETHER || !(DEPENDENT || MORE_REGISTERS))
#define MEET_INLINE __noinline__  // inlined, it takes registers from what is on the way
#else
#define MEET_INLINE __forceinline__
#endif

constexpr int kApart = Partial::BY_ROWS ? 1 : 4;  // the eight threads whose sums are one row's

// Of `Quads` own quads, `WARPS` apart, what lies in slots from the `first`-th to before the `end`-th. All threads of a warp; the
// eight that have a row have of its statistics those of every eighth slot each. What all loads share is read once, and little is added for
// each of them: instructions are fetched here while everything waits.
template <int Quads>
__device__ __forceinline__ void combine_pieces(const Parameters& p, const Slots& slots, int rows, int first, int end, int k,
                                               float4 (&merged)[Quads], Statistics (&total)[Quads]) {
    const int thread = static_cast<int>(threadIdx.x) % 32, lane = lane_of_thread(), of_row = lane / 4;
    const uint32 stride = slots.step * sizeof(Partial);
    const Partial* const origin = p.partials + slots.first;
    const int own_first = own_quad(k);
    const char* const sums_at = reinterpret_cast<const char*>(&origin->sums[own_first][thread]);
    const char* const statistics_at = reinterpret_cast<const char*>(&origin->statistics[own_first][lane % 4]);
    const uint32 extra = slots.extra * sizeof(Partial);
#pragma unroll
    for (int q = 0; q < Quads; ++q) {
        total[q] = {NEGATIVE_INFINITY, 0.0f};
        merged[q] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    for (; first < end; first += kTogether) {
        float4 sums[Quads][kTogether];
        float2 sets[Quads][kTogether / 8];
#pragma unroll
        for (int q = 0; q < Quads; ++q) {
            const int last = Quad(own_first + q * WARPS * PARTS).row(lane) < rows ? end : 0;
#pragma unroll
            for (int j = 0; j < kTogether / 8; ++j) {
                const int i = first + of_row + 8 * j;
                const char* const at = statistics_at + offset_of(i, stride) + (i == 0 ? extra : 0);
                sets[q][j] = make_float2(NEGATIVE_INFINITY, 0.0f);
                if (i < last) sets[q][j] = load_partial(reinterpret_cast<const float2*>(at) + q * WARPS * PARTS * 4);
            }
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                const char* const at = sums_at + offset_of(first + i, stride) + (i == 0 && first == 0 ? extra : 0);
                sums[q][i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (first + i < last) sums[q][i] = load_partial(reinterpret_cast<const float4*>(at) + q * WARPS * PARTS * 32);
            }
        }
#pragma unroll
        for (int q = 0; q < Quads; ++q) {
            float maximum = NEGATIVE_INFINITY, sum = 0.0f, weights[kTogether / 8];
#pragma unroll
            for (int j = 0; j < kTogether / 8; ++j) maximum = fmaxf(maximum, sets[q][j].x);
            maximum = fmaxf(max_over_keys<kApart>(maximum), total[q].maximum);
            const float shift = finite_maximum(maximum), shrink = exp2_approx(total[q].maximum - shift);
#pragma unroll
            for (int j = 0; j < kTogether / 8; ++j) {
                weights[j] = exp2_approx(sets[q][j].x - shift);
                sum = fmaf(weights[j], sets[q][j].y, sum);
            }
            total[q] = {maximum, fmaf(total[q].sum, shrink, sum_over_keys<kApart>(sum))};
            const float4 before = merged[q];
            merged[q] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            accumulate(merged[q], shrink, before);
#pragma unroll
            for (int i = 0; i < kTogether; ++i)
                accumulate(merged[q], __shfl_sync(0xffffffffu, weights[i / 8], thread + (i % 8 - of_row) * kApart), sums[q][i]);
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
        begun = reinterpret_cast<uint32*>(p.partials + 2 * gridDim.x) + counter;
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
// results of groups meet. A counter is that of the first block of those that share a group, or a set: as the block ends within it,
// it is the counter of no other.
__device__ MEET_INLINE void meet(const Parameters& p, const Segment& segment, const Meeting& meeting, int warp, int lane) {
    if (!meeting.complete) return;
    __syncwarp();
    uint32 bundles = kEvery;
#if TOGETHER
    Together together(p, meeting, warp, lane);
    const bool spread = meeting.groups == 1 && meeting.group_blocks >= kFewestTogether && !splits(p);
    if (spread) bundles = together.meet(meeting);
    else
#endif
        if (meeting.group_blocks > 1 && !last_to_arrive(p, counter_of(meeting.group_first_block), meeting.group_blocks, warp, lane)) return;
    const int rows = segment.rows - segment.first_row;
    const auto combine_all = [&](const Slots& slots, int first, int last, bool is_result) {
#pragma unroll 1
        for (int i = 0, k = warp; k < kOwnQuads; ++i, k += kQuadsTogether * WARPS) {
            if (TOGETHER && (bundles >> i & 1) == 0) continue;
            float4 merged[kQuadsTogether];
            Statistics total[kQuadsTogether];
            combine_pieces(p, slots, rows, first, last, k, merged, total);
            __syncwarp();  // other lanes have read the statistics that four overwrite
#pragma unroll
            for (int q = 0; q < kQuadsTogether; ++q) {
                const int own = own_quad(k + q * WARPS);
                if (is_result) write(p, segment, lane_of_thread(), own, merged[q], total[q]);
                else leave(p, segment, meeting.results.of(meeting.group), lane_of_thread(), own, merged[q], total[q]);
            }
        }
    };
    const auto combine_group = [&] {
        combine_all(meeting.pieces, meeting.first_piece, meeting.end_piece, meeting.groups == 1);
    };
#if TOGETHER
#pragma unroll 1
    for (int round = 0; round < 2; ++round) {
        combine_group();
        if (!spread) break;
        if (!together.is_last) return;
        bundles = together.not_begun();
    }
    if (spread) return;
#else
    combine_group();
#endif
    if (meeting.groups == 1) return;
    __syncwarp();
    if (meeting.several) {
        const int counter = grid_size() + counter_of(meeting.first_block);
        if (!last_to_arrive(p, counter, meeting.groups, warp, lane)) return;
    } else if (meeting.group + 1 < meeting.groups) {
        return;  // the block itself goes on with the next group
    }
    combine_all(meeting.results, 0, meeting.groups, true);
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

// Attention of few query rows over a cache whose lengths lie in device memory, in one launch: docs/kernels/decode.md.
//
// Products and fragments are those of attention_small.cu: S^T = K Q^T and O^T = V^T P^T by mma.m16n8k16, keys and values
// straight from global memory to registers. A block goes through its share of all keys (decode/schedule.cuh) segment by
// segment: consecutive keys of one set of 8 * ROW_TILES query rows, row = position * group + head. Sets that several blocks
// share are combined by the last of them (decode/results.cuh).  (g = lane / 4, t = lane % 4 throughout.)
//
// Macros, all integers:
//   HEAD_DIM, VALUE_DIM  8..256, multiples of 8
//   QUERY_BF16     1: query and output are bfloat16, 0: float16; NATIVE_FP8: ptx/fp8.cuh
//   ELEMENT_BF16   likewise, of what is multiplied; MMA_K 16, or 8 for sm_75 (types.cuh)
//   ROW_TILES      query rows of a set / 8
//   WARPS          warps of a block
//   KEY_TILES      tiles of 16 keys that a warp holds at a time
//   LATE_VALUES    1: V is loaded after Q K^T, into the registers that K leaves (many rows, large dims)
//   PAGES          how keys are found (decode/tiles.cuh)
//   CACHE          0, or which scales e4m3 keys and values have (there, too)
//   SCORE_CHANGES  1: scores may have a soft cap and ALiBi slopes, which are parameters; 0: they have not
//   PAIRS          1: FP8 whose rows begin at multiples of 16 bytes is read 16 codes at a time; may be left out
//   CHUNK          1: a query sees the keys of its own chunk alone; may be left out
//   HIDDEN_TILES   1: a segment may begin with tiles that no row sees, whose pages may be gone; with PAGES 1, may be left out
//   CLUSTER        blocks of a cluster, which may share a set (sm_90); may be left out
//   QUEUE          passes for which a warp has room in shared memory (decode/queue.cuh); may be left out
//   TREE           1: queries of a sequence are a tree, whose words say which of their keys a row sees; may be left out
//   DEPENDENT      1: launched with programmatic stream serialization (sm_90), so that it may start early
#include "decode/queries.cuh"
#include "decode/queue.cuh"
#include "decode/results.cuh"
#include "mma/m16n8k16.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/dependent_launch.cuh"
#include "ptx/ldmatrix.cuh"

namespace {

// Where registers are to spare, what the next loads read is found while this pass waits for its own.
constexpr bool kFindAhead = !LATE_VALUES && ROW_TILES * (HEAD_DIM + VALUE_DIM) <= 512 && HEAD_DIM <= 128 && VALUE_DIM <= 128;
template <typename Type, Type Value>
struct Constant {
    static constexpr Type value = Value;
    __device__ constexpr operator Type() const { return Value; }
};

// With a scale for each key its weight is scaled. Relative to the heaviest of these it is at most one, as float16 wants it. With
// four tiles of rows that spills.
constexpr bool kRelativeWeights = CACHE == 2 && ROW_TILES < 4;
// In the last pass a warp's further tiles may lie past the end: masked, they cost as much as others, so they are left out there.
constexpr bool kShortPasses = KEY_TILES > 1;
// Whether the query stays in registers for a segment: beside FP8, where it is converted too.
constexpr bool kHoldQuery = CACHE > 0 && ROW_TILES == 1 && HEAD_DIM <= 128 && !LATE_VALUES;

// exp2(score + change), with the sign of a key's scale; zero where the key is not seen.
__device__ __forceinline__ float relative_weight(float score, float change, float scale) {
    return score == NEGATIVE_INFINITY ? 0.0f : copysignf(exp2_approx(score + change), scale);
}

}  // namespace

#if CLUSTER > 1
#define CLUSTER_SHAPE __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_SHAPE
#endif

extern "C" __global__ void CLUSTER_SHAPE __launch_bounds__(32 * WARPS, 1)
attention_decode(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(1024) char shared_memory[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // A ring: while a block is at segment s, the next one is loaded, and the one after that is looked for.
    __shared__ Segment segments[4];
    __shared__ Meeting meetings[2];
    __shared__ Cursor cursor[1];
    __shared__ float2 statistics[kMerges][kRows][WARPS];
    Chunk* const queries = reinterpret_cast<Chunk*>(shared_memory);  // of two segments in turns
    float4* const partial = reinterpret_cast<float4*>(shared_memory + 2 * kQueryChunks * sizeof(Chunk));

#if CLUSTER > 1
    __shared__ Gathering gathering[1];
    gathering->open();
#endif
    const Team team(p, workers());
#if DEPENDENT
    if (!warm_up(p)) return;
    wait_for_predecessor();
#endif
    if (warp == 0) {
        begin_share(p, team, cursor[0], segments[0], lane);
    } else {
        write_rows_without_keys(p, warp, lane, static_cast<int>(gridDim.x));
    }
    __syncthreads();
    if (segments[0].passes == 0) return;

    KeyTile key[KEY_TILES];
    ValueTile value[KEY_TILES];
    int page[KEY_TILES], page_of_next[KEY_TILES];  // of the pass after the next in the segment; of the first in the next

    const auto tile_of = [&](const Segment& segment, int pass, int i) { return tile_of_warp(segment, warp, pass, i); };
    const auto look_up_pass = [&](const Segment& segment, int pass, int (&pages)[KEY_TILES]) {
#pragma unroll
        for (int i = 0; i < KEY_TILES; ++i) pages[i] = look_up(p, segment, tile_of(segment, pass, i), lane);
    };
    Rows key_rows[KEY_TILES], value_rows[KEY_TILES];  // of what is loaded next
    const auto find_keys = [&](const Segment& segment, int pass, bool of_next) {
#pragma unroll
        for (int i = 0; i < KEY_TILES; ++i)
            key_rows[i].find(p.key, p.key_strides, p, segment, tile_of(segment, pass, i), of_next ? page_of_next[i] : page[i],
                             lane);
    };
    const auto find_values = [&](const Segment& segment, int pass, bool of_next) {
#pragma unroll
        for (int i = 0; i < KEY_TILES; ++i)
            value_rows[i].find(p.value, p.value_strides, p, segment, tile_of(segment, pass, i),
                               of_next ? page_of_next[i] : page[i], lane);
    };
    const auto load_keys = [&] {
#pragma unroll
        for (int i = 0; i < KEY_TILES; ++i) key[i].load_from(key_rows[i], lane);
    };
    const auto load_values = [&] {
#pragma unroll
        for (int i = 0; i < KEY_TILES; ++i) value[i].load_from(value_rows[i], lane);
    };

#if QUEUE
    Queue queue(p, shared_address(partial + kMerges * WARPS * kQuads * 32), warp, lane);
#endif
    TileScales scales[KEY_TILES], next_scales[KEY_TILES];  // with CACHE 2
    const auto load_scales = [&](const Segment& segment, int pass, bool of_next) {
#pragma unroll
        for (int i = 0; i < KEY_TILES; ++i)
            next_scales[i].load(p, segment, tile_of(segment, pass, i), of_next ? page_of_next[i] : page[i], lane);
    };

#if QUEUE
    queue.begin(segments[0]);
#else
    look_up_pass(segments[0], 0, page);
#endif
    copy_queries(p, segments[0], queries);
#if TREE
    find_hidden(p, segments[0]);
#endif
#if QUEUE
    queue.copy_ahead(segments[0], segments[0], false);
#else
    find_keys(segments[0], 0, false);
    find_values(segments[0], 0, false);
    load_keys();
    if (!LATE_VALUES) load_values();
    if (CACHE == 2) load_scales(segments[0], 0, false);
    look_up_pass(segments[0], 1, page);
#endif
    if (threadIdx.x == 0) next_segment(p, cursor[0], segments[1]);
#if QUEUE
    queue.wait();  // for the first pass, with which the queries came
#else
    copy_wait<0>();
#endif
    __syncthreads();

    for (int s = 0;; ++s) {
        const Segment& segment = segments[s % 4];
        const Segment& next = segments[(s + 1) % 4];
        const bool more = next.passes > 0;
        const Chunk* const query = queries + s % 2 * kQueryChunks + lane;
        if (more) {
#if QUEUE
            queue.look_up_next(next);
#else
            look_up_pass(next, 0, page_of_next);
#endif
            copy_queries(p, next, queries + (s + 1) % 2 * kQueryChunks);
#if TREE
            find_hidden(p, segments[(s + 1) % 4]);
#endif
        }
        if (threadIdx.x == 0) {
            arrange(p, cursor[0], segment, meetings[s % 2]);
            next_segment(p, cursor[0], segments[(s + 2) % 4]);
        }

        float output[ROW_TILES][4 * kDimGroups][4] = {};
        float maximum[ROW_TILES][2], sum[ROW_TILES][2];
        float maximum_weight[ROW_TILES][2];  // of weights times scales, where those are relative to it, and so is the output
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
            maximum[r][0] = maximum[r][1] = NEGATIVE_INFINITY;
            maximum_weight[r][0] = maximum_weight[r][1] = NEGATIVE_INFINITY;
            sum[r][0] = sum[r][1] = 0.0f;
        }

        float key_scale = 1.0f, value_scale = 1.0f;
        if (CACHE == 1 && p.key_scales != nullptr) key_scale = p.key_scales[segment.head * p.key_scale_strides.head];
        if (CACHE == 1 && p.value_scales != nullptr) value_scale = p.value_scales[segment.head * p.value_scale_strides.head];
        Chunk held[kChunks];
        const auto query_at = [&](int index) {
            Chunk q = load_shared(shared_address(query + 32 * index));
            if (CACHE > 0) q = {query_as_half(q.x), query_as_half(q.y), query_as_half(q.z), query_as_half(q.w)};
            return q;
        };
        if (kHoldQuery) {
#pragma unroll
            for (int chunk = 0; chunk < kChunks; ++chunk) held[chunk] = query_at(chunk);
        }
        const int passes = segment.passes;
        const auto go_through = [&](auto tiles, auto is_last, int pass) __attribute__((always_inline)) {
            constexpr int kTiles = decltype(tiles)::value;
            const bool last = is_last;
            const Segment& source = last ? next : segment;  // of the loads of this pass
            const int source_pass = last ? 0 : pass + 1;
            const bool loads = !QUEUE && (!last || more);
#pragma unroll
            for (int i = 0; i < KEY_TILES; ++i)
                if (CACHE == 2) scales[i] = next_scales[i];
            if (CACHE == 2 && loads) load_scales(source, source_pass, last);
            if (kFindAhead && loads) {
                find_keys(source, source_pass, last);
                find_values(source, source_pass, last);
            }

#if QUEUE
            queue.wait();
            queue.copy_ahead(segment, next, more);  // also where the pass before was, which all have read
#pragma unroll
            for (int i = 0; i < kTiles; ++i) key[i].fetch(queue.keys(i), lane);
#endif
            // Scores: [0], [1] are key g of queries 2t, 2t + 1; [2], [3] are key g + 8. Where there is one tile of rows, two
            // chains of accumulation halve the latency of this product.
            float score[kTiles][ROW_TILES][4], other[kTiles][ROW_TILES][4];
#pragma unroll
            for (int i = 0; i < kTiles; ++i)
#pragma unroll
                for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
                    for (int e = 0; e < 4; ++e) score[i][r][e] = other[i][r][e] = 0.0f;
#pragma unroll
            for (int chunk = 0; chunk < kChunks; ++chunk)
#pragma unroll
                for (int r = 0; r < ROW_TILES; ++r) {
                    const Chunk q = kHoldQuery ? held[chunk] : query_at(r * kChunks + chunk);
#pragma unroll
                    for (int i = 0; i < kTiles; ++i) {
                        const Chunk low = key[i].chunk(0, chunk, lane);
                        const Chunk high = key[i].chunk(1, chunk, lane);
                        mma(score[i][r], {low.x, high.x, low.y, high.y}, q.x, q.y);
                        mma(ROW_TILES == 1 ? other[i][r] : score[i][r], {low.z, high.z, low.w, high.w}, q.z, q.w);
                    }
                }
#if QUEUE
#pragma unroll
            for (int i = 0; i < kTiles; ++i) value[i].fetch(queue.values(i), lane);
            queue.advance();
#endif
            if (LATE_VALUES) {
                load_values();
            } else if (loads) {
                if (!kFindAhead) find_keys(source, source_pass, last);
                load_keys();
            }

#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
                const int tile = tile_of(segment, pass, i), first = kTileKeys * tile;
                const bool masked = first < segment.all_begin || first + kTileKeys > segment.all_end;
#pragma unroll
                for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        float& x = score[i][r][e];
                        x += other[i][r][e];
                        if (CACHE > 0) x *= CACHE == 2 ? scales[i].key[e / 2] : key_scale;
                        x = SCORE_CHANGES && p.softcap_log2 != 0.0f ? capped(x, p) : x * p.scale_log2;
                    }
                if (masked || SCORE_CHANGES) {
#pragma unroll
                    for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
                        for (int column = 0; column < 2; ++column) {
                            const int row = min(segment.first_row + 8 * r + 2 * (lane % 4) + column, segment.rows - 1);
                            const Row at = locate(row, p);
                            const int position = at.position + segment.past;
                            const int begin = max(segment.first_key, begin_of_seen(p, position));
                            const int end = min(segment.last_key, end_of_seen(p, position));
                            float slope = 0.0f;
                            if (SCORE_CHANGES && p.slopes != nullptr)
                                slope = p.slopes[segment.sequence * p.slopes_row + segment.head * p.group + at.head];
#pragma unroll
                            for (int half = 0; half < 2; ++half) {
                                const int at_key = first + lane / 4 + 8 * half;
                                float& x = score[i][r][2 * half + column];
                                if (SCORE_CHANGES) x -= slope * kLog2E * static_cast<float>(abs(position - at_key));
                                x = at_key >= begin && at_key < end ? x : NEGATIVE_INFINITY;
                            }
                        }
#if TREE
                    const uint32 of_tree = tile - segment.tree_tile;
                    if (of_tree < kTreeTiles) {
#pragma unroll
                        for (int r = 0; r < ROW_TILES; ++r) {
                            const uint32 hidden = segment.hidden[of_tree][4 * r + lane % 4] >> lane / 4;
#pragma unroll
                            for (int e = 0; e < 4; ++e)
                                if (hidden >> (e % 2 * 16 + e / 2 * 8) & 1) score[i][r][e] = NEGATIVE_INFINITY;
                        }
                    }
#endif
                }
            }

            float weight_log2[kTiles][2];
#pragma unroll
            for (int i = 0; i < kTiles; ++i)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    if (kRelativeWeights) weight_log2[i][half] = log2_approx(fabsf(scales[i].value[half]));
            uint32 probability[kTiles][ROW_TILES][2];
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) {
                float shrink[2], shrink_output[2];
                bool rises = false;
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float top = score[0][r][e];
#pragma unroll
                    for (int i = 0; i < kTiles; ++i) top = fmaxf(top, fmaxf(score[i][r][e], score[i][r][2 + e]));
                    top = fmaxf(max_over_keys(top), maximum[r][e]);
                    shrink[e] = shrink_output[e] = exp2_approx(maximum[r][e] - finite_maximum(top));
                    rises |= top > maximum[r][e];
                    maximum[r][e] = top;
                    if (kRelativeWeights) {
                        float heaviest = NEGATIVE_INFINITY;
#pragma unroll
                        for (int i = 0; i < kTiles; ++i)
#pragma unroll
                            for (int half = 0; half < 2; ++half) {
                                const float x = score[i][r][2 * half + e];
                                if (x != NEGATIVE_INFINITY) heaviest = fmaxf(heaviest, x + weight_log2[i][half]);
                            }
                        heaviest = fmaxf(max_over_keys(heaviest), maximum_weight[r][e]);
                        shrink_output[e] = exp2_approx(maximum_weight[r][e] - finite_maximum(heaviest));
                        rises |= heaviest > maximum_weight[r][e];
                        maximum_weight[r][e] = heaviest;
                    }
                }
                // Later maxima seldom rise, and without that all is multiplied by one. With four tiles the branch spills.
                if (ROW_TILES > 2 || __any_sync(0xffffffffu, rises)) {
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        sum[r][e] *= shrink[e];
#pragma unroll
                        for (int m = 0; m < 4 * kDimGroups; ++m) {
                            output[r][m][e] *= shrink_output[e];
                            output[r][m][2 + e] *= shrink_output[e];
                        }
                    }
                }
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float shift = finite_maximum(maximum[r][e]);
#pragma unroll
                    for (int i = 0; i < kTiles; ++i) {
                        float& low = score[i][r][e];
                        float& high = score[i][r][2 + e];
                        const float scores[2] = {low, high};
                        low = exp2_approx(low - shift);
                        high = exp2_approx(high - shift);
                        sum[r][e] += low + high;
                        // The scale of a key that nobody sees may be anything.
                        if (kRelativeWeights) {
                            const float heaviest = finite_maximum(maximum_weight[r][e]);
                            low = relative_weight(scores[0], weight_log2[i][0] - heaviest, scales[i].value[0]);
                            high = relative_weight(scores[1], weight_log2[i][1] - heaviest, scales[i].value[1]);
                        } else if (CACHE == 2) {
                            low = low > 0.0f ? low * scales[i].value[0] : 0.0f;
                            high = high > 0.0f ? high * scales[i].value[1] : 0.0f;
                        }
                    }
                }
#pragma unroll
                for (int i = 0; i < kTiles; ++i) {
                    probability[i][r][0] = transpose_matrix(pack(score[i][r][0], score[i][r][1]));
                    probability[i][r][1] = transpose_matrix(pack(score[i][r][2], score[i][r][3]));
                }
            }

#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
                value[i].clear_unseen(tile_of(segment, pass, i), segment, lane);
#pragma unroll
                for (int group = 0; group < kDimGroups; ++group)
#pragma unroll
                    for (int w = 0; w < 4; ++w) {
                        uint32 dims[4];
                        value[i].pair_keys(group, w, dims);
#pragma unroll
                        for (int r = 0; r < ROW_TILES; ++r)
                            mma(output[r][4 * group + w], dims, probability[i][r][0], probability[i][r][1]);
                    }
            }
            if (loads) {
                if (!kFindAhead) find_values(source, source_pass, last);
                if (LATE_VALUES) {
                    find_keys(source, source_pass, last);
                    load_keys();
                } else {
                    load_values();
                }
                look_up_pass(source, source_pass + 1, page);
            }
        };
        using All = Constant<int, KEY_TILES>;
        if (!kShortPasses) {
            for (int pass = 0; pass < passes; ++pass) go_through(All{}, pass + 1 == passes, pass);
        } else {
            for (int pass = 0; pass + 1 < passes; ++pass) go_through(All{}, Constant<bool, false>{}, pass);
            if (kTileKeys * tile_of(segment, passes - 1, 1) < segment.last_key)
                go_through(All{}, Constant<bool, true>{}, passes - 1);
            else
                go_through(Constant<int, 1>{}, Constant<bool, true>{}, passes - 1);
        }
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
            for (int e = 0; e < 2; ++e) sum[r][e] = sum_over_keys(sum[r][e]);
            float unit[2] = {value_scale, value_scale};  // of the output
#pragma unroll
            for (int e = 0; e < 2; ++e)
                if (kRelativeWeights)
                    unit[e] = maximum_weight[r][e] == NEGATIVE_INFINITY
                                  ? 0.0f
                                  : exp2_approx(maximum_weight[r][e] - finite_maximum(maximum[r][e]));
#pragma unroll
            for (int m = 0; m < 4 * kDimGroups; ++m)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (CACHE > 0) output[r][m][e] *= unit[e % 2];
        }
#if DEPENDENT
        // Not earlier: the successor's blocks would only wait, in the place of this grid's.
        if (!more) allow_successor();
#endif

        // The warps' results meet in shared memory, where those of the segment before may still be read.
        const int merge = s % kMerges;
        float4* const results = partial + merge * WARPS * kQuads * 32;
        if (kMerges == 1) __syncthreads();
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
            if (lane < 4) {
                statistics[merge][8 * r + 2 * lane][warp] = make_float2(maximum[r][0], sum[r][0]);
                statistics[merge][8 * r + 2 * lane + 1][warp] = make_float2(maximum[r][1], sum[r][1]);
            }
#pragma unroll
            for (int group = 0; group < kDimGroups; ++group)
#pragma unroll
                for (int q = 0; q < 4; ++q) {
                    const int column = q / 2, half = q % 2, index = 4 * (r * kDimGroups + group) + q;
                    const auto& first = output[r][4 * group + 2 * half];
                    const auto& second = output[r][4 * group + 2 * half + 1];
                    results[(warp * kQuads + index) * 32 + lane] =
                        make_float4(first[column], first[2 + column], second[column], second[2 + column]);
                }
        }
#if QUEUE
        queue.end_segment(passes);
#else
        copy_wait<0>();  // the next segment's queries
#endif
        __syncthreads();
#if CLUSTER > 1
        if (segment.slot == kOfCluster) cluster::wait_for_peers();
#endif

        const int of = CLUSTER > 1 && segment.slot == kOfCluster ? lane : lane_of_thread();  // whose sums this thread merges
#pragma unroll
        for (int i = 0; i < kShares; ++i) {
            const int index = warp + i * WARPS;
            if (kQuads % WARPS != 0 && index >= kQuads) break;
            float weights[WARPS];
            const Statistics total = combine<WARPS>(statistics[merge][Quad(index).row(of)], 1, weights);
            float4 merged = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
            for (int w = 0; w < WARPS; ++w) accumulate(merged, weights[w], results[(w * kQuads + index) * 32 + of]);
#if CLUSTER > 1
            if (segment.slot == kOfCluster) gathering->send(lane, index, merged, total);
            else
#endif
            hand_on(p, segment, of, index, merged, total);
        }
#if CLUSTER > 1
        if (segment.slot == kOfCluster) {
            gathering->finish(p, segment, warp, lane);
            return;
        }
#endif
        if (segment.slot >= 0 && warp < kQuads) meet(p, segment, meetings[s % 2], warp, lane);
        if (ROW_TILES > 2 ? next.passes == 0 : !more) return;  // with four tiles of rows `more` would spill
    }
}

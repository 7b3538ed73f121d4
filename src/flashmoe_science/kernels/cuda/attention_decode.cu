// Attention of few query rows over a cache whose lengths lie in device memory: decode, speculative steps, any mixture of
// sequences, packed or in pages, in one launch that depends on no length.
//
// Products and fragments are those of attention_small.cu: S^T = K Q^T and O^T = V^T P^T by mma.m16n8k16, keys and values
// straight from global memory to registers. What differs is the work: a block gets an equal share of all keys of all
// sequences (decode/schedule.cuh), which it goes through segment by segment, a segment being consecutive keys of one set of
// 8 * ROW_TILES query rows of one key/value head. The loads of a segment's first keys are issued before the last products of
// the one before, so that memory is busy while the warps of a block merge. Sets that several blocks share are combined by
// the last of them (decode/results.cuh).
//
// With grouped heads the rows of the heads that share keys are packed: row = position * group + head.
// (g = lane / 4, t = lane % 4 throughout.)
//
// Macros, all integers:
//   HEAD_DIM, VALUE_DIM  8..256, multiples of 8
//   ELEMENT_BF16   1: bfloat16, 0: float16; MMA_K 16, or 8 for sm_75 (types.cuh)
//   ROW_TILES      query rows of a set / 8
//   WARPS          warps of a block
//   KEY_TILES      tiles of 16 keys that a warp holds at a time
//   LATE_VALUES    1: V is loaded after Q K^T, into the registers that K leaves (many rows, large dims)
//   PAGES          how keys are found (decode/tiles.cuh)
//   SCORE_CHANGES  1: scores may have a soft cap and ALiBi slopes, which are parameters; 0: they have not
//   DEPENDENT      1: launched with programmatic stream serialization (sm_90), so that it may start early
#include "decode/results.cuh"
#include "decode/tiles.cuh"
#include "mma/m16n8k16.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/dependent_launch.cuh"
#include "ptx/movmatrix.cuh"

namespace {

constexpr int kQueryChunks = 32 * ROW_TILES * kChunks;  // of one set of rows

// Starts copying a segment's queries to shared memory, in the order in which lanes read them. Rows past the end are zero.
__device__ __forceinline__ void copy_queries(const Parameters& p, const Segment& segment, Chunk* to) {
    for (int i = threadIdx.x; i < kQueryChunks; i += 32 * WARPS) {
        const int lane = i % 32, chunk = i / 32 % kChunks, tile = i / (32 * kChunks);
        const int row = segment.first_row + 8 * tile + lane / 4, dim = 32 * chunk + 8 * (lane % 4);
        const bool valid = row < segment.rows && (32 * chunk + 32 <= HEAD_DIM || dim < HEAD_DIM);
        const Row at = locate(valid ? row : 0, p);
        const uint64 token = static_cast<uint32>(segment.query_start + at.position);
        const uint64 head = static_cast<uint32>(segment.head * p.group + at.head);
        const uint64 offset = token * p.query_row + head * p.query_head + (valid ? dim * kElementBytes : 0);
        copy_chunk(shared_address(&to[i]), p.query + offset, valid);
    }
    copy_commit();
}

// softcap * tanh(scale * x / softcap) in units of log2. 1 - 2 / (1 + exp(2 y)) is tanh(y), to float32's precision of 1.
__device__ __forceinline__ float capped(float x, const Parameters& p) {
    return p.softcap_log2 * (1.0f - 2.0f * reciprocal(1.0f + exp2_approx(x * p.softcap_scale)));
}

}  // namespace

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
attention_decode(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(1024) char shared_memory[];
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    // A ring: while a block is at segment s, the next one is loaded, and the one after that is looked for.
    __shared__ Segment segments[4];
    __shared__ Cursor cursor[1];
    __shared__ float2 statistics[kRows][WARPS];
    Chunk* const queries = reinterpret_cast<Chunk*>(shared_memory);  // of two segments in turns
    float4* const partial = reinterpret_cast<float4*>(shared_memory + 2 * kQueryChunks * sizeof(Chunk));

#if DEPENDENT
    wait_for_predecessor();
#endif
    if (warp == 0) {
        begin_share(p, cursor[0], lane);
        if (lane == 0) {
            next_segment(p, cursor[0], segments[0]);
            next_segment(p, cursor[0], segments[1]);
        }
    } else {
        write_rows_without_keys(p, warp, lane);
    }
    __syncthreads();
    if (segments[0].passes == 0) return;

    KeyTile key[KEY_TILES];
    ValueTile value[KEY_TILES];
    int page[KEY_TILES], page_ahead[KEY_TILES], page_of_next[KEY_TILES];  // see look_up

    const auto tile_of = [&](const Segment& segment, int pass, int i) {
        return segment.tile + warp + WARPS * (KEY_TILES * pass + i);
    };
    const auto look_up_pass = [&](const Segment& segment, int pass, int (&pages)[KEY_TILES]) {
#pragma unroll
        for (int i = 0; i < KEY_TILES; ++i) pages[i] = look_up(p, segment, tile_of(segment, pass, i), lane);
    };
    const auto load_keys = [&](const Segment& segment, int pass) {
#pragma unroll
        for (int i = 0; i < KEY_TILES; ++i)
            key[i].load_from(Rows(p.key, p.key_strides, p, segment, tile_of(segment, pass, i), page[i]), lane);
    };
    const auto load_values = [&](const Segment& segment, int pass) {
#pragma unroll
        for (int i = 0; i < KEY_TILES; ++i)
            value[i].load_from(Rows(p.value, p.value_strides, p, segment, tile_of(segment, pass, i), page[i]), lane);
    };

    look_up_pass(segments[0], 0, page);
    copy_queries(p, segments[0], queries);
    load_keys(segments[0], 0);
    if (!LATE_VALUES) load_values(segments[0], 0);
    look_up_pass(segments[0], 1, page_ahead);
    copy_wait<0>();
    __syncthreads();

    for (int s = 0;; ++s) {
        const Segment& segment = segments[s % 4];
        const Segment& next = segments[(s + 1) % 4];
        const bool more = next.passes > 0;
        if (threadIdx.x == 0) next_segment(p, cursor[0], segments[(s + 2) % 4]);
        const Chunk* const query = queries + s % 2 * kQueryChunks + lane;
        if (more) {
            look_up_pass(next, 0, page_of_next);
            copy_queries(p, next, queries + (s + 1) % 2 * kQueryChunks);
        }

        float output[ROW_TILES][4 * kDimGroups][4] = {};
        float maximum[ROW_TILES][2], sum[ROW_TILES][2];
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
            maximum[r][0] = maximum[r][1] = NEGATIVE_INFINITY;
            sum[r][0] = sum[r][1] = 0.0f;
        }

        const int passes = segment.passes;
        for (int pass = 0; pass < passes; ++pass) {
            const bool last = pass + 1 == passes;
            const Segment& source = last ? next : segment;  // of the loads of this pass
            const int source_pass = last ? 0 : pass + 1;

            // Scores: [0], [1] are key g of queries 2t, 2t + 1; [2], [3] are key g + 8. Two chains of accumulation halve the
            // latency of this product.
            float score[KEY_TILES][ROW_TILES][4], other[KEY_TILES][ROW_TILES][4];
#pragma unroll
            for (int i = 0; i < KEY_TILES; ++i)
#pragma unroll
                for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
                    for (int e = 0; e < 4; ++e) score[i][r][e] = other[i][r][e] = 0.0f;
#pragma unroll
            for (int chunk = 0; chunk < kChunks; ++chunk)
#pragma unroll
                for (int r = 0; r < ROW_TILES; ++r) {
                    const Chunk q = load_shared(shared_address(query + 32 * (r * kChunks + chunk)));
#pragma unroll
                    for (int i = 0; i < KEY_TILES; ++i) {
                        const Chunk low = key[i].chunk(0, chunk, lane);
                        const Chunk high = key[i].chunk(1, chunk, lane);
                        mma(score[i][r], {low.x, high.x, low.y, high.y}, q.x, q.y);
                        mma(other[i][r], {low.z, high.z, low.w, high.w}, q.z, q.w);
                    }
                }
            if (LATE_VALUES) load_values(segment, pass);
#pragma unroll
            for (int i = 0; i < KEY_TILES; ++i) page[i] = last ? page_of_next[i] : page_ahead[i];
            if (!LATE_VALUES && (!last || more)) load_keys(source, source_pass);

#pragma unroll
            for (int i = 0; i < KEY_TILES; ++i) {
                const int tile = tile_of(segment, pass, i), first = kTileKeys * tile;
                const bool masked = first < segment.all_begin || first + kTileKeys > segment.all_end;
#pragma unroll
                for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        float& x = score[i][r][e];
                        x += other[i][r][e];
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
                            const int begin = max(segment.first_key, position - p.left);
                            const int end = min(segment.last_key, position + p.right + 1);
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
                }
            }

            uint32 probability[KEY_TILES][ROW_TILES][2];
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float top = score[0][r][e];
#pragma unroll
                    for (int i = 0; i < KEY_TILES; ++i) top = fmaxf(top, fmaxf(score[i][r][e], score[i][r][2 + e]));
                    top = fmaxf(max_over_keys(top), maximum[r][e]);
                    const float shift = finite_maximum(top);
                    const float shrink = exp2_approx(maximum[r][e] - shift);
                    maximum[r][e] = top;
                    sum[r][e] *= shrink;
#pragma unroll
                    for (int m = 0; m < 4 * kDimGroups; ++m) {
                        output[r][m][e] *= shrink;
                        output[r][m][2 + e] *= shrink;
                    }
#pragma unroll
                    for (int i = 0; i < KEY_TILES; ++i) {
                        score[i][r][e] = exp2_approx(score[i][r][e] - shift);
                        score[i][r][2 + e] = exp2_approx(score[i][r][2 + e] - shift);
                        sum[r][e] += score[i][r][e] + score[i][r][2 + e];
                    }
                }
#pragma unroll
                for (int i = 0; i < KEY_TILES; ++i) {
                    probability[i][r][0] = transpose_matrix(pack(score[i][r][0], score[i][r][1]));
                    probability[i][r][1] = transpose_matrix(pack(score[i][r][2], score[i][r][3]));
                }
            }

#pragma unroll
            for (int i = 0; i < KEY_TILES; ++i) {
                value[i].clear_unseen(tile_of(segment, pass, i), segment, lane);
#pragma unroll
                for (int group = 0; group < kDimGroups; ++group)
#pragma unroll
                    for (int w = 0; w < 4; ++w) {
                        const uint32 first = word(value[i].rows[0].piece[group], w);
                        const uint32 second = word(value[i].rows[1].piece[group], w);
                        const uint32 ninth = word(value[i].rows[2].piece[group], w);
                        const uint32 tenth = word(value[i].rows[3].piece[group], w);
                        const uint32 dims[4] = {__byte_perm(first, second, 0x5410), __byte_perm(first, second, 0x7632),
                                                __byte_perm(ninth, tenth, 0x5410), __byte_perm(ninth, tenth, 0x7632)};
#pragma unroll
                        for (int r = 0; r < ROW_TILES; ++r)
                            mma(output[r][4 * group + w], dims, probability[i][r][0], probability[i][r][1]);
                    }
            }
            if (!last || more) {
                if (LATE_VALUES) load_keys(source, source_pass);
                else load_values(source, source_pass);
                look_up_pass(source, source_pass + 1, page_ahead);
            }
        }
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
            for (int e = 0; e < 2; ++e) sum[r][e] = sum_over_keys(sum[r][e]);
#if DEPENDENT
        // Not earlier: the successor's blocks would only wait, in the place of this grid's.
        if (!more) allow_successor();
#endif

        // The warps' results meet in shared memory, once those of the segment before have been read there.
        __syncthreads();
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
            if (lane < 4) {
                statistics[8 * r + 2 * lane][warp] = make_float2(maximum[r][0], sum[r][0]);
                statistics[8 * r + 2 * lane + 1][warp] = make_float2(maximum[r][1], sum[r][1]);
            }
#pragma unroll
            for (int group = 0; group < kDimGroups; ++group)
#pragma unroll
                for (int q = 0; q < 4; ++q) {
                    const int column = q / 2, half = q % 2, index = 4 * (r * kDimGroups + group) + q;
                    const auto& first = output[r][4 * group + 2 * half];
                    const auto& second = output[r][4 * group + 2 * half + 1];
                    partial[(warp * kQuads + index) * 32 + lane] =
                        make_float4(first[column], first[2 + column], second[column], second[2 + column]);
                }
        }
        copy_wait<0>();  // the next segment's queries
        __syncthreads();

#pragma unroll
        for (int i = 0; i < kShares; ++i) {
            const int index = warp + i * WARPS;
            if (kQuads % WARPS != 0 && index >= kQuads) break;
            float weights[WARPS];
            const Statistics total = combine<WARPS>(statistics[Quad(index).row(lane)], 1, weights);
            float4 merged = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
            for (int w = 0; w < WARPS; ++w) accumulate(merged, weights[w], partial[(w * kQuads + index) * 32 + lane]);
            if (segment.slot < 0) write(p, segment, lane, index, merged, total);
            else leave(p, segment, lane, index, merged, total);
        }
        if (segment.slot >= 0 && segment.meets && warp < kQuads && last_to_arrive(p, segment, warp, lane)) {
            for (int index = warp; index < kQuads; index += WARPS) {
                float4 merged;
                const Statistics total = combine_pieces(p, segment, lane, index, merged);
                write(p, segment, lane, index, merged, total);
            }
        }
        if (!more) return;
    }
}

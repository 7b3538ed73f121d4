// Attention forward for calls that are all latency: short sequences, few heads, decode.
//
// One block owns 8 * ROW_TILES query rows of one key/value head. The keys are cut into tiles of 16 that are dealt out
// to the warps of the block and, with CLUSTER > 1, to the blocks of a cluster. Each warp runs softmax over its own
// keys; the partial results meet once at the end, through shared memory, then through the cluster.
//
// Products are computed transposed, S^T = K Q^T and O^T = V^T P^T, so that queries are the narrow (n = 8) side of
// mma.m16n8k16. No operand passes through shared memory:
//   K and Q  The reduction index of a matrix product may be permuted if both sides agree. A lane loads 8 contiguous
//            elements (16 bytes) and calls them its k = {2t, 2t+1, 2t+8, 2t+9} of two k-steps.
//   V        A lane loads the same 8 dims of keys 2t, 2t+1, 2t+8, 2t+9; interleaving pairs of keys by byte permutes
//            gives A fragments in which row g of m-tile w is dim 8g + 2w and row g + 8 is dim 8g + 2w + 1.
//   P        movmatrix turns the accumulator (keys by lane group, queries by lane in group) into a B fragment.
// The output of a lane is then 8 contiguous dims of a query. (g = lane / 4, t = lane % 4 throughout.)
//
// Macros, all integers:
//   HEAD_DIM       8..256, a multiple of 8
//   PADDED         1: the tensors' head_dim is a parameter, at most HEAD_DIM; 0: it is HEAD_DIM
//   ELEMENT_BF16   1: bfloat16, 0: float16; MMA_K 16, or 8 for sm_75 (types.cuh)
//   ROW_TILES      query rows of a block / 8
//   WARPS          warps of a block
//   KEY_TILES      tiles of 16 keys that a warp holds at a time
//   CLUSTER        blocks that share one set of query rows (1, 2, 4, 8, 16; above 1 needs sm_90, 16 is not portable)
//   SINGLE_PASS    1: the caller proves seqlen_k <= 16 * KEY_TILES * WARPS * CLUSTER
//   LATE_VALUES    1: V is loaded after Q K^T, into the registers that K leaves (large HEAD_DIM)
//   SPLIT          1: the keys of one set of query rows are split over `splits` clusters, a parameter (small/split.cuh)
//   DEPENDENT      1: launched with programmatic stream serialization (sm_90), so that it may start early
//   ABLATION       0: the kernel. For measurement only, wrong results: 1 loads and merge, 2 no softmax, 3 no merge
//
// With grouped heads the rows of the heads that share keys are packed: row = position * group + head.
#include "mma/m16n8k16.cuh"
#include "ptx/cluster.cuh"
#include "ptx/dependent_launch.cuh"
#include "ptx/ldmatrix.cuh"
#include "small/merge.cuh"
#include "small/operands.cuh"
#include "small/parameters.cuh"
#include "types.cuh"
#if SPLIT
#include "small/split.cuh"
#endif

#ifndef ABLATION
#define ABLATION 0
#endif

#if CLUSTER > 1
#define CLUSTER_SHAPE __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_SHAPE
#endif

extern "C" __global__ void CLUSTER_SHAPE __launch_bounds__(32 * WARPS, 1)
attention_small(const __grid_constant__ Parameters p) {
    const int lane = threadIdx.x % 32;
    const int warp = WARPS == 1 ? 0 : threadIdx.x / 32;
#if CLUSTER > 1
    // What the blocks of the cluster send this one: their results for the quads that it finishes.
    __shared__ float4 gathered[CLUSTER][kShares][32];
    __shared__ float2 gathered_statistics[CLUSTER][kRows];
    __shared__ uint64 mailbox;
    const int part = cluster::rank();
    const int own_shares = (kQuads - part + CLUSTER - 1) / CLUSTER;
    if (threadIdx.x == 0)
        cluster::open_mailbox(&mailbox, CLUSTER * (sizeof(gathered[0][0]) * own_shares + sizeof(gathered_statistics[0])));
    cluster::announce();
#else
    const int part = 0;
#endif
    const int rows = p.seqlen_q * p.group;
#if SPLIT
    const Part own(p);
    const int row_block = own.row_block, split = own.split, step = kStep * p.splits;
#else
    const int row_block = static_cast<int>(blockIdx.x / CLUSTER), split = 0, step = kStep;
#endif
    const int first_row = row_block * kRows;
    const int keys = key_limit(min(first_row + kRows, rows) - 1, p);  // that the block's last row sees
    const int key_tiles = (keys + 15) / 16;

    const char* const key_base = p.key + blockIdx.z * p.key_strides.batch + blockIdx.y * p.key_strides.head;
    const char* const value_base = p.value + blockIdx.z * p.value_strides.batch + blockIdx.y * p.value_strides.head;

    float output[ROW_TILES][4 * kDimGroups][4] = {};
    float maximum[ROW_TILES][2], sum[ROW_TILES][2];
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
        maximum[r][0] = maximum[r][1] = NEGATIVE_INFINITY;
        sum[r][0] = sum[r][1] = 0.0f;
    }

    int tile = (split * CLUSTER + part) * WARPS + warp;
#if DEPENDENT
    wait_for_predecessor();
    if (SINGLE_PASS) allow_successor();
#endif
    if (tile < key_tiles) {
        Chunk query[ROW_TILES][kChunks];
        KeyTile key[KEY_TILES];
        ValueTile value[KEY_TILES];

        const auto load_keys = [&](int from) {
#pragma unroll
            for (int i = 0; i < KEY_TILES; ++i)
                key[i].load_from(key_base, p.key_strides.row, from + i * step, p, lane);
        };
        const auto load_values = [&](int from) {
#pragma unroll
            for (int i = 0; i < KEY_TILES; ++i)
                value[i].load_from(value_base, p.value_strides.row, from + i * step, p, lane);
        };

#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
            const Row at = locate(min(first_row + 8 * r + lane / 4, rows - 1), p);
            const uint64 offset = blockIdx.z * p.query_strides.batch +
                                  (blockIdx.y * p.group + at.head) * p.query_strides.head +
                                  offset_of(at.position, p.query_strides.row);
#pragma unroll
            for (int chunk = 0; chunk < kChunks; ++chunk) {
                const int dim = 32 * chunk + 8 * (lane % 4);
                query[r][chunk] = Chunk{0, 0, 0, 0};
                if ((!PADDED && 32 * chunk + 32 <= HEAD_DIM) || dim < head_dim(p))
                    query[r][chunk] = load_global(p.query + offset + dim * kElementBytes);
            }
        }
        load_keys(tile);
        if (!LATE_VALUES) load_values(tile);

        // Orders memory, so every load above is issued before the first product; ptxas otherwise sinks most of them
        // below it, which costs another round trip to L2.
        __syncwarp();

        int limit[ROW_TILES][2];
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
            for (int e = 0; e < 2; ++e) limit[r][e] = key_limit(first_row + 8 * r + 2 * (lane % 4) + e, p);

        while (true) {
            const int next = tile + KEY_TILES * step;
            const bool more = !SINGLE_PASS && next < key_tiles;

            // Scores: [0], [1] are key g of queries 2t, 2t + 1; [2], [3] are key g + 8.
            float score[KEY_TILES][ROW_TILES][4];
#if ABLATION != 1
            // Two chains of accumulation halve the latency of this product.
            float other[KEY_TILES][ROW_TILES][4];
#pragma unroll
            for (int i = 0; i < KEY_TILES; ++i)
#pragma unroll
                for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
                    for (int e = 0; e < 4; ++e) score[i][r][e] = other[i][r][e] = 0.0f;
#pragma unroll
            for (int chunk = 0; chunk < kChunks; ++chunk)
#pragma unroll
                for (int i = 0; i < KEY_TILES; ++i) {
                    const Chunk low = key[i].chunk(0, chunk, p, lane);
                    const Chunk high = key[i].chunk(1, chunk, p, lane);
#pragma unroll
                    for (int r = 0; r < ROW_TILES; ++r) {
                        const Chunk& q = query[r][chunk];
                        mma(score[i][r], {low.x, high.x, low.y, high.y}, q.x, q.y);
                        mma(other[i][r], {low.z, high.z, low.w, high.w}, q.z, q.w);
                    }
                }
            if (LATE_VALUES) load_values(tile);
            else if (more) load_keys(next);
#pragma unroll
            for (int i = 0; i < KEY_TILES; ++i) value[i].clear_past_end(tile + i * step, p, lane);
#pragma unroll
            for (int i = 0; i < KEY_TILES; ++i)
#pragma unroll
                for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const int at = 16 * (tile + i * step) + lane / 4 + 8 * (e / 2);
                        float& s = score[i][r][e];
                        s = (s + other[i][r][e]) * p.scale_log2;
                        s = at < limit[r][e % 2] ? s : NEGATIVE_INFINITY;
                    }
#else
            if (LATE_VALUES) load_values(tile);
            float mixed = 0.0f;
#pragma unroll
            for (int i = 0; i < KEY_TILES; ++i)
#pragma unroll
                for (int h = 0; h < 2; ++h)
#pragma unroll
                    for (int chunk = 0; chunk < kChunks; ++chunk)
#pragma unroll
                        for (int w = 0; w < 4; ++w)
                            mixed += __int_as_float(word(key[i].rows[h].piece[chunk], w) ^ word(query[0][chunk], w));
#endif

            uint32 probability[KEY_TILES][ROW_TILES][2];
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) {
#if ABLATION == 0 || ABLATION == 3
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float top = score[0][r][e];
#pragma unroll
                    for (int i = 0; i < KEY_TILES; ++i) top = fmaxf(top, fmaxf(score[i][r][e], score[i][r][2 + e]));
                    top = max_over_keys(top);
                    if (!SINGLE_PASS) {
                        top = fmaxf(top, maximum[r][e]);
                        const float shrink = exp2_approx(maximum[r][e] - finite_maximum(top));
                        sum[r][e] *= shrink;
#pragma unroll
                        for (int m = 0; m < 4 * kDimGroups; ++m) {
                            output[r][m][e] *= shrink;
                            output[r][m][2 + e] *= shrink;
                        }
                    }
                    maximum[r][e] = top;
                    const float shift = finite_maximum(top);
#pragma unroll
                    for (int i = 0; i < KEY_TILES; ++i) {
                        score[i][r][e] = exp2_approx(score[i][r][e] - shift);
                        score[i][r][2 + e] = exp2_approx(score[i][r][2 + e] - shift);
                        sum[r][e] += score[i][r][e] + score[i][r][2 + e];
                    }
                }
#elif ABLATION == 2
                maximum[r][0] = maximum[r][1] = 0.0f;
                sum[r][0] = sum[r][1] = 1.0f;
#endif
#if ABLATION != 1
#pragma unroll
                for (int i = 0; i < KEY_TILES; ++i) {
                    probability[i][r][0] = transpose_matrix(pack(score[i][r][0], score[i][r][1]));
                    probability[i][r][1] = transpose_matrix(pack(score[i][r][2], score[i][r][3]));
                }
#endif
            }

#if ABLATION != 1
#pragma unroll
            for (int i = 0; i < KEY_TILES; ++i)
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
#else
#pragma unroll
            for (int i = 0; i < KEY_TILES; ++i)
#pragma unroll
                for (int k = 0; k < 4; ++k)
#pragma unroll
                    for (int group = 0; group < kDimGroups; ++group)
#pragma unroll
                        for (int w = 0; w < 4; ++w)
                            output[0][4 * group + w][k] += mixed + __int_as_float(word(value[i].rows[k].piece[group], w));
            if (more) load_keys(next);
#endif
            if (!more) break;
            if (LATE_VALUES) load_keys(next);
            else load_values(next);
            tile = next;
        }
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
            for (int e = 0; e < 2; ++e) sum[r][e] = sum_over_keys(sum[r][e]);
    }
#if DEPENDENT
    // Not earlier where there are many keys: the successor's blocks would only wait, in the place of this grid's.
    if (!SINGLE_PASS) allow_successor();
#endif

    const auto own_quad = [&](int r, int group, int e, int half) {
        const auto& first = output[r][4 * group + 2 * half];
        const auto& second = output[r][4 * group + 2 * half + 1];
        return make_float4(first[e], first[2 + e], second[e], second[2 + e]);
    };

    const auto finish = [&](int index, const float4& x, const Statistics& total) {
#if SPLIT
        leave(p, own, first_row + Quad(index).row(lane) < rows, lane, index, x, total);
#else
        write(p, first_row, rows, lane, index, x, total);
#endif
    };

#if (WARPS == 1 && CLUSTER == 1) || ABLATION == 3
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
        for (int group = 0; group < kDimGroups; ++group)
#pragma unroll
            for (int q = 0; q < 4; ++q)
                finish(4 * (r * kDimGroups + group) + q, own_quad(r, group, q / 2, q % 2),
                       {maximum[r][q / 2], sum[r][q / 2]});
#else
    __shared__ float4 partial[WARPS][kQuads][32];
    __shared__ float2 statistics[kRows][WARPS];

#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
        if (lane < 4) {
            statistics[8 * r + 2 * lane][warp] = make_float2(maximum[r][0], sum[r][0]);
            statistics[8 * r + 2 * lane + 1][warp] = make_float2(maximum[r][1], sum[r][1]);
        }
#pragma unroll
        for (int group = 0; group < kDimGroups; ++group)
#pragma unroll
            for (int q = 0; q < 4; ++q)
                partial[warp][4 * (r * kDimGroups + group) + q][lane] = own_quad(r, group, q / 2, q % 2);
    }
    __syncthreads();

#if CLUSTER > 1
    cluster::wait_for_peers();
#endif
#pragma unroll
    for (int i = 0; i < (kQuads + WARPS - 1) / WARPS; ++i) {
        const int index = warp + i * WARPS;
        if (kQuads % WARPS != 0 && index >= kQuads) break;
        const Quad quad(index);
        float weights[WARPS];
        const Statistics total = combine<WARPS>(statistics[quad.row(lane)], 1, weights);
        float4 merged = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) accumulate(merged, weights[w], partial[w][index][lane]);
#if CLUSTER > 1
        const int owner = index % CLUSTER;
        cluster::post(cluster::peer_address(&gathered[part][index / CLUSTER][lane], owner),
                      cluster::peer_address(&mailbox, owner), merged);
        // Every block that finishes something needs the statistics.
        constexpr int kReceivers = CLUSTER < kQuads ? CLUSTER : kQuads;
        if (quad.group == 0 && quad.half == 0)
#pragma unroll
            for (int first = 0; first < kReceivers; first += 8) {
                const int receiver = first + lane / 4;
                if (receiver < kReceivers)
                    cluster::post(cluster::peer_address(&gathered_statistics[part][quad.row(lane)], receiver),
                                  cluster::peer_address(&mailbox, receiver), make_float2(total.maximum, total.sum));
            }
#else
        finish(index, merged, total);
#endif
    }
#if CLUSTER > 1
    if (own_shares == 0) return;
    cluster::wait_for_mail(&mailbox);
#pragma unroll
    for (int i = 0; i < (kShares + WARPS - 1) / WARPS; ++i) {
        const int share = warp + i * WARPS;
        const int index = share * CLUSTER + part;
        if ((kShares % WARPS != 0 && share >= kShares) || (kQuads % CLUSTER != 0 && index >= kQuads)) break;
        float weights[CLUSTER];
        const Statistics total = combine<CLUSTER>(&gathered_statistics[0][Quad(index).row(lane)], kRows, weights);
        float4 merged = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int c = 0; c < CLUSTER; ++c) accumulate(merged, weights[c], gathered[c][share][lane]);
        finish(index, merged, total);
    }
#endif
#endif

#if SPLIT
    // The quads that this warp finished.
    if (warp >= kShares || warp * CLUSTER + part >= kQuads) return;
    if (!last_to_arrive(p, own, part, warp, lane)) return;
#pragma unroll
    for (int i = 0; i < (kShares + WARPS - 1) / WARPS; ++i) {
        const int index = (warp + i * WARPS) * CLUSTER + part;
        if (index >= kQuads) break;
        float4 merged;
        const bool used = first_row + Quad(index).row(lane) < rows;
        const Statistics total = combine_splits(p, own, used, lane, index, merged);
        write(p, first_row, rows, lane, index, merged, total);
    }
#endif
}

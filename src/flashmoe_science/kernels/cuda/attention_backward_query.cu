// The first pass of attention backward for sm_75 and later: the gradient of the query, on mma.sync.
//
// A block of WARPS warps owns BLOCK_M query rows of one head and walks over the keys as the forward kernel does. It computes
// delta of its rows and publishes it with the log-sum-exp for the pass over keys (attention_backward_key_value.cu).
//
// Macros: HEAD_DIM (a multiple of 16, at least the tensor's), BLOCK_M, BLOCK_N (keys per step), CHUNK (keys whose scores are
// held at a time), WARPS, REGISTER_STEPS (how many 16-wide slices of the query and of the
// output's gradient stay in registers), WINDOW and SOFTCAP (backward/scores.cuh), ABLATE (ablation.cuh), and those of types.cuh.
#include "ablation.cuh"
#include "backward/parameters.cuh"
#include "backward/products.cuh"
#include "backward/scores.cuh"
#include "backward/statistics.cuh"
#include "backward/tile_copy.cuh"
#include "backward/write_rows.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/global.cuh"
#include "ptx/shared_floats.cuh"
#include "softmax.cuh"
#include "swizzle.cuh"
#include "types.cuh"

constexpr int kThreads = WARPS * 32;
constexpr int kRowTiles = BLOCK_M / (16 * WARPS);
constexpr int kWarpRows = 16 * kRowTiles;
constexpr int kOutTiles = HEAD_DIM / 8;
constexpr int kChunkTiles = CHUNK / 8;
constexpr int kChunks = BLOCK_N / CHUNK;
constexpr int kStages = 2;  // of keys, and of values

using T = Tile<HEAD_DIM>;
constexpr int kRowsBytes = BLOCK_M * T::kRowBytes;
constexpr int kBufferBytes = BLOCK_N * T::kRowBytes;

static_assert(HEAD_DIM % 16 == 0 && CHUNK % 16 == 0 && BLOCK_N % CHUNK == 0 && BLOCK_M == kWarpRows * WARPS, "tiles of 16");
static_assert(MMA_K == 16 || !ELEMENT_BF16, "bfloat16 needs m16n8k16");

using Scores = float[kRowTiles][kChunkTiles][4];

// Rows that a warp owns.
struct Rows : WorkItem {
    int batch, head, kv_head, first_row, warp_row;

    __device__ __forceinline__ explicit Rows(const BackwardParameters& p) : WorkItem(p) {
        batch = slice / p.num_heads;
        head = slice % p.num_heads;
        kv_head = head / p.heads_per_kv_head;
        first_row = block * BLOCK_M;
        warp_row = first_row + warp * kWarpRows;
    }
};

// Of keys that a row must not see, scores become those of weight zero, and gradients zero. `column`: first key of the chunk.
// Returns, of scores, whether such a one is not finite: then the key may not be, and must not reach the row as 0 x NaN.
template <bool AreScores>
__device__ __forceinline__ bool mask(Scores& scores, int column, const BackwardParameters& p) {
    const Rows own(p);
    const int row = own.warp_row + own.lane / 4;
    const int lane_column = column + 2 * (own.lane % 4);
    const float hidden = AreScores ? hidden_score(p) : 0.0f;
    bool not_finite = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int limit = min(p.seqlen_k, row + m * 16 + h * 8 + p.causal_offset + 1) - lane_column;
            const int first = row + m * 16 + h * 8 + p.window_offset - lane_column;
#pragma unroll
            for (int n = 0; n < kChunkTiles; ++n) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float& score = scores[m][n][2 * h + i];
                    if (n * 8 + i >= limit || (WINDOW && n * 8 + i < first)) {
                        if (AreScores) not_finite |= !(fabsf(score) < POSITIVE_INFINITY);
                        score = hidden;
                    }
                }
            }
        }
    }
    return AreScores && __any_sync(0xffffffffu, not_finite);
}

extern "C" __global__ void __launch_bounds__(kThreads)
attention_backward_query(const __grid_constant__ BackwardParameters p) {
    extern __shared__ __align__(1024) char shared_memory[];
    const uint32 query_tile = shared_address(shared_memory);
    const uint32 gradient_tile = query_tile + kRowsBytes;
    const uint32 key_tiles = gradient_tile + kRowsBytes;
    const uint32 value_tiles = key_tiles + kStages * kBufferBytes;
    const uint32 statistics = value_tiles + kStages * kBufferBytes;  // of each row: log-sum-exp to base 2, delta
    const Rows own(p);
    const int lane = own.lane;

    // Which keys: blocks [first_block, num_blocks), of which those from first_masked on, and before first_unmasked, need the mask.
    const int end = min(p.seqlen_k, min(own.first_row + BLOCK_M, p.seqlen_q) + p.causal_offset);
    const int unmasked = min(p.seqlen_k, own.first_row + p.causal_offset + 1);  // keys that every row sees
    const int num_blocks = end > 0 ? (end + BLOCK_N - 1) / BLOCK_N : 0;
    const int first_masked = unmasked > 0 ? unmasked / BLOCK_N : 0;
    const int first_block = WINDOW ? max(0, own.first_row + p.window_offset) / BLOCK_N : 0;
    const int last_row = min(own.first_row + BLOCK_M, p.seqlen_q) - 1;
    const int first_unmasked = WINDOW ? (max(0, last_row + p.window_offset) + BLOCK_N - 1) / BLOCK_N : 0;

    const auto copy_block = [&](int b) {
        if (NO_LOADS && b < num_blocks - kStages) return;
        const Rows own(p);
        const TileCopy<HEAD_DIM, kThreads> copier(p.head_dim);
        const int row = b * BLOCK_N;
        const uint32 buffer = (b & 1) * kBufferBytes;
        copier.copy<BLOCK_N>(key_tiles + buffer,
                             p.key + own.batch * p.key_batch + own.kv_head * p.key_head + row * p.key_row, p.key_row,
                             p.seqlen_k - row);
        copier.copy<BLOCK_N>(value_tiles + buffer,
                             p.value + own.batch * p.value_batch + own.kv_head * p.value_head + row * p.value_row,
                             p.value_row, p.seqlen_k - row);
    };

    const TileCopy<HEAD_DIM, kThreads> copier(p.head_dim);
    const int tile_rows = p.seqlen_q - own.first_row;
    copier.copy<BLOCK_M>(gradient_tile,
                         p.grad_output + own.batch * p.grad_output_batch + own.head * p.grad_output_head +
                             own.first_row * p.grad_output_row,
                         p.grad_output_row, tile_rows);
    copy_commit();
    int b = num_blocks - 1;
    if (b >= first_block) {
        copier.copy<BLOCK_M>(query_tile,
                             p.query + own.batch * p.query_batch + own.head * p.query_head +
                                 own.first_row * p.query_row,
                             p.query_row, tile_rows);
        copy_block(b);
    }
    copy_commit();

    copy_wait<1>();
    __syncthreads();
    const uint32 warp_offset = own.warp * kWarpRows * T::kRowBytes;
#pragma unroll
    for (int r = lane / 4; r < kWarpRows; r += 8) {
        const int row = own.warp_row + r;
        const char* output = p.output + own.batch * p.output_batch + own.head * p.output_head + row * p.output_row;
        float delta = 0.0f;
        float lse_log2 = POSITIVE_INFINITY;
        if (row < p.seqlen_q) {
            for (int c = lane % 4; c < p.head_dim / kChunkElements; c += 4) {
                delta = dot(load_global(output + c * kChunkBytes),
                            load_shared(gradient_tile + warp_offset + T::offset(r, c)), delta);
            }
        }
        delta = quad_sum(delta);
        if (lane % 4 == 0) {
            if (row < p.seqlen_q) {
                const int64 at = static_cast<int64>(own.slice) * p.seqlen_q + row;
                lse_log2 = to_log2(p.lse[at]);
                if (p.grad_lse != nullptr) delta -= p.grad_lse[at];
            }
            store_shared_pair(statistics + (own.warp * kWarpRows + r) * 8, lse_log2, delta);
            if (p.delta != nullptr && row < (p.seqlen_q + 3) / 4 * 4) {
                const int64 at = static_cast<int64>(own.slice) * p.statistics_rows + row;
                p.lse_log2[at] = lse_log2;
                p.delta[at] = delta;
            }
        }
    }
    __syncwarp();

    float out[kRowTiles][kOutTiles][4];
    clear(out);
    if (num_blocks > first_block) {
        LeftOperand<HEAD_DIM, kRowTiles, REGISTER_STEPS> query;
        LeftOperand<HEAD_DIM, kRowTiles, REGISTER_STEPS> gradient;
        const uint32 across = lane_across<HEAD_DIM>(lane);
        const uint32 along = lane_along<HEAD_DIM>(lane);
        // Of row r + 8 i of the warp, which mma gives to this lane's accumulators, at + 64 i.
        const uint32 lane_statistics = statistics + (own.warp * kWarpRows + lane / 4) * 8;
        query.address = query_tile + warp_offset + across;
        gradient.address = query.address + kRowsBytes;
        if (REGISTER_STEPS > 0) {
            copy_wait<0>();
            __syncthreads();
            query.load_registers();
            gradient.load_registers();
        }

        const auto step = [&](auto masked) {
            copy_wait<0>();
            __syncthreads();
            if (b > first_block) {
                copy_block(b - 1);
                copy_commit();
            }
#pragma unroll 1
            for (int c = 0; c < kChunks; ++c) {
                const int column = b * BLOCK_N + c * CHUNK;
                // Rows wholly above the diagonal see nothing of this chunk.
                if (masked.value && column >= Rows(p).warp_row + kWarpRows + p.causal_offset) break;
                if (WINDOW && masked.value && column + CHUNK <= Rows(p).warp_row + p.window_offset) continue;
                const uint32 keys = key_tiles + (b & 1) * kBufferBytes + c * CHUNK * T::kRowBytes;
                const uint32 values = keys + kStages * kBufferBytes;
                Scores scores;
                Scores dp;  // dP - delta, then dS
                multiply<masked.value>(scores, query, keys + along, zero, nothing);
                bool guarded = false;
                if (masked.value && !NO_MASK) guarded = mask<true>(scores, column, p);
                float start[kRowTiles][4];  // of dP: less delta
                float lse_log2[kRowTiles][2];
#pragma unroll
                for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const float2 row = load_shared_pair(lane_statistics + (2 * m + h) * 64);
                        lse_log2[m][h] = row.x;
                        start[m][2 * h] = start[m][2 * h + 1] = -row.y;
                    }
                }
                // Exponentials are taken while gradients are multiplied.
                multiply<masked.value>(
                    dp, gradient, values + along,
                    [&](int, int m, float(&c)[4]) {
#pragma unroll
                        for (int i = 0; i < 4; ++i) c[i] = start[m][i];
                    },
                    [&](int k) {
                        for_share<HEAD_DIM, kRowTiles, kChunkTiles>(k, [&](int m, int n) {
#pragma unroll
                            for (int i = 0; i < 4; ++i) {
                                scores[m][n][i] = weight_of_score(scores[m][n][i], lse_log2[m][i / 2], p);
                            }
                        });
                    });
                if (masked.value && !NO_MASK) mask<false>(dp, column, p);
#pragma unroll
                for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
                    for (int n = 0; n < kChunkTiles; ++n) {
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            dp[m][n][i] = gradient_of_score(scores[m][n][i], dp[m][n][i], lse_log2[m][i / 2], p);
                        }
                    }
                }
                accumulate_groups<HEAD_DIM>(out, dp, 0, CHUNK / 16, keys + across, guarded);
            }
        };
        if (WINDOW) {
            for (; b >= first_block; --b) {
                if (b >= first_masked || b < first_unmasked) {
                    step(Flag<true>{});
                } else {
                    step(Flag<false>{});
                }
            }
        } else {
            for (; b >= first_masked; --b) step(Flag<true>{});
            for (; b >= 0; --b) step(Flag<false>{});
        }
    }

    if (p.grad_query == nullptr) return;
    const Rows done(p);
    char* rows = p.grad_query + done.batch * p.grad_query_batch + done.head * p.grad_query_head +
                 done.warp_row * p.grad_query_row;
    write_rows<HEAD_DIM>(out, p.scale, query_tile + done.warp * kWarpRows * T::kRowBytes, rows, p.grad_query_row,
                         p.seqlen_q - done.warp_row, p.head_dim);
}

// The pass over keys of attention backward for sm_75 and later: the gradients of keys and values, on mma.sync.
//
// A block owns BLOCK_N keys of one key head and walks over the query rows that see them, in all query heads of the group.
// Scores are computed transposed, keys in the rows, so that Pᵀ and dSᵀ go from accumulator to operand in registers.
//
// ROLES 1: every warp makes both gradients of its keys. ROLES 2: two warps share their keys; one makes P and the gradient of
// the values, the other dP, dS and the gradient of the keys. Each holds one accumulator, so it can own twice the keys; P
// goes from one to the other, in float32, through shared memory.
//
// QUERIES 1: the gradient of queries, too (backward/query_sums.cuh). Query rows are visited from the last on: blocks of one
// head, of which the first has the most rows, then add to the same ones in order.
//
// Macros: those of attention_backward_query.cu but REGISTER_STEPS, of which CHUNK counts query rows; ROLES and QUERIES.
#include "ablation.cuh"
#include "backward/parameters.cuh"
#include "backward/products.cuh"
#include "backward/scores.cuh"
#include "backward/tile_copy.cuh"
#include "backward/write_rows.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/shared_floats.cuh"
#include "ptx/vector.cuh"
#include "racecheck.cuh"
#include "softmax.cuh"
#include "swizzle.cuh"
#include "types.cuh"
#if QUERIES
#include "backward/query_sums.cuh"
#endif

constexpr int kThreads = WARPS * 32;
constexpr int kStages = 2;  // of query rows
constexpr int kGroups = WARPS / ROLES;  // of warps that own the same keys
constexpr int kRowTiles = BLOCK_N / (16 * kGroups);
constexpr int kWarpKeys = 16 * kRowTiles;
constexpr int kOutTiles = HEAD_DIM / 8;
constexpr int kChunkTiles = CHUNK / 8;
constexpr int kChunks = BLOCK_M / CHUNK;
// ROLES 2: weights go from one warp to the other in parts, each with a named barrier, of which there are 15.
constexpr int kParts = CHUNK % 32 == 0 && kGroups * kChunks * 2 < 16 ? 2 : 1;
constexpr int kPartTiles = kChunkTiles / kParts;

using T = Tile<HEAD_DIM>;
constexpr int kKeyBytes = BLOCK_N * T::kRowBytes;
constexpr int kBufferBytes = BLOCK_M * T::kRowBytes;
constexpr int kStatisticsBytes = BLOCK_M * 4;  // of one kind, in one stage
constexpr int kQuadBytes = 32 * 16;            // one accumulator fragment of a warp
constexpr int kWeightBytes = kRowTiles * kChunkTiles * kQuadBytes;  // of one chunk and group
constexpr int kExchangeBytes = kWeightBytes + kChunkBytes;          // and two words: what is hidden may not be finite

static_assert(HEAD_DIM % 16 == 0 && CHUNK % 16 == 0 && BLOCK_M % CHUNK == 0, "tiles of 16");
static_assert(ROLES * kGroups == WARPS && BLOCK_N == kWarpKeys * kGroups, "keys of a warp");
static_assert(ROLES == 1 || kGroups * kChunks * kParts < 16, "a named barrier for each group, chunk and part");
static_assert(MMA_K == 16 || !ELEMENT_BF16, "bfloat16 needs m16n8k16");
static_assert(!(QUERIES && (WINDOW || SOFTCAP)), "one pass takes neither");

#if QUERIES
constexpr int kTurnThread = (ROLES - 1) * kGroups * 32;  // of a warp that others do not wait for at once
constexpr int kTurnLag = 2;  // steps after which a turn is passed: most of what was added has arrived
#endif

using Scores = float[kRowTiles][kChunkTiles][4];
using Gradient = float[kRowTiles][kOutTiles][4];

// Keys that a warp owns. The block's are divided out once and kept in shared memory, at `kept`: what is read again where it
// is needed is not held in registers in the main loop.
struct Keys {
    int lane, group, role, batch, kv_head, block, first_key, warp_key;

    __device__ __forceinline__ explicit Keys(uint32 kept) {
        const Chunk item = load_shared(kept);
        const int thread = thread_index();
        lane = thread % 32;
        group = thread / 32 % kGroups;
        role = thread / 32 / kGroups;  // ROLES 2: 0 makes the gradient of values, 1 that of keys
        batch = item.x;
        kv_head = item.y;
        block = item.z;
        first_key = block * BLOCK_N;
        warp_key = first_key + group * kWarpKeys;
    }

    static __device__ __forceinline__ void keep(uint32 kept, const BackwardParameters& p) {
        if (thread_index() == 0) {
            const WorkItem item(p);
            const int kv_heads = p.num_heads / p.heads_per_kv_head;
            store_shared(kept, Chunk{static_cast<uint32>(item.slice / kv_heads), static_cast<uint32>(item.slice % kv_heads),
                                     static_cast<uint32>(item.block), 0});
        }
        __syncthreads();
    }
};

// The block's steps: blocks of query rows in [first, end), head by head of the group; with QUERIES from the last on.
struct Walk {
    int head, row_block;

    __device__ __forceinline__ Walk(int first, int end) : head(0), row_block(QUERIES ? end - 1 : first) {}

    __device__ __forceinline__ void advance(int first, int end) {
        const bool done = row_block == (QUERIES ? first : end - 1);
        row_block = done ? (QUERIES ? end - 1 : first) : row_block + (QUERIES ? -1 : 1);
        head += done;
    }
};

// What stands for keys that a row must not see becomes `value`. `row`: first of the chunk. Returns whether something hidden is
// not finite: then the row may not be, and must not reach the key as 0 x NaN.
__device__ __forceinline__ bool hide(Scores& scores, float value, int row, uint32 kept, const BackwardParameters& p) {
    const Keys own(kept);
    // Elements to the left of this, for the lane's first key, are hidden.
    const int first_visible = own.warp_key + own.lane / 4 - p.causal_offset - row - 2 * (own.lane % 4);
    const int last_visible = own.warp_key + own.lane / 4 - p.window_offset - row - 2 * (own.lane % 4);
    const int keys = p.seqlen_k - own.warp_key - own.lane / 4;  // past them weights are hidden, too, from the sums of queries
    bool not_finite = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int n = 0; n < kChunkTiles; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int key = m * 16 + i / 2 * 8;
                const bool past = QUERIES && key >= keys;  // whose sums are not written, so they need no guard
                const bool before = WINDOW && n * 8 + i % 2 > last_visible + key;
                if (n * 8 + i % 2 < first_visible + key || before || past) {
                    not_finite |= !past && !(fabsf(scores[m][n][i]) < POSITIVE_INFINITY);
                    scores[m][n][i] = value;
                }
            }
        }
    }
    return __any_sync(0xffffffffu, not_finite);
}

// Scores of one tile become weights. `statistics`: the lane's log-sum-exps of the chunk in shared memory.
__device__ __forceinline__ void to_weights(float (&scores)[4], int n, uint32 statistics, const BackwardParameters& p) {
    const float2 lse = load_shared_pair(statistics + n * 32);
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[i] = weight_of_score(scores[i], i % 2 ? lse.y : lse.x, p);
}

// Gradients of one tile's weights become those of scores.
__device__ __forceinline__ void to_score_gradients(float (&gradients)[4], const float (&weights)[4], int n, uint32 statistics,
                                                   const BackwardParameters& p) {
    const float2 lse = SOFTCAP ? load_shared_pair(statistics + n * 32) : float2{};
#pragma unroll
    for (int i = 0; i < 4; ++i) gradients[i] = gradient_of_score(weights[i], gradients[i], i % 2 ? lse.y : lse.x, p);
}

// What the gradients of a tile's weights start with: less delta.
__device__ __forceinline__ void start_gradients(int n, float (&c)[4], uint32 statistics) {
    const float2 delta = load_shared_pair(statistics + n * 32);
    c[0] = c[2] = -delta.x;
    c[1] = c[3] = -delta.y;
}

// ROLES 2: of the two warps that share keys, one that has to wait and one that has not.
__device__ __forceinline__ void meet(int barrier, bool waits) {
    if (RACECHECK) {
        __syncthreads();
    } else if (waits) {
        ptx::barrier_sync(barrier, 64);
    } else {
        ptx::barrier_arrive(barrier, 64);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
attention_backward_key_value(const __grid_constant__ BackwardParameters p) {
    extern __shared__ __align__(1024) char shared_memory[];
    const uint32 key_tile = shared_address(shared_memory);
    const uint32 value_tile = key_tile + kKeyBytes;
    const uint32 query_tiles = value_tile + kKeyBytes;
    const uint32 gradient_tiles = query_tiles + kStages * kBufferBytes;
#if QUERIES
    const uint32 weight_gradients = gradient_tiles + kStages * kBufferBytes;  // of two steps
    const uint32 lse_stages = weight_gradients + 2 * kWeightGradientBytes;
#else
    const uint32 lse_stages = gradient_tiles + kStages * kBufferBytes;
#endif
    const uint32 delta_stages = lse_stages + kStages * kStatisticsBytes;
    const uint32 exchanges = delta_stages + kStages * kStatisticsBytes;  // ROLES 2
    const uint32 kept = exchanges + (ROLES == 2 ? kGroups * kChunks * kExchangeBytes : 0);
#if QUERIES
    const uint32 noted_steps = kept + kChunkBytes;
#endif

    Keys::keep(kept, p);
    const Keys own(kept);
    const int lane = own.lane;
    const int role = own.role;

    // Which query rows, in each head of the group: blocks [first_block, row_blocks), see is_masked.
    const int last_key = min(own.first_key + BLOCK_N, p.seqlen_k) - 1;
    const int first_row = max(0, own.first_key - p.causal_offset);  // that sees a key
    const int end_row = WINDOW ? max(first_row, min(p.seqlen_q, last_key - p.window_offset + 1)) : p.seqlen_q;
    const int row_blocks = (end_row + BLOCK_M - 1) / BLOCK_M;
    const int first_block = min(first_row / BLOCK_M, row_blocks);
    const int blocks = row_blocks - first_block;
    const int steps = blocks * p.heads_per_kv_head;

    const auto copy_rows = [&](int step, const Walk& at) {
        if (NO_LOADS && step >= kStages) return;
        const Keys own(kept);
        const TileCopy<HEAD_DIM, kThreads> copier(p.head_dim);
        const int head = own.kv_head * p.heads_per_kv_head + at.head;
        const int row = at.row_block * BLOCK_M;
        const int stage = step % kStages;
        copier.copy<BLOCK_M>(query_tiles + stage * kBufferBytes,
                             p.query + own.batch * p.query_batch + head * p.query_head + row * p.query_row, p.query_row,
                             p.seqlen_q - row);
        copier.copy<BLOCK_M>(gradient_tiles + stage * kBufferBytes,
                             p.grad_output + own.batch * p.grad_output_batch + head * p.grad_output_head +
                                 row * p.grad_output_row,
                             p.grad_output_row, p.seqlen_q - row);
        // Zeros past the end do no harm there: query and gradient are zeros, too.
        constexpr int per_kind = BLOCK_M / 4;
        const int thread = thread_index();
        const int chunk = thread % per_kind;
        if (thread < 2 * per_kind) {
            const bool is_delta = thread >= per_kind;
            const float* source = (is_delta ? p.delta : p.lse_log2) +
                                  static_cast<int64>(own.batch * p.num_heads + head) * p.statistics_rows + row + chunk * 4;
            copy_chunk((is_delta ? delta_stages : lse_stages) + stage * kStatisticsBytes + chunk * kChunkBytes,
                       reinterpret_cast<const char*>(source), row + chunk * 4 < p.seqlen_q);
        }
    };

    Gradient out;    // of the values, or whatever this warp's role makes
    Gradient other;  // ROLES 1: of the keys
    clear(out);
    if (ROLES == 1) clear(other);

    if (steps > 0) {
        const TileCopy<HEAD_DIM, kThreads> copier(p.head_dim);
        const int keys = p.seqlen_k - own.first_key;
        copier.copy<BLOCK_N>(key_tile,
                             p.key + own.batch * p.key_batch + own.kv_head * p.key_head + own.first_key * p.key_row,
                             p.key_row, keys);
        copier.copy<BLOCK_N>(value_tile,
                             p.value + own.batch * p.value_batch + own.kv_head * p.value_head +
                                 own.first_key * p.value_row,
                             p.value_row, keys);
        Walk at(first_block, row_blocks);
        copy_rows(0, at);
        copy_commit();
        const uint32 along = lane_along<HEAD_DIM>(lane);
        const uint32 across = lane_across<HEAD_DIM>(lane);
        const uint32 warp_rows = own.group * kWarpKeys * T::kRowBytes + across;
        LeftOperand<HEAD_DIM, kRowTiles, 0> left;        // keys, or what this warp's role multiplies first
        LeftOperand<HEAD_DIM, kRowTiles, 0> left_other;  // ROLES 1: values
        left.address = (ROLES == 2 && role == 1 ? value_tile : key_tile) + warp_rows;
        left_other.address = value_tile + warp_rows;

        const auto multiply_step = [&](int step, int row, auto masked) {
            const int stage = step % kStages;
            const uint32 queries = query_tiles + stage * kBufferBytes;
            const uint32 gradients = gradient_tiles + stage * kBufferBytes;
#pragma unroll 1
            for (int c = 0; c < kChunks; ++c) {
                const int chunk_row = row + c * CHUNK;
#if QUERIES
                const uint32 step_gradients = weight_gradients + step % 2 * kWeightGradientBytes;
                const int group_key = thread_index() / 32 % kGroups * kWarpKeys;
#endif
                // Rows that see none of this warp's keys.
                const bool after = WINDOW && chunk_row + p.window_offset >= Keys(kept).warp_key + kWarpKeys;
                if (!RACECHECK && masked.value && (after || chunk_row + CHUNK <= Keys(kept).warp_key - p.causal_offset)) {
#if QUERIES
                    Scores none;
                    clear(none);
                    if (role == ROLES - 1) {
                        store_weight_gradients(none, 0, kChunkTiles, step_gradients, group_key, c * kChunkTiles);
                    }
#endif
                    continue;
                }
                const uint32 rows = c * CHUNK * T::kRowBytes;
                const uint32 columns = stage * kStatisticsBytes + c * CHUNK * 4 + lane % 4 * 8;
                Scores scores;
#if ROLES == 1
                Scores dp;
                multiply<masked.value>(scores, left, queries + rows + along, zero, nothing);
                bool guard_values = false;
                bool guard_keys = false;
                if (masked.value && !NO_MASK) guard_keys = hide(scores, hidden_score(p), chunk_row, kept, p);
                // Exponentials are taken while gradients are multiplied.
                multiply<masked.value>(
                    dp, left_other, gradients + rows + along,
                    [&](int n, int, float(&c)[4]) { start_gradients(n, c, delta_stages + columns); },
                    [&](int k) {
                        for_share<HEAD_DIM, kRowTiles, kChunkTiles>(k, [&](int m, int n) {
                            to_weights(scores[m][n], n, lse_stages + columns, p);
                        });
                    });
                if (masked.value && !NO_MASK) guard_values = hide(dp, 0.0f, chunk_row, kept, p);
#pragma unroll
                for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
                    for (int n = 0; n < kChunkTiles; ++n) {
                        to_score_gradients(dp[m][n], scores[m][n], n, lse_stages + columns, p);
                    }
                }
#if QUERIES
                store_weight_gradients(dp, 0, kChunkTiles, step_gradients, group_key, c * kChunkTiles);
#endif
                accumulate_groups<HEAD_DIM>(out, scores, 0, CHUNK / 16, gradients + rows + across, guard_values);
                accumulate_groups<HEAD_DIM>(other, dp, 0, CHUNK / 16, queries + rows + across, guard_keys);
#else
                const int group = thread_index() / 32 % kGroups;
                const uint32 exchange = exchanges + (group * kChunks + c) * kExchangeBytes;
                const uint32 exchanged = exchange + lane * 16;
                const int barrier = 1 + (group * kChunks + c) * kParts;
                multiply<masked.value>(
                    scores, left, (role == 0 ? queries : gradients) + rows + along,
                    [&](int n, int m, float(&c)[4]) {
                        if (role == 0) {
                            zero(n, m, c);
                        } else {
                            start_gradients(n, c, delta_stages + columns);
                        }
                    },
                    nothing);
                // Each tells the other whether the rows that it reads, and the other adds up, may not be finite.
                if (masked.value && !NO_MASK) {
                    const bool guard = hide(scores, role == 0 ? hidden_score(p) : 0.0f, chunk_row, kept, p);
                    store_shared(exchange + kWeightBytes + role * 4, static_cast<uint32>(guard));
                }
                if (role == 0) {
#pragma unroll
                    for (int part = 0; part < kParts; ++part) {
#pragma unroll
                        for (int n = part * kPartTiles; n < (part + 1) * kPartTiles; ++n) {
#pragma unroll
                            for (int m = 0; m < kRowTiles; ++m) {
                                to_weights(scores[m][n], n, lse_stages + columns, p);
                                store_shared_quad(exchanged + (m * kChunkTiles + n) * kQuadBytes, scores[m][n]);
                            }
                        }
                        meet(barrier + part, masked.value && part == 0);
                    }
                    const bool guarded = masked.value && !NO_MASK && load_shared(exchange + kWeightBytes).y != 0;
                    accumulate_groups<HEAD_DIM>(out, scores, 0, CHUNK / 16, gradients + rows + across, guarded);
                } else {
                    bool guarded = false;
#pragma unroll
                    for (int part = 0; part < kParts; ++part) {
                        meet(barrier + part, true);
                        if (part == 0) guarded = masked.value && !NO_MASK && load_shared(exchange + kWeightBytes).x != 0;
#pragma unroll
                        for (int n = part * kPartTiles; n < (part + 1) * kPartTiles; ++n) {
#pragma unroll
                            for (int m = 0; m < kRowTiles; ++m) {
                                float weight[4];
                                load_shared_quad(weight, exchanged + (m * kChunkTiles + n) * kQuadBytes);
                                to_score_gradients(scores[m][n], weight, n, lse_stages + columns, p);
                            }
                        }
#if QUERIES
                        store_weight_gradients(scores, part * kPartTiles, (part + 1) * kPartTiles, step_gradients, group_key,
                                               c * kChunkTiles);
#endif
                        accumulate_groups<HEAD_DIM>(out, scores, part * kPartTiles / 2, (part + 1) * kPartTiles / 2,
                                                    queries + rows + across, guarded);
                    }
                }
#endif
            }
        };

        const auto is_masked = [&](int row) {
            const bool outside = WINDOW && row + BLOCK_M - 1 + p.window_offset > Keys(kept).first_key;
            return row + p.causal_offset < last_key || outside || (QUERIES && last_key + 1 < Keys(kept).first_key + BLOCK_N);
        };
#if QUERIES
        const auto add_queries = [&](int step) {
            const Chunk noted = load_shared(noted_steps + step % 4 * kChunkBytes);
            const int row_block = noted.z;
            const uint32 tile = weight_gradients + step % 2 * kWeightGradientBytes;
            const bool guarded = !NO_MASK && row_block * BLOCK_M + p.causal_offset < last_key && load_shared(kept).w != 0;
            const uint32* turn = p.turns + noted.x;
            const uint32 seen = thread_index() % 32 == 0 ? look_at_turn(turn) : 0;  // long before it is needed
            QueryShare share;
            if (guarded) {
                share.multiply<true>(tile, key_tile);
            } else {
                share.multiply<false>(tile, key_tile);
            }
            share.add(p, turn, seen, noted.y, row_block, Keys(kept).block);
        };
        // By one thread. A step is noted when its weights are made, and its turn passed when all warps have met since they added.
        const auto note_step = [&](int step) {
            const Keys own(kept);
            const int slice = own.batch * p.num_heads + own.kv_head * p.heads_per_kv_head + at.head;
            store_shared(noted_steps + step % 4 * kChunkBytes,
                         Chunk{turn_of(p, slice, at.row_block), static_cast<uint32>(slice), static_cast<uint32>(at.row_block), 0});
        };
        const auto pass_noted = [&](int step) {
            pass_turn(p.turns + load_shared(noted_steps + step % 4 * kChunkBytes).x, Keys(kept).block + 1);
        };
        if (!NO_MASK && first_block * BLOCK_M + p.causal_offset < last_key) {
            copy_wait<0>();
            __syncthreads();
            if (has_not_finite<kThreads, BLOCK_N>(key_tile)) store_shared(kept + 12, 1u);
        }
#endif
        for (int step = 0; step < steps; ++step) {
            copy_wait<0>();
            __syncthreads();
#if QUERIES
            if (thread_index() == kTurnThread) {
                if (step >= kTurnLag) pass_noted(step - kTurnLag);
                note_step(step);
            }
#endif
            if (step + 1 < steps) {
                Walk next = at;
                next.advance(first_block, row_blocks);
                copy_rows(step + 1, next);
            }
            copy_commit();
            const auto multiply_rows = [&] {
                const int row = at.row_block * BLOCK_M;
                if (is_masked(row)) {
                    multiply_step(step, row, Flag<true>{});
                } else {
                    multiply_step(step, row, Flag<false>{});
                }
            };
#if QUERIES && ROLES == 1
            if (step > 0) add_queries(step - 1);
            multiply_rows();
#elif QUERIES
            // The warp that waits for weights makes its share meanwhile, the other one while those are used.
#pragma unroll 1
            for (int part = 0; part < 2; ++part) {
                if (part != role) {
                    if (step > 0) add_queries(step - 1);
                } else {
                    multiply_rows();
                }
            }
#else
            multiply_rows();
#endif
            at.advance(first_block, row_blocks);
        }
#if QUERIES
        __syncthreads();
        add_queries(steps - 1);
        __syncthreads();
        if (thread_index() == kTurnThread) {
            for (int step = max(0, steps - kTurnLag); step < steps; ++step) pass_noted(step);
        }
#endif
    }
#if QUERIES
    if (own.block == 0) {
        for (int head = 0; head < p.heads_per_kv_head; ++head) {
            write_rows_without_keys<kThreads>(p, own.batch, own.kv_head * p.heads_per_kv_head + head, first_block * BLOCK_M);
        }
    }
#endif
    copy_wait<0>();

    // A tile of which no other warp reads these rows holds them on their way out.
    const Keys done(kept);
    const uint32 stage = key_tile + done.role * kKeyBytes + done.group * kWarpKeys * T::kRowBytes;
    const int keys = p.seqlen_k - done.warp_key;
    const auto write_values = [&](const Gradient& sums, uint32 stage) {
        char* rows = p.grad_value + done.batch * p.grad_value_batch + done.kv_head * p.grad_value_head +
                     done.warp_key * p.grad_value_row;
        if (p.grad_value != nullptr) {
            write_rows<HEAD_DIM>(sums, 1.0f, stage, rows, p.grad_value_row, keys, p.head_dim);
        }
    };
    const auto write_keys = [&](const Gradient& sums, uint32 stage) {
        char* rows = p.grad_key + done.batch * p.grad_key_batch + done.kv_head * p.grad_key_head +
                     done.warp_key * p.grad_key_row;
        if (p.grad_key != nullptr) {
            write_rows<HEAD_DIM>(sums, p.scale, stage, rows, p.grad_key_row, keys, p.head_dim);
        }
    };
#if ROLES == 1
    write_values(out, stage);
    write_keys(other, stage + kKeyBytes);
#else
    if (done.role == 0) {
        write_values(out, stage);
    } else {
        write_keys(out, stage);
    }
#endif
}

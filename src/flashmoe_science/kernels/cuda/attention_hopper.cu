// Attention forward for Hopper (sm_90a): TMA, wgmma and specialised warpgroups.
//
// One warpgroup produces: a warp each loads keys, values and queries, by TMA into rings of shared memory. Two or
// three warpgroups consume, 64 query rows each: S = Q K^T, online softmax, O += P V, with P in registers. Two overlaps
// hide the softmax (FlashAttention-3, Shah et al. 2024): within a warpgroup, block j's softmax runs while block j-1's
// P V does; between warpgroups, they take turns on the tensor cores (PING_PONG). The loop over blocks runs on from one
// tile into the next, so that a tile's first scores are computed during the last product of the one before.
//
// Compile-time configuration: HEAD_DIM, ELEMENT_BF16, CAUSAL, CONSUMERS, BLOCK_N, K_STAGES, V_STAGES, Q_STAGES, PING_PONG.
#if ELEMENT_BF16
#define WGMMA_TYPES "bf16.bf16"
#else
#define WGMMA_TYPES "f16.f16"
#endif

#include "hopper/parameters.cuh"
#include "hopper/scheduler.cuh"
#include "hopper/softmax.cuh"
#include "mma/descriptor.cuh"
#include "mma/m16n8k16.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"

namespace hopper {

using Scores = ptx::Wgmma<BLOCK_N>;
using Output = ptx::Wgmma<HEAD_DIM>;

constexpr uint32 QUERY_PANEL_BYTES = ROWS * panel::ROW_BYTES;
constexpr uint32 QUERY_BYTES = PANELS * QUERY_PANEL_BYTES;  // of one consumer
constexpr uint32 KEY_PANEL_BYTES = BLOCK_N * panel::ROW_BYTES;
constexpr uint32 KEY_BYTES = PANELS * KEY_PANEL_BYTES;
constexpr int TILE_SLOTS = 2;
// Keeps the usual path through the main loop in one piece.
__device__ __forceinline__ bool likely(bool condition) { return __builtin_expect(condition, 1); }

constexpr float LN_2 = 0.693147180559945f;
constexpr int CONSUMER_WARPS = 4 * CONSUMERS;

// Named barriers, one per consumer: its turn on the tensor cores.
constexpr int TURN_BARRIER = 1;

// Where everything lies in shared memory. Addresses are 32 bits: generic pointers would cost the producers, which keep
// few registers, twice as many.
struct Shared {
    uint32 base;  // a multiple of 1024, so that the swizzle depends on the row alone

    static constexpr uint32 KEYS = Q_STAGES * CONSUMERS * QUERY_BYTES;
    static constexpr uint32 VALUES = KEYS + K_STAGES * KEY_BYTES;
    static constexpr uint32 TILES = VALUES + V_STAGES * KEY_BYTES;
    static constexpr uint32 QUERY_BARRIERS = TILES + TILE_SLOTS * 16;
    static constexpr uint32 KEY_BARRIERS = QUERY_BARRIERS + Q_STAGES * CONSUMERS * 16;
    static constexpr uint32 VALUE_BARRIERS = KEY_BARRIERS + K_STAGES * 16;
    static constexpr uint32 TILE_BARRIERS = VALUE_BARRIERS + V_STAGES * 16;
    static constexpr uint32 BYTES = TILE_BARRIERS + TILE_SLOTS * 16;

    // Tiles.
    __device__ uint32 query(int stage, int consumer) const { return base + (stage * CONSUMERS + consumer) * QUERY_BYTES; }
    __device__ uint32 key(int stage) const { return base + KEYS + stage * KEY_BYTES; }
    __device__ uint32 value(int stage) const { return base + VALUES + stage * KEY_BYTES; }
    __device__ uint32 tile(int slot) const { return base + TILES + slot * 16; }

    // Barriers: `full` once the data is there, `empty` once it has been used.
    __device__ uint32 query_full(int stage, int consumer) const {
        return base + QUERY_BARRIERS + (stage * CONSUMERS + consumer) * 16;
    }
    __device__ uint32 query_empty(int stage, int consumer) const { return query_full(stage, consumer) + 8; }
    __device__ uint32 key_full(int stage) const { return base + KEY_BARRIERS + stage * 16; }
    __device__ uint32 key_empty(int stage) const { return key_full(stage) + 8; }
    __device__ uint32 value_full(int stage) const { return base + VALUE_BARRIERS + stage * 16; }
    __device__ uint32 value_empty(int stage) const { return value_full(stage) + 8; }
    __device__ uint32 tile_full(int slot) const { return base + TILE_BARRIERS + slot * 16; }
    __device__ uint32 tile_empty(int slot) const { return tile_full(slot) + 8; }
};
static_assert(Shared::BYTES + 1024 <= 232448, "more shared memory than a block may have");

// A place in a ring of STAGES buffers, and the parity of its current round.
template <int STAGES>
struct Ring {
    int stage = 0;
    uint32 parity = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

__device__ __forceinline__ void initialise(const Shared& shared) {
    for (int stage = 0; stage < Q_STAGES; ++stage) {
        for (int consumer = 0; consumer < CONSUMERS; ++consumer) {
            ptx::mbarrier_init(shared.query_full(stage, consumer), 1);
            ptx::mbarrier_init(shared.query_empty(stage, consumer), 4);
        }
    }
    for (int stage = 0; stage < K_STAGES; ++stage) {
        ptx::mbarrier_init(shared.key_full(stage), 1);
        ptx::mbarrier_init(shared.key_empty(stage), CONSUMER_WARPS);
    }
    for (int stage = 0; stage < V_STAGES; ++stage) {
        ptx::mbarrier_init(shared.value_full(stage), 1);
        ptx::mbarrier_init(shared.value_empty(stage), CONSUMER_WARPS);
    }
    for (int slot = 0; slot < TILE_SLOTS; ++slot) {
        ptx::mbarrier_init(shared.tile_full(slot), 1);
        ptx::mbarrier_init(shared.tile_empty(slot), CONSUMER_WARPS + 2);
    }
    ptx::mbarrier_init_fence();
}

// The tile that the key producer published in a slot.
__device__ __forceinline__ Tile read_tile(const Shared& shared, int slot) {
    Tile tile;
    asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(tile.m_block), "=r"(tile.head), "=r"(tile.batch), "=r"(tile.n_blocks)
                 : "r"(shared.tile(slot))
                 : "memory");
    return tile;
}

// Marks something that the whole warp has read as free.
__device__ __forceinline__ void release(uint32 barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
}

__device__ __forceinline__ void publish_tile(const Shared& shared, Ring<TILE_SLOTS>& ring, const Tile& tile) {
    ptx::mbarrier_wait(shared.tile_empty(ring.stage), ring.parity ^ 1);
    asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(shared.tile(ring.stage)), "r"(tile.m_block),
                 "r"(tile.head), "r"(tile.batch), "r"(tile.n_blocks)
                 : "memory");
    ptx::mbarrier_arrive(shared.tile_full(ring.stage));
    ring.advance();
}

// ---------------------------------------------------------------- producers

__device__ __forceinline__ void load_block(const ptx::TensorMap& map, uint32 destination, uint32 full, int row, int head,
                                           int batch) {
    ptx::mbarrier_expect_bytes(full, KEY_BYTES);
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel) {
        ptx::tma_load(map, destination + panel * KEY_PANEL_BYTES, full, ptx::EVICT_LAST, panel * panel::PANEL_COLUMNS,
                      row, head, batch);
    }
}

// The next tile of a producer that only reads them; false at the end. Called by a whole warp.
__device__ __forceinline__ bool next_tile(const Shared& shared, Ring<TILE_SLOTS>& slot, Tile& tile) {
    ptx::mbarrier_wait(shared.tile_full(slot.stage), slot.parity);
    tile = read_tile(shared, slot.stage);
    release(shared.tile_empty(slot.stage));
    slot.advance();
    return tile.m_block >= 0;
}

// One lane: hands out tiles and keeps the key ring full.
__device__ __forceinline__ void produce_keys(const Parameters& p, const Shared& shared) {
    Ring<K_STAGES> key;
    Ring<TILE_SLOTS> slot;
    int index = blockIdx.x;
    while (true) {
        const Tile tile = tile_at(p, index);
        publish_tile(shared, slot, tile);
        if (tile.m_block < 0) break;
        // Drawn now and looked at after the loads, so that they do not wait for it.
        const int ticket = atomicAdd(p.ticket, 1);
        const int head = tile.head / p.group;
#pragma unroll 1
        for (int block = tile.n_blocks - 1; block >= 0; --block) {
            ptx::mbarrier_wait(shared.key_empty(key.stage), key.parity ^ 1);
            load_block(p.key, shared.key(key.stage), shared.key_full(key.stage), block * BLOCK_N, head, tile.batch);
            key.advance();
        }
        index = redeem(p, ticket);
    }
}

// One warp, of which one lane issues: keeps the value ring full.
__device__ __forceinline__ void produce_values(const Parameters& p, const Shared& shared) {
    Ring<V_STAGES> value;
    Ring<TILE_SLOTS> slot;
    Tile tile;
    while (next_tile(shared, slot, tile)) {
        if (threadIdx.x % 32 == 0) {
            const int head = tile.head / p.group;
#pragma unroll 1
            for (int block = tile.n_blocks - 1; block >= 0; --block) {
                ptx::mbarrier_wait(shared.value_empty(value.stage), value.parity ^ 1);
                load_block(p.value, shared.value(value.stage), shared.value_full(value.stage), block * BLOCK_N, head,
                           tile.batch);
                value.advance();
            }
        }
        __syncwarp();
    }
}

// One warp, of which one lane issues: the query rows of each consumer as soon as its buffer is free.
__device__ __forceinline__ void produce_queries(const Parameters& p, const Shared& shared) {
    Ring<Q_STAGES> ring;
    Ring<TILE_SLOTS> slot;
    Tile tile;
    while (next_tile(shared, slot, tile)) {
        if (threadIdx.x % 32 == 0) {
#pragma unroll
            for (int consumer = 0; consumer < CONSUMERS; ++consumer) {
                ptx::mbarrier_wait(shared.query_empty(ring.stage, consumer), ring.parity ^ 1);
                const uint32 full = shared.query_full(ring.stage, consumer);
                ptx::mbarrier_expect_bytes(full, QUERY_BYTES);
#pragma unroll
                for (int panel = 0; panel < PANELS; ++panel) {
                    ptx::tma_load(p.query, shared.query(ring.stage, consumer) + panel * QUERY_PANEL_BYTES, full,
                                  ptx::EVICT_FIRST, panel * panel::PANEL_COLUMNS,
                                  tile.m_block * BLOCK_M + consumer * ROWS, tile.head, tile.batch);
                }
            }
        }
        __syncwarp();
        ring.advance();
    }
}

// ---------------------------------------------------------------- consumers

// S = Q K^T for 64 query rows and BLOCK_N keys; issued, not awaited.
__device__ __forceinline__ void multiply_keys(float (&s)[BLOCK_N / 2], uint64 query, uint64 key) {
    ptx::pin(s);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; ++k) {
        Scores::ss(s, query + panel::k_major_offset<ROWS>(k), key + panel::k_major_offset<BLOCK_N>(k), k != 0);
    }
    ptx::wgmma_commit();
}

// O += P V, or O = P V; issued, not awaited.
__device__ __forceinline__ void multiply_values(float (&o)[HEAD_DIM / 2], const uint32 (&p)[BLOCK_N / 4], uint64 value,
                                                bool accumulate) {
    ptx::pin(o);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < BLOCK_N / 16; ++k) {
        Output::rs(o, p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3], value + panel::mn_major_offset(k),
                   k != 0 || accumulate);
    }
    ptx::wgmma_commit();
}

// The same scores once more, by one warp alone, where the softmax has spoilt them: wgmma needs all four warps, mma.sync
// does not, and its accumulators lie as wgmma's do.
__device__ __forceinline__ void multiply_keys_again(float (&s)[BLOCK_N / 2], uint32 query, uint32 key) {
    const int lane = threadIdx.x % 32;
    const uint32 row = threadIdx.x / 32 % 4 * 16 + lane % 16;
    const uint32 column = lane / 16 * 8 + lane % 8;  // of 16: two blocks of eight keys
#pragma unroll
    for (int i = 0; i < BLOCK_N / 16; ++i) {
        float left[4] = {};
        float right[4] = {};
#pragma unroll 1
        for (int k = 0; k < HEAD_DIM / 16; ++k) {
            uint32 a[4];
            uint32 b[4];
            load_matrices(a, panel::chunk_address<ROWS>(query, row, 2 * k + lane / 16));
            load_matrices(b, panel::chunk_address<BLOCK_N>(key, i * 16 + column, 2 * k + lane / 8 % 2));
            mma(left, a, b[0], b[1]);
            mma(right, a, b[2], b[3]);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            s[8 * i + j] = left[j];
            s[8 * i + 4 + j] = right[j];
        }
    }
}

// The accumulator fragment of S is, pairwise packed, the operand fragment of P V.
__device__ __forceinline__ void pack_probabilities(const float (&s)[BLOCK_N / 2], uint32 (&p)[BLOCK_N / 4]) {
#pragma unroll
    for (int i = 0; i < BLOCK_N / 4; ++i) p[i] = pack(s[2 * i], s[2 * i + 1]);
}

__device__ __forceinline__ void rescale(float (&o)[HEAD_DIM / 2], const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; i += 4) {
        o[i] *= factor[0];
        o[i + 1] *= factor[0];
        o[i + 2] *= factor[1];
        o[i + 3] *= factor[1];
    }
}

// Normalises and writes this lane's two rows of the output, and their log-sum-exp.
//
// A quad holds eight neighbouring columns of a row, two per lane. Neighbouring lanes exchange halves of two such groups,
// so that each writes four columns and the quad a whole 32-byte sector.
__device__ __forceinline__ void store_rows(const Parameters& p, float (&o)[HEAD_DIM / 2], const Softmax& softmax,
                                           const Tile& tile, int consumer) {
    const int lane = threadIdx.x % 32;
    const bool odd = lane & 1;
    const int first_row = tile.m_block * BLOCK_M + consumer * ROWS + threadIdx.x / 32 % 4 * 16 + lane / 4;
    const int first_column = (odd ? 8 : 0) + (lane & 2) * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = first_row + 8 * half;
        const float sum = over_quad(softmax.sum[half], [](float a, float b) { return a + b; });
        const bool empty = CAUSAL && row + p.seqlen_k < p.seqlen_q;  // the row sees no key
        if (__any_sync(0xffffffff, empty)) {
            // Not by a factor of zero: a value that nobody sees may be NaN.
#pragma unroll
            for (int i = 2 * half; i < HEAD_DIM / 2; i += 4) {
                if (empty) o[i] = o[i + 1] = 0.f;
            }
        }
        const float factor = empty ? 1.f : reciprocal_approx(sum);
        const bool inside = row < p.seqlen_q;
        if (p.lse != nullptr && lane % 4 == 0 && inside) {
            const int64 head_row = static_cast<int64>(tile.batch) * p.num_heads + tile.head;
            p.lse[head_row * p.seqlen_q + row] = empty ? -infinity() : softmax.reference[half] * LN_2 + logf(sum);
        }
        uint16* destination = p.output + tile.batch * p.output_stride[0] + tile.head * p.output_stride[1] +
                              row * p.output_stride[2] + first_column;
#pragma unroll
        for (int group = 0; group < HEAD_DIM / 8; group += 2) {
            const float* pair = o + 4 * group + 2 * half;
            const uint32 left = pack(pair[0] * factor, pair[1] * factor);
            const uint32 right = pack(pair[4] * factor, pair[5] * factor);
            const uint32 received = __shfl_xor_sync(0xffffffff, odd ? left : right, 1);
            if (inside && group * 8 + first_column < p.head_dim) {
                asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(destination + group * 8),
                             "r"(odd ? received : left), "r"(odd ? right : received)
                             : "memory");
            }
        }
    }
}

__device__ __forceinline__ void consume(const Parameters& p, const Shared& shared, int consumer) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32 % 4;

    const auto take_turn = [&] {
        if (PING_PONG) ptx::barrier_sync(TURN_BARRIER + consumer, 2 * WARPGROUP);
    };
    const auto pass_turn = [&] {
        const int next = consumer + 1 == CONSUMERS ? 0 : consumer + 1;
        if (PING_PONG) ptx::barrier_arrive(TURN_BARRIER + next, 2 * WARPGROUP);
    };
    // Of the tile whose scores come next:
    int block;      // the block
    int hidden;     // blocks after it that no row of this warpgroup sees, and that are passed over
    int masked;     // blocks from here on need a mask, for some row of this warpgroup
    int own_limit;  // causal: the first key that this lane's first row may not see
    Ring<TILE_SLOTS> slot;
    // False where there is none.
    const auto enter_tile = [&] {
        ptx::mbarrier_wait(shared.tile_full(slot.stage), slot.parity);
        const Tile tile = read_tile(shared, slot.stage);
        if (tile.m_block < 0) return false;
        const int first_row = tile.m_block * BLOCK_M + consumer * ROWS;
        block = tile.n_blocks - 1;
        hidden = 0;
        masked = p.seqlen_k / BLOCK_N;
        if (CAUSAL) {
            const int shift = p.seqlen_k - p.seqlen_q + 1;
            masked = min(masked, (first_row + shift) / BLOCK_N);
            // Turns must be equal in number, so a warpgroup that takes them passes nothing over.
            const int last_key = max(0, first_row + ROWS - 2 + shift);
            if (!PING_PONG) hidden = max(0, block - last_key / BLOCK_N);
            block -= hidden;
            own_limit = first_row + warp * 16 + lane / 4 + shift;
        }
        return true;
    };
    const auto apply_mask = [&](float (&s)[BLOCK_N / 2]) {
        const int low = CAUSAL ? min(p.seqlen_k, own_limit) : p.seqlen_k;
        const int high = CAUSAL ? min(p.seqlen_k, own_limit + 8) : p.seqlen_k;
        const int first = block * BLOCK_N + 2 * (lane % 4);
        mask(s, low - first, high - first);
    };

    Ring<K_STAGES> key;
    Ring<V_STAGES> value;
    Ring<Q_STAGES> query;
    const auto query_tile = [&] { return panel::k_major(shared.query(query.stage, consumer)); };
    const auto key_tile = [&] { return panel::k_major(shared.key(key.stage)); };
    const auto value_tile = [&] { return panel::mn_major<BLOCK_N>(shared.value(value.stage)); };

    const auto pass_over_keys = [&] {
        for (int i = 0; i < hidden; ++i) {
            ptx::mbarrier_wait(shared.key_full(key.stage), key.parity);
            release(shared.key_empty(key.stage));
            key.advance();
        }
    };
    const auto pass_over_values = [&] {
        for (int i = 0; i < hidden; ++i) {
            ptx::mbarrier_wait(shared.value_full(value.stage), value.parity);
            release(shared.value_empty(value.stage));
            value.advance();
        }
    };

    float s[BLOCK_N / 2];
    float o[HEAD_DIM / 2];
    uint32 probabilities[BLOCK_N / 4];
    float correction[2];
    Softmax softmax;

    if (!enter_tile()) return;
    bool accumulate = false;
    if (PING_PONG && consumer == CONSUMERS - 1) ptx::barrier_arrive(TURN_BARRIER, 2 * WARPGROUP);

    pass_over_keys();
    pass_over_values();
    ptx::mbarrier_wait(shared.query_full(query.stage, consumer), query.parity);
    ptx::mbarrier_wait(shared.key_full(key.stage), key.parity);
    multiply_keys(s, query_tile(), key_tile());
    ptx::wgmma_wait<0>();
    ptx::pin(s);
    release(shared.key_empty(key.stage));
    key.advance();
    if (block >= masked) apply_mask(s);
    softmax.step(s, p.scale_log2, correction);
    pack_probabilities(s, probabilities);

    // Invariant: `probabilities` are those of `block`; its values are still to be multiplied.
    int old_slot;
    while (true) {
        const bool ends = block == 0;  // the tile
        old_slot = slot.stage;
        if (ends) {
            release(shared.query_empty(query.stage, consumer));
            query.advance();
            slot.advance();
            if (!enter_tile()) break;
            pass_over_keys();
            ptx::mbarrier_wait(shared.query_full(query.stage, consumer), query.parity);
        } else {
            --block;
        }

        ptx::mbarrier_wait(shared.key_full(key.stage), key.parity);
        take_turn();
        multiply_keys(s, query_tile(), key_tile());
        ptx::mbarrier_wait(shared.value_full(value.stage), value.parity);
        multiply_values(o, probabilities, value_tile(), accumulate);
        pass_turn();
        ptx::wgmma_wait<1>();
        ptx::pin(s);

        const Softmax finished = softmax;
        if (ends) softmax = Softmax();
        bool kept = false;  // the softmax's reference
        if (likely(!ends && block < masked)) kept = softmax.try_step(s, p.scale_log2);
        if (!likely(kept)) {
            if (block >= masked) {
                apply_mask(s);
            } else if (!ends) {
                multiply_keys_again(s, shared.query(query.stage, consumer), shared.key(key.stage));
            }
            softmax.step(s, p.scale_log2, correction);
        }
        release(shared.key_empty(key.stage));
        key.advance();

        ptx::wgmma_wait<0>();
        ptx::pin(o);
        release(shared.value_empty(value.stage));
        value.advance();
        if (!likely(!ends)) {
            store_rows(p, o, finished, read_tile(shared, old_slot), consumer);
            release(shared.tile_empty(old_slot));
            pass_over_values();
        } else if (!likely(kept)) {
            rescale(o, correction);
        }
        accumulate = !ends;
        pack_probabilities(s, probabilities);
    }

    ptx::mbarrier_wait(shared.value_full(value.stage), value.parity);
    multiply_values(o, probabilities, value_tile(), accumulate);
    ptx::wgmma_wait<0>();
    ptx::pin(o);
    store_rows(p, o, softmax, read_tile(shared, old_slot), consumer);
}

}  // namespace hopper

extern "C" __global__ void __launch_bounds__(hopper::THREADS, 1)
    attention_hopper(const __grid_constant__ hopper::Parameters parameters) {
    using namespace hopper;
    extern __shared__ unsigned char raw[];
    // Dynamic shared memory is only guaranteed to start on 16 bytes; the launch asks for 1024 more.
    const Shared shared{(shared_address(raw) + 1023) & ~1023u};

    const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x / 32), 0);
    const int warpgroup = warp / 4;
    if (warp == 0 && ptx::elect_lane()) {
        ptx::prefetch_map(parameters.query);
        ptx::prefetch_map(parameters.key);
        ptx::prefetch_map(parameters.value);
        initialise(shared);
    }
    __syncthreads();

    if (warpgroup == 0) {
        ptx::give_up_registers<PRODUCER_REGISTERS>();
        if (warp == 0) {
            if (ptx::elect_lane()) produce_keys(parameters, shared);
        } else if (warp == 1) {
            produce_values(parameters, shared);
        } else if (warp == 2) {
            produce_queries(parameters, shared);
        }
    } else {
        ptx::claim_registers<CONSUMER_REGISTERS>();
        consume(parameters, shared, warpgroup - 1);
    }
}

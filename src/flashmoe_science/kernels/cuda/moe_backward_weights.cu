// Gradients of a mixture of experts' weights for Hopper (sm_90a): for each expert the product of two matrices along its rows:
// of a token's rows, which are gathered, and of rows sorted by expert. As in `moe_hopper.cu`.
//
// A tile is 256 columns of the gathered rows and TOKENS of the sorted ones; a stage is 64 rows of both. Both operands lie
// across, as panels of 64 columns that wgmma takes transposed. Two consumer warpgroups have two of the gathered panels each.
// Rows of the next expert, which the last stage may have read, are set to zero: what is in them must not matter.
//
// SECOND: gradient of w2, (hidden, intermediate): gathered gradients of the output, sorted activated rows. Otherwise that of
// w13: gathered tokens, sorted gradients of what was kept; the tile is written transposed, to the rows of w13's layout.
// ACCUMULATE: the results are added to what is in `output`, in float32; otherwise written in 16 bits, zeros for an expert
// without rows. Blocks are persistent and draw tiles from a counter.
//
// Compile-time configuration: TOKENS, STAGES, SECOND, ACCUMULATE, ELEMENT_BF16.
#define THROUGH_SHARED (!SECOND && !ACCUMULATE)
#define BACKWARD 1
#define GATHER 1
#define ACTIVATION 0
#define STEP 16
#define CLUSTER 1

#include "mma/descriptor.cuh"
#include "moe/hopper_block.cuh"
#include "moe/hopper_epilogue.cuh"
#include "moe/hopper_lines.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/dependent_launch.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"

namespace moe {

constexpr int SORTED_PANELS = TOKENS / PANEL_COLUMNS;
static_assert(TOKENS % PANEL_COLUMNS == 0, "a tile is whole panels of the sorted rows");

struct WeightsParameters {
    ptx::TensorMap rows;   // the sorted rows, in boxes of 64 columns and 64 rows
    const char* tokens;    // the rows that slots stand for, `top_k` slots each
    void* output;          // SECOND: (experts, gathered, sorted), else (experts, sorted, gathered)
    const int* expert_offsets;
    const int* sorted_slots;
    int* ticket;  // zero at the start
    int experts;
    int gathered;  // columns of the tokens' rows
    int sorted;    // columns of the sorted rows
    int gathered_tiles;
    int sorted_tiles;
    int top_k;
    int part_size;  // sorted columns of the gate, or all if there is none
    int row_step;   // rows of w13 from a column of a part to the next one
    int part_step;  // rows of w13 from the first gate row to the first up row
};

__device__ __forceinline__ void prefetch_maps(const WeightsParameters& p) { ptx::prefetch_map(p.rows); }

struct WeightsTile {
    int expert;  // negative: there are no more tiles
    int gathered;
    int sorted;
    int first;
    int count;
};

// Tiles of an expert one after another, so that its rows stay in L2.
__device__ __forceinline__ WeightsTile located(const WeightsParameters& p, const Tile& published) {
    // Of Tile's fields, `weight_tile` is the number among the expert's.
    WeightsTile tile;
    tile.expert = __shfl_sync(0xffffffff, published.expert, 0);
    tile.gathered = published.weight_tile % p.gathered_tiles;
    tile.sorted = published.weight_tile / p.gathered_tiles;
    tile.first = published.first;
    tile.count = __shfl_sync(0xffffffff, published.count, 0);
    return tile;
}

struct WeightsDrawer {
    Ring<TILE_SLOTS> ring;
    Tickets tickets;

    // By the whole first warp.
    __device__ __forceinline__ Tile next(const WeightsParameters& p, const Shared& shared) {
        const int drawn = tickets.next(p.ticket, shared, 0);
        const int tiles = p.gathered_tiles * p.sorted_tiles;
        Tile tile{drawn / tiles, 0, 0, 0};
        if (tile.expert < p.experts) {
            tile.weight_tile = drawn - tile.expert * tiles;
            tile.first = __ldg(p.expert_offsets + tile.expert);
            tile.count = __ldg(p.expert_offsets + tile.expert + 1) - tile.first;
        } else {
            tile.expert = -1;
        }
        publish(shared, ring, tile);
        return tile;
    }
};

constexpr int ROWS_AT_ONCE = WARPGROUP / 8;  // eight threads copy 128 bytes of a row
constexpr int PASSES = INNER / ROWS_AT_ONCE;

// The slots of a stage's rows that this thread copies; -1: no such row. They become tokens once the next ones are on their way.
__device__ __forceinline__ void load_slots(const WeightsParameters& p, const WeightsTile& tile, int k, int (&slot)[PASSES]) {
#pragma unroll
    for (int i = 0; i < PASSES; ++i) {
        const int index = k + static_cast<int>(threadIdx.x) / 8 + i * ROWS_AT_ONCE;
        slot[i] = -1;
        if (index < tile.count) slot[i] = __ldg(p.sorted_slots + tile.first + index);
    }
}

// The producer warpgroup of the weights' gradients: its first warp draws tiles and loads sorted rows by TMA; all four warps
// gather the tokens' rows with cp.async into the layout that TMA's 128-byte swizzle would give.
__device__ __forceinline__ void produce(const WeightsParameters& p, const Shared& shared, int warp) {
    WeightsDrawer drawer;
    Ring<TILE_SLOTS> tiles;
    Ring<STAGES> ring;
    const int row = threadIdx.x / 8;
    const int chunk = threadIdx.x % 8;
    const uint32 place = Lines::offset(row, chunk);
    const int64 row_bytes = 2 * p.gathered;
    while (true) {
        const WeightsTile tile = located(p, warp == 0 ? drawer.next(p, shared) : next_tile(shared, tiles));
        if (tile.expert < 0) return;
        const int inside = p.gathered - tile.gathered * WEIGHT_ROWS - chunk * 8;  // columns from this thread's first on
        const char* first = p.tokens + (tile.gathered * WEIGHT_ROWS + chunk * 8) * 2;
        int slot[PASSES];
        load_slots(p, tile, 0, slot);
        for (int k = 0; k < tile.count; k += INNER) {
            int later[PASSES];  // on their way while this stage is filled
            load_slots(p, tile, k + INNER, later);
            ptx::mbarrier_wait(shared.empty(ring.stage), ring.parity ^ 1);
            if (threadIdx.x == 0) {
                ptx::mbarrier_expect_bytes(shared.full(ring.stage), SORTED_PANELS * PANEL_BYTES);
                for (int panel = 0; panel < SORTED_PANELS; ++panel) {
                    ptx::tma_load(p.rows, shared.tokens(ring.stage) + panel * PANEL_BYTES, shared.full(ring.stage),
                                  tile.sorted * TOKENS + panel * PANEL_COLUMNS, tile.first + k);
                }
            }
            __syncwarp();
            const uint32 to = shared.weights(ring.stage) + place;
#pragma unroll
            for (int i = 0; i < PASSES; ++i) {
                const char* from = first + static_cast<int64>(slot[i] / p.top_k) * row_bytes;
                const int columns = slot[i] < 0 ? 0 : inside;
#pragma unroll
                for (int panel = 0; panel < PANELS; ++panel) {
                    copy_chunk(to + i * ROWS_AT_ONCE * ROW_BYTES + panel * PANEL_BYTES, from + panel * ROW_BYTES,
                               panel * PANEL_COLUMNS < columns);
                }
            }
            ptx::mbarrier_arrive_after_copies(shared.full(ring.stage));
            ring.advance();
#pragma unroll
            for (int i = 0; i < PASSES; ++i) slot[i] = later[i];
        }
    }
}

using Sums = float[TOKENS / 2];

// Sorted rows from the expert's end on, in the last stage, become zero. By both consumers.
__device__ __forceinline__ void clear_rows(const Shared& shared, int stage, int rows) {
    constexpr int ALL = CONSUMERS * WARPGROUP;
    const int thread = threadIdx.x - WARPGROUP;
    const int per_panel = (INNER - rows) * 8;
    for (int panel = 0; panel < SORTED_PANELS; ++panel) {
        const uint32 from = shared.tokens(stage) + panel * PANEL_BYTES + rows * ROW_BYTES;
        for (int chunk = thread; chunk < per_panel; chunk += ALL) store_shared(from + chunk * 16, Chunk{0, 0, 0, 0});
    }
    ptx::fence_async_shared();
    ptx::barrier_sync(1, ALL);
}

// Where column `sorted` of a tile of w13's gradient goes.
__device__ __forceinline__ int64 weight_row(const WeightsParameters& p, int sorted) {
    const int part = sorted >= p.part_size ? 1 : 0;
    return static_cast<int64>(sorted - part * p.part_size) * p.row_step + part * p.part_step;
}

// A panel of (64 gathered, TOKENS sorted) columns as rows of the gradient of w2, from row `gathered` on.
__device__ __forceinline__ void store_rows(const WeightsParameters& p, int expert, int gathered, int sorted, const Sums& sums) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32 % 4;
    const bool odd = lane & 1;
    const bool upper = lane & 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = gathered + warp * 16 + half * 8 + lane / 4;
        const int64 begin = (static_cast<int64>(expert) * p.gathered + row) * p.sorted;
        if constexpr (ACCUMULATE) {
            float* to = static_cast<float*>(p.output) + begin;
#pragma unroll
            for (int i = 0; i < TOKENS / 8; ++i) {
                const int column = sorted + 8 * i + lane % 4 * 2;
                if (row < p.gathered && column < p.sorted) {
                    float2 x = load_pair(to + column);
                    x.x += sums[4 * i + 2 * half];
                    x.y += sums[4 * i + 2 * half + 1];
                    store_pair(to + column, x);
                }
            }
        } else {
            uint16* to = static_cast<uint16*>(p.output) + begin;
#pragma unroll
            for (int i = 0; i < TOKENS / 8; i += 4) {
                uint32 w[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) w[j] = pack(sums[4 * (i + j) + 2 * half], sums[4 * (i + j) + 2 * half + 1]);
                // Lane q of a quad has word q of four blocks of eight columns, and gets all words of block q.
                const uint32 first = __shfl_xor_sync(0xffffffff, odd ? w[0] : w[1], 1);
                const uint32 second = __shfl_xor_sync(0xffffffff, odd ? w[2] : w[3], 1);
                const uint32 a0 = odd ? first : w[0];
                const uint32 a1 = odd ? w[1] : first;
                const uint32 b0 = odd ? second : w[2];
                const uint32 b1 = odd ? w[3] : second;
                const uint32 other0 = __shfl_xor_sync(0xffffffff, upper ? a0 : b0, 2);
                const uint32 other1 = __shfl_xor_sync(0xffffffff, upper ? a1 : b1, 2);
                const int column = sorted + (i + lane % 4) * 8;
                if (row < p.gathered && column < p.sorted) {
                    store_columns(to + column, Chunk{upper ? other0 : a0, upper ? other1 : a1, upper ? b0 : other0,
                                                     upper ? b1 : other1});
                }
            }
        }
    }
}

// Two panels of (64 gathered, TOKENS sorted) columns, transposed, added to columns of the gradient of w13, from `gathered` on.
__device__ __forceinline__ void add_columns(const WeightsParameters& p, int expert, int gathered, int sorted, const Sums& low,
                                            const Sums& high) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32 % 4;
    float* to = static_cast<float*>(p.output) + static_cast<int64>(expert) * p.sorted * p.gathered;
#pragma unroll
    for (int i = 0; i < TOKENS / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int column = sorted + 8 * i + lane % 4 * 2 + j;
            if (column >= p.sorted) continue;
            float* row = to + weight_row(p, column) * p.gathered;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int own = gathered + warp * 16 + half * 8 + lane / 4;
                if (own < p.gathered) row[own] += low[4 * i + 2 * half + j];
                if (own + PANEL_COLUMNS < p.gathered) row[own + PANEL_COLUMNS] += high[4 * i + 2 * half + j];
            }
        }
    }
}

// The same in 16 bits, as columns, by way of the tile's last stage in shared memory. An expert without rows has no stage: zeros.
__device__ __forceinline__ void store_columns_of(const WeightsParameters& p, const Shared& shared, int stage, int consumer,
                                                 int expert, int gathered, int sorted, const Sums& low, const Sums& high) {
    uint16* output = static_cast<uint16*>(p.output) + static_cast<int64>(expert) * p.sorted * p.gathered;
    const auto address_of = [&](int row, int part, const Own& own) {
        const int column = gathered + part * PANEL_COLUMNS + own.column;
        const bool inside = sorted + row + own.line < p.sorted && column < p.gathered;
        return inside ? output + weight_row(p, sorted + row + own.line) * p.gathered + column : nullptr;
    };
    if (stage >= 0) {
        store_two_lines<TOKENS>(staging(shared, stage, consumer), consumer, low, high, address_of);
        ptx::fence_async_shared();  // the next rows come there
        release(shared.empty(stage));
        return;
    }
    for (int row = 0; row < TOKENS; row += LINES_AT_ONCE) {
        for (int part = 0; part < 2; ++part) {
            uint16* to = address_of(row, part, own_of_lines());
            if (to != nullptr) store_global(reinterpret_cast<char*>(to), Chunk{0, 0, 0, 0});
        }
    }
}

__device__ __forceinline__ void consume_tile(const WeightsParameters& p, const Shared& shared, const WeightsTile& tile,
                                             Ring<STAGES>& ring, int consumer) {
    float low[TOKENS / 2] = {};
    float high[TOKENS / 2] = {};
    int previous = -1;
    for (int k = 0; k < tile.count; k += INNER) {
        ptx::mbarrier_wait(shared.full(ring.stage), ring.parity);
        if (tile.count - k < INNER) {
            clear_rows(shared, ring.stage, tile.count - k);
        }
        // What cp.async wrote is read by wgmma, through another proxy.
        ptx::fence_async_shared();
        const uint64 a = panel::mn_major<INNER>(shared.weights(ring.stage) + 2 * consumer * PANEL_BYTES);
        const uint64 b = panel::mn_major<INNER>(shared.tokens(ring.stage));
        ptx::pin(low);
        ptx::pin(high);
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < INNER / 16; ++step) {
            const uint32 offset = panel::mn_major_offset(step);
            ptx::Wgmma<TOKENS>::template ss<1>(low, a + offset, b + offset, true);
            ptx::Wgmma<TOKENS>::template ss<1>(high, a + offset + (PANEL_BYTES >> 4), b + offset, true);
        }
        ptx::wgmma_commit();
        if (previous >= 0) {
            ptx::wgmma_wait<1>();
            release(shared.empty(previous));
        }
        previous = ring.stage;
        ring.advance();
    }
    ptx::wgmma_wait<0>();
    ptx::pin(low);
    ptx::pin(high);
    if (!THROUGH_SHARED && previous >= 0) release(shared.empty(previous));
    if (ACCUMULATE && tile.count == 0) return;

    const int gathered = tile.gathered * WEIGHT_ROWS + 2 * consumer * PANEL_COLUMNS;
    const int sorted = tile.sorted * TOKENS;
    if constexpr (SECOND) {
        store_rows(p, tile.expert, gathered, sorted, low);
        store_rows(p, tile.expert, gathered + PANEL_COLUMNS, sorted, high);
    } else if constexpr (ACCUMULATE) {
        add_columns(p, tile.expert, gathered, sorted, low, high);
    } else {
        store_columns_of(p, shared, previous, consumer, tile.expert, gathered, sorted, low, high);
    }
}

__device__ __forceinline__ void consume(const WeightsParameters& p, const Shared& shared, int consumer) {
    Ring<TILE_SLOTS> tiles;
    Ring<STAGES> ring;
    while (true) {
        const WeightsTile tile = located(p, next_tile(shared, tiles));
        if (tile.expert < 0) return;
        consume_tile(p, shared, tile, ring, consumer);
    }
}

}  // namespace moe

extern "C" __global__ void __launch_bounds__(moe::THREADS, 1)
    moe_backward_weights(const __grid_constant__ moe::WeightsParameters parameters) {
    extern __shared__ unsigned char raw[];
    moe::work(parameters, shared_address(raw));
}

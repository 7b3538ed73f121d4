// Gradients of a mixture of experts' weights for Hopper (sm_90a): for each expert the product of two matrices along its rows,
// as many as there are: of a token's rows, which are gathered, and of rows sorted by expert. TMA, wgmma and specialised
// warpgroups, as in `moe_hopper.cu`.
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
#define THROUGH_SHARED 0
#define BACKWARD 1
#define GATHER 1
#define ACTIVATION 0
#define STEP 16
#define CLUSTER 1

#include "moe/backward_weights_producer.cuh"
#include "moe/hopper_block.cuh"
#include "mma/descriptor.cuh"
#include "ptx/wgmma.cuh"

namespace moe {

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

// Two panels of (64 gathered, TOKENS sorted) columns, transposed, as columns of the gradient of w13, from `gathered` on.
__device__ __forceinline__ void store_columns_of(const WeightsParameters& p, int expert, int gathered, int sorted,
                                                 const Sums& low, const Sums& high) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32 % 4;
    const int64 begin = static_cast<int64>(expert) * p.sorted * p.gathered;
    if constexpr (ACCUMULATE) {
        float* to = static_cast<float*>(p.output) + begin;
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
    } else {
        uint16* to = static_cast<uint16*>(p.output) + begin;
        const int own = gathered + (lane & 2) / 2 * PANEL_COLUMNS + warp * 16 + lane % 2 * 8;
#pragma unroll
        for (int i = 0; i < TOKENS / 8; ++i) {
            const float* l = low + 4 * i;
            const float* h = high + 4 * i;
            uint32 block[4] = {pack(l[0], l[1]), pack(l[2], l[3]), pack(h[0], h[1]), pack(h[2], h[3])};
            const Chunk columns = columns_of_four(block);
            const int column = sorted + 8 * i + lane / 4;
            if (column < p.sorted && own < p.gathered) store_columns(to + weight_row(p, column) * p.gathered + own, columns);
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
    if (previous >= 0) release(shared.empty(previous));
    if (ACCUMULATE && tile.count == 0) return;

    const int gathered = tile.gathered * WEIGHT_ROWS + 2 * consumer * PANEL_COLUMNS;
    const int sorted = tile.sorted * TOKENS;
    if constexpr (SECOND) {
        store_rows(p, tile.expert, gathered, sorted, low);
        store_rows(p, tile.expert, gathered + PANEL_COLUMNS, sorted, high);
    } else {
        store_columns_of(p, tile.expert, gathered, sorted, low, high);
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

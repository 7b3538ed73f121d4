// Grouped products of the backward pass of a mixture of experts for Hopper (sm_90a), in the manner of `moe_hopper.cu`: a
// tile is 256 columns of a weight and up to TOKENS rows of an expert. The product runs along the weight's rows, so its tile
// lies across: panels of 64 columns that wgmma takes transposed.
//
// GATHER: the first product, d = w2^T g for each slot, g the gradient of its token's output. What the forward pass kept for
// the tile comes through the same ring of stages once the product has run; see `store_panel` for what is made of both.
// Otherwise the second: the gradient of the input by slot, w13^T dz; the combination then adds a token's.
//
// Compile-time configuration: TOKENS, STEP, STAGES, CLUSTER (2 in the second product alone, see moe_hopper.cu), GATHER,
// ACTIVATION (without GATHER it only says whether there is a gate), ELEMENT_BF16; and those of moe/hopper_parameters.cuh.
#define BACKWARD 1
#define THROUGH_SHARED GATHER

#include "mma/descriptor.cuh"
#include "moe/hopper_consumer.cuh"
#include "moe/hopper_epilogue.cuh"
#include "moe/hopper_lines.cuh"
#include "moe/hopper_producer.cuh"
#include "ptx/bulk.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/element.cuh"
#include "ptx/wgmma.cuh"

namespace moe {

#if GATHER

// A lane's row of the four 8x8 matrices that its warp moves at a time: its 16 columns, as two blocks, of eight lines of
// `first` and eight of `second`; PAIRED: of 16 lines of `first`.
template <bool PAIRED>
__device__ __forceinline__ uint32 matrix_row(uint32 first, uint32 second, uint32 thread) {
    const uint32 lane = thread % 32;
    const uint32 warp = thread / 32 % 4;
    const uint32 matrix = lane / 8;
    const uint32 in_row = Lines::offset(lane % 8, 2 * warp + matrix % 2);
    if (PAIRED) return first + matrix / 2 * 8 * ROW_BYTES + in_row;
    return (matrix < 2 ? first : second) + in_row;
}

constexpr int AT_ONCE = 2;  // eights of tokens: what is made of them, independently, hides latencies
constexpr int ROWS = 32;    // of a box in which results leave
static_assert(STEP % ROWS == 0 && TOKENS % ROWS == 0, "a tile's tokens are whole groups");
static_assert(STEP <= 2 * ROWS, "a second group behind a tile's last row would take the box in which its rest waits");

// Where activated rows wait until they have left, behind all else: two boxes a consumer, which take turns.
constexpr uint32 BOX_BYTES = ROWS * ROW_BYTES;
constexpr uint32 BOXES = (Shared::BYTES + 1023) / 1024 * 1024;
static_assert(BOXES + CONSUMERS * 2 * BOX_BYTES + 1024 <= 232448, "more shared memory than a block may have");

// Sums over the eight lanes that have the same tokens, two of each of two eights: every lane gets one of 16, which is that of
// `summed_token`, as the lane four on does.
__device__ __forceinline__ float sum_over_rows(const float (&x)[2 * AT_ONCE]) {
    const auto halve = [](float low, float high, int bit) {
        const bool upper = threadIdx.x & bit;
        return (upper ? high : low) + __shfl_xor_sync(0xffffffff, upper ? low : high, bit);
    };
    const float sum = halve(halve(x[0], x[2], 16), halve(x[1], x[3], 16), 8);
    return sum + __shfl_xor_sync(0xffffffff, sum, 4);
}

__device__ __forceinline__ int summed_token() {
    const int lane = threadIdx.x % 32;
    return lane / 16 * 8 + lane % 4 * 2 + lane / 8 % 2;
}

// Of two columns and two tokens: the gradient of what was kept takes its place in `kept` (the second two registers for
// `second` without a gate), activated values times their weight go to `rows`, and what the sums take is set.
__device__ __forceinline__ void differentiate(const float* gradient, const float (&weight)[2], uint32 (&kept)[4], int second,
                                              uint32* rows, float* sum) {
    sum[0] = 0.0f;
    sum[1] = 0.0f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int at = kGated ? half : second * 2 + half;
        const float2 gates = unpack(kept[at]);
        const float2 ups = kGated ? unpack(kept[2 + half]) : make_float2(1.0f, 1.0f);
        float to_gate[2];
        float to_up[2];
        float row[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const float up = j == 0 ? ups.x : ups.y;
            const Activated gate = activate_with_slope(j == 0 ? gates.x : gates.y);
            const float factor = factor_of(up);
            const float value = kGated ? gate.value * factor : gate.value;
            const float weighted = gradient[2 * half + j] * weight[j];
            to_gate[j] = weighted * gate.slope * (kGated ? factor : 1.0f);
            to_up[j] = weighted * gate.value * slope_of_factor(up);
            row[j] = value * weight[j];
            sum[j] += gradient[2 * half + j] * value;
        }
        kept[at] = pack(to_gate[0], to_gate[1]);
        if (kGated) kept[2 + half] = pack(to_up[0], to_up[1]);
        rows[half] = pack(row[0], row[1]);
    }
}

// Rows of a tile that fill no box, if there are such: a box of them would reach into the next expert's rows.
__device__ __forceinline__ void store_rest(const Parameters& p, const Shared& shared, int stage, const Tile& tile, int column,
                                           uint32 boxes) {
    const int rest = tile.count / ROWS * ROWS;
    if (rest >= tile.count) return;
    const auto store = [&](uint32 lines, uint16* to, int columns) {
        store_lines<ROWS>(lines, [&](int line, const Own& own) {
            const int own_column = column + own.column;
            const int64 at = static_cast<int64>(tile.first + rest + line + own.line) * columns + own_column;
            return rest + line + own.line < tile.count && own_column < p.columns ? to + at : nullptr;
        });
    };
    constexpr int PARTS = kGated ? 2 : 1;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        const uint32 kept = part == 0 ? shared.weights(stage) : shared.tokens(stage);
        store(kept + rest * ROW_BYTES, p.output + part * p.columns, PARTS * p.columns);
    }
    store(boxes + rest / ROWS % 2 * BOX_BYTES, p.activated, p.columns);
}

// What becomes of a panel of 64 columns of the gradient d = w2^T g: with what was kept of them, the gradient of that, in its
// place in shared memory, and the activated rows again, both times the slot's weight s; and of <d, act(z)>, which is the
// gradient of s, this panel's part. A thread sends boxes of 32 rows on their way to memory.
//
// `weights`: of the tile's slots, 32 a register, by lane.
template <int N>
__device__ __forceinline__ void store_panel(const Parameters& p, const Shared& shared, int stage, const Tile& tile, int panel,
                                            int consumer, const float (&d)[N / 2], const float (&weights)[(N + 31) / 32]) {
    const int lane = thread_index() % 32;  // derived for each panel, as what is made of it: registers are few
    const int warp = threadIdx.x / 32 % 4;
    const auto leads = [] { return thread_index() % WARPGROUP == 0; };
    const int panels = tile.weight_tile * PANELS + panel;
    const int column = panels * PANEL_COLUMNS;
    const bool inside = column + warp * 16 < p.columns;
    float* sums = p.sums + static_cast<int64>(panels * 4 + warp) * p.slots + tile.first;
    constexpr int EIGHTS = kGated ? 1 : 2;  // of tokens, in four matrices
    const uint32 single = matrix_row<!kGated>(shared.weights(stage), shared.tokens(stage), threadIdx.x);
    const uint32 boxes = shared.base + BOXES + (thread_index() / WARPGROUP - 1) * 2 * BOX_BYTES;
    meet_consumer(consumer);  // the first thread has waited until the boxes of the panel before had been read
#pragma unroll
    for (int start = 0; start < N; start += ROWS) {
        const uint32 box = boxes + start / ROWS % 2 * BOX_BYTES;
#pragma unroll
        for (int i = start / 8; i < (start + ROWS) / 8; i += AT_ONCE) {
            uint32 kept[AT_ONCE / EIGHTS][4];
            uint32 rows[2 * AT_ONCE];
            float sum[2 * AT_ONCE];
#pragma unroll
            for (int m = 0; m < AT_ONCE / EIGHTS; ++m) {
                load_matrices_transposed(kept[m], single + (i + m * EIGHTS) * 8 * ROW_BYTES);
            }
#pragma unroll
            for (int n = 0; n < AT_ONCE; ++n) {
                float weight[2];
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    weight[j] = __shfl_sync(0xffffffff, weights[i / 4], (i + n) % 4 * 8 + lane % 4 * 2 + j);
                }
                differentiate(d + 4 * (i + n), weight, kept[n / EIGHTS], n % EIGHTS, rows + 2 * n, sum + 2 * n);
            }
#pragma unroll
            for (int m = 0; m < AT_ONCE / EIGHTS; ++m) {
                store_matrices_transposed(single + (i + m * EIGHTS) * 8 * ROW_BYTES, kept[m][0], kept[m][1], kept[m][2],
                                          kept[m][3]);
            }
            const uint32 paired = matrix_row<true>(box, 0, thread_index());
            store_matrices_transposed(paired + (8 * i - start) * ROW_BYTES, rows[0], rows[1], rows[2], rows[3]);
            const float total = sum_over_rows(sum);
            const int token = 8 * i + summed_token();
            if (lane % 8 < 4 && token < tile.count) sums[token] = inside ? total : 0.0f;
        }
        ptx::fence_async_shared();
        if (leads()) ptx::bulk_wait_read();  // the other box is free
        meet_consumer(consumer);
        if (start + ROWS <= tile.count && leads()) {
            const int row = tile.first + start;
            ptx::tma_store(p.gradient, shared.weights(stage) + start * ROW_BYTES, column, 0, row, 0);
            if (kGated) ptx::tma_store(p.gradient, shared.tokens(stage) + start * ROW_BYTES, column, 1, row, 0);
            ptx::tma_store(p.activated_rows, box, column, 0, row, 0);
            ptx::bulk_commit();
        }
    }
    store_rest(p, shared, stage, tile, column, boxes);
    if (leads()) ptx::bulk_wait_read();
    ptx::fence_async_shared();  // TMA writes there next
}

#else

// Rows by slot. A warp has 16 columns of each of the consumer's two panels, 32 bytes each.
template <int N, typename RowOf>
__device__ __forceinline__ void store_across(const Parameters& p, const Tile& tile, const float (&low)[N / 2],
                                             const float (&high)[N / 2], int consumer, RowOf row_of) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32 % 4;
    const int panel = 2 * consumer + (lane & 2) / 2;
    const int column = tile.weight_tile * WEIGHT_ROWS + panel * PANEL_COLUMNS + warp * 16 + lane % 2 * 8;
    const bool inside = column < p.columns;
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
        const float* l = low + 4 * i;
        const float* h = high + 4 * i;
        uint32 block[4] = {pack(l[0], l[1]), pack(l[2], l[3]), pack(h[0], h[1]), pack(h[2], h[3])};
        const Chunk columns = columns_of_four(block);
        const int64 row = row_of(i);
        if (inside && 8 * i + lane / 4 < tile.count) store_columns(p.output + row * p.columns + column, columns);
    }
}

#endif

template <int N>
__device__ __forceinline__ void consume_tile(const Parameters& p, const Shared& shared, const Tile& tile,
                                             Ring<STAGES>& ring, int consumer) {
    const int lane = threadIdx.x % 32;
    // Zeroed for the reason that moe_hopper.cu gives.
    float low[N / 2] = {};
    float high[N / 2] = {};
    int previous = -1;
    const int end = inner_end(p);
    for (int k = 0; k < end; k += INNER) {
        ptx::mbarrier_wait(shared.full(ring.stage), ring.parity);
        // What cp.async wrote is read by wgmma, through another proxy.
        if (GATHER) ptx::fence_async_shared();
        const uint64 a = panel::mn_major<INNER>(shared.weights(ring.stage) + 2 * consumer * PANEL_BYTES);
        const uint64 b = panel::k_major(shared.tokens(ring.stage));
        ptx::pin(low);
        ptx::pin(high);
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < INNER / 16; ++step) {
            const uint64 across = a + panel::mn_major_offset(step);
            const uint64 along = b + panel::k_major_offset<TOKENS>(step);
            ptx::Wgmma<N>::template ss<1, 0>(low, across, along, true);
            ptx::Wgmma<N>::template ss<1, 0>(high, across + (PANEL_BYTES >> 4), along, true);
        }
        ptx::wgmma_commit();
        if (previous >= 0) {
            ptx::wgmma_wait<1>();
            release_stage(shared.empty(previous));
        }
        previous = ring.stage;
        ring.advance();
    }
    int slots[(N + 31) / 32];
#pragma unroll
    for (int i = 0; i < (N + 31) / 32; ++i) {
        const int index = 32 * i + lane;
        slots[i] = index < tile.count ? __ldg(p.sorted_slots + tile.first + index) : 0;
    }
    ptx::wgmma_wait<0>();
    ptx::pin(low);
    ptx::pin(high);
    release_stage(shared.empty(previous));

#if GATHER
    float weights[(N + 31) / 32];
#pragma unroll
    for (int i = 0; i < (N + 31) / 32; ++i) weights[i] = __ldg(p.topk_weights + slots[i]);
    // One copy of what becomes of a panel, for both panels of both consumers: four are too much for the instruction cache.
#pragma unroll 1
    for (int turn = 0; turn < PANELS; ++turn) {
        ptx::mbarrier_wait(shared.full(ring.stage), ring.parity);
        if (turn % 2 == consumer) {
            store_panel<N>(p, shared, ring.stage, tile, panel_of_turn(turn), consumer, low, weights);
#pragma unroll
            for (int i = 0; i < N / 2; ++i) low[i] = high[i];
        }
        release_stage(shared.empty(ring.stage));
        ring.advance();
    }
#else
    store_across<N>(p, tile, low, high, consumer, [&](int i) {
        return static_cast<int64>(__shfl_sync(0xffffffff, slots[i / 4], i % 4 * 8 + lane / 4));
    });
#endif
}

}  // namespace moe

extern "C" __global__ void BLOCKS_OF_A_CLUSTER __launch_bounds__(moe::THREADS, 1)
    moe_backward_hopper(const __grid_constant__ moe::Parameters parameters) {
    extern __shared__ unsigned char raw[];
    moe::work(parameters, shared_address(raw));
    if (GATHER) ptx::bulk_wait();  // until what left is in memory
}

// Grouped products of a mixture of experts for Hopper (sm_90a): TMA, wgmma and specialised warpgroups.
//
// Rows (tokens, or the activated rows of the first product) are sorted by expert; each expert's rows are multiplied with
// its weight. The weight's rows are wgmma's M and the tokens its N, so that the last tile of an expert is as narrow as
// its rows are few (in steps of STEP), which with fixed tiles of tokens would be padding. A tile is 256 weight rows
// and up to TOKENS tokens; two consumer warpgroups take 128 weight rows each, as two products of 64.
//
// GATHER: the first product. Rows are gathered by slot / top_k, the activation is applied to the accumulators, and rows
// are written in sorted order. Otherwise the second: rows are read in sorted order and written by slot.
// In a gated weight tile, 16 gate rows and the 16 up rows of the same columns take turns (TMA's fifth dimension puts
// them so, for either layout of the weight), and a product takes every other group of eight rows (a stride of the
// descriptor): a thread then holds gate and up value of the same column.
//
// KEEP: the first product also writes what the activation is applied to, which the backward pass needs.
//
// Blocks are persistent and draw tiles from a counter. With CLUSTER = 2, two blocks take the same weights with neighbouring
// rows, and each loads half of the weights for both. Compile-time configuration: TOKENS, STEP, STAGES, CLUSTER, GATHER, KEEP,
// ACTIVATION, ELEMENT_BF16, and those of moe/hopper_parameters.cuh.
#define THROUGH_SHARED 0
#define BACKWARD 0

#include "moe/hopper_consumer.cuh"
#include "moe/hopper_epilogue.cuh"
#include "moe/hopper_producer.cuh"
#include "mma/descriptor.cuh"
#include "ptx/element.cuh"
#include "ptx/wgmma.cuh"

namespace moe {

// A product's 64 weight rows: every other group of eight, from the first or the second on.
__device__ __forceinline__ uint64 alternate_groups(uint32 address) {
    constexpr uint64 stride = 2 * panel::EIGHT_ROWS;
    return static_cast<uint64>((address & 0x3FFFF) >> 4) | (1ull << 16) | ((stride >> 4) << 32) | panel::SWIZZLE_128B;
}

// Of the rows of the weight that a lane's accumulators are of.
struct Biases {
    float low[2] = {0.0f, 0.0f};
    float high[2] = {0.0f, 0.0f};
};

__device__ __forceinline__ Biases biases_of(const Parameters& p, const Tile& tile, int consumer) {
    Biases bias;
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32 % 4;
    const uint16* of_expert = p.bias + static_cast<int64>(tile.expert) * (kGated ? 2 : 1) * p.columns;
    const int column = tile.weight_tile * OUTPUT_COLUMNS +
                       (kGated ? consumer * 64 + warp * 16 : consumer * 128 + warp * 32) + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        // With a gate the second 64 rows are the next eight columns; without, blocks of eight columns take turns.
        float (&to)[2] = half == 0 ? bias.low : bias.high;
        const int first = column + half * 8;
        if (kGated) {
            if (first < p.columns) {
                to[0] = load_element(of_expert + first * p.bias_column);
                to[1] = load_element(of_expert + first * p.bias_column + p.bias_part);
            }
        } else {
            if (first < p.columns) to[0] = load_element(of_expert + first);
            if (first + 16 < p.columns) to[1] = load_element(of_expert + first + 16);
        }
    }
    return bias;
}

template <int N>
__device__ __forceinline__ void consume_tile(const Parameters& p, const Shared& shared, const Tile& tile,
                                             Ring<STAGES>& ring, int consumer) {
    const int lane = threadIdx.x % 32;
    int slots[(N + 31) / 32];
    if (!GATHER) {
#pragma unroll
        for (int i = 0; i < (N + 31) / 32; ++i) {
            const int index = 32 * i + lane;
            slots[i] = index < tile.count ? __ldg(p.sorted_slots + tile.first + index) : 0;
        }
    }
    // Zeroed, although the first product need not add: registers without a definition would be live in all widths' paths
    // at once, and spill.
    float low[N / 2] = {};
    float high[N / 2] = {};
    int previous = -1;
    for (int k = 0; k < p.inner; k += INNER) {
        ptx::mbarrier_wait(shared.full(ring.stage), ring.parity);
        // What cp.async wrote is read by wgmma, through another proxy.
        if (GATHER) ptx::fence_async_shared();
        const uint32 weights = shared.weights(ring.stage) + consumer * (WEIGHT_BYTES / CONSUMERS);
        const uint64 a = alternate_groups(weights);
        const uint64 b = panel::k_major(shared.tokens(ring.stage));
        ptx::pin(low);
        ptx::pin(high);
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < INNER / 16; ++step) {
            const uint32 offset = panel::k_major_offset<WEIGHT_ROWS>(step);
            ptx::Wgmma<N>::ss(low, a + offset, b + offset, true);
            ptx::Wgmma<N>::ss(high, a + offset + (panel::EIGHT_ROWS >> 4), b + offset, true);
        }
        ptx::wgmma_commit();
        if (previous >= 0) {
            ptx::wgmma_wait<1>();
            release_stage(shared.empty(previous));
        }
        previous = ring.stage;
        ring.advance();
    }
    ptx::wgmma_wait<0>();
    ptx::pin(low);
    ptx::pin(high);
    release_stage(shared.empty(previous));

    // Not as the sums' first values: ptxas would serialise the products.
    if (p.bias != nullptr) {
        const Biases bias = biases_of(p, tile, consumer);
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            low[i] += bias.low[i % 4 / 2];
            high[i] += bias.high[i % 4 / 2];
        }
    }
    if constexpr (KEEP) keep<N>(p, tile, low, high, consumer);
    if constexpr (kGated) {
        store_gated<N>(p, tile, low, high, consumer);
    } else if constexpr (GATHER) {
        store_plain<N>(p, tile, low, high, consumer,
                       [&](int i) { return static_cast<int64>(tile.first + 8 * i + lane / 4); });
    } else {
        store_plain<N>(p, tile, low, high, consumer, [&](int i) {
            return static_cast<int64>(__shfl_sync(0xffffffff, slots[i / 4], i % 4 * 8 + lane / 4));
        });
    }
}

}  // namespace moe

extern "C" __global__ void BLOCKS_OF_A_CLUSTER __launch_bounds__(moe::THREADS, 1)
    moe_hopper(const __grid_constant__ moe::Parameters parameters) {
    extern __shared__ unsigned char raw[];
    moe::work(parameters, shared_address(raw));
}

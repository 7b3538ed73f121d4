// Grouped products of the backward pass of a mixture of experts for Hopper (sm_90a), in the manner of `moe_hopper.cu`: a
// tile is 256 columns of a weight and up to TOKENS rows of an expert. The product runs along the weight's rows, so its tile
// lies across: panels of 64 columns that wgmma takes transposed.
//
// GATHER: the first product, d = w2^T g for each slot, g the gradient of its token's output. What the forward pass kept for
// the tile comes through the same ring of stages once the product has run; see `store_panel` for what is made of both.
// Otherwise the second: the gradient of the input by slot, w13^T dz; the combination then adds a token's.
//
// Compile-time configuration: TOKENS, STEP, STAGES, GATHER, ACTIVATION (without GATHER it only says whether there is a gate),
// ELEMENT_BF16; and those of moe/hopper_parameters.cuh.
#define BACKWARD 1
#define THROUGH_SHARED GATHER
#if ELEMENT_BF16
#define WGMMA_TYPES "bf16.bf16"
#else
#define WGMMA_TYPES "f16.f16"
#endif

#include "moe/backward_hopper_epilogue.cuh"
#include "moe/hopper_producer.cuh"
#include "mma/descriptor.cuh"
#include "ptx/bulk.cuh"
#include "ptx/dependent_launch.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"

namespace moe {

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
            release(shared.empty(previous));
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
    release(shared.empty(previous));

#if GATHER
    float weights[(N + 31) / 32];
#pragma unroll
    for (int i = 0; i < (N + 31) / 32; ++i) weights[i] = __ldg(p.topk_weights + slots[i]);
    // One copy of what becomes of a panel, for both panels of both consumers: four are too much for the instruction cache.
#pragma unroll 1
    for (int turn = 0; turn < PANELS; ++turn) {
        ptx::mbarrier_wait(shared.full(ring.stage), ring.parity);
        if (turn % 2 == consumer) {
            store_panel<N>(p, shared, ring.stage, tile, panel_of_turn(turn), low, weights);
#pragma unroll
            for (int i = 0; i < N / 2; ++i) low[i] = high[i];
        }
        release(shared.empty(ring.stage));
        ring.advance();
    }
#else
    store_across<N>(p, tile, low, high, consumer, [&](int i) {
        return static_cast<int64>(__shfl_sync(0xffffffff, slots[i / 4], i % 4 * 8 + lane / 4));
    });
#endif
}

// The product of the narrowest width that holds the tile's rows.
template <int N>
__device__ __forceinline__ void consume_at_most(const Parameters& p, const Shared& shared, const Tile& tile,
                                                Ring<STAGES>& ring, int consumer) {
    if constexpr (N > LEAST) {
        if (tile.count <= N - STEP) return consume_at_most<N - STEP>(p, shared, tile, ring, consumer);
    }
    consume_tile<N>(p, shared, tile, ring, consumer);
}

__device__ __forceinline__ void consume(const Parameters& p, const Shared& shared, int consumer) {
    Ring<TILE_SLOTS> tiles;
    Ring<STAGES> ring;
    while (true) {
        Tile tile = next_tile(shared, tiles);
        tile.count = __shfl_sync(0xffffffff, tile.count, 0);
        if (tile.count == 0) return;
        consume_at_most<TOKENS>(p, shared, tile, ring, consumer);
    }
}

}  // namespace moe

extern "C" __global__ void __launch_bounds__(moe::THREADS, 1)
    moe_backward_hopper(const __grid_constant__ moe::Parameters parameters) {
    using namespace moe;
    extern __shared__ unsigned char raw[];
    // Dynamic shared memory is only guaranteed to start on 16 bytes; the launch asks for 1024 more.
    const Shared shared{(shared_address(raw) + 1023) & ~1023u};

    const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x / 32), 0);
    if (warp == 0 && ptx::elect_lane()) {
        ptx::prefetch_map(parameters.weights);
        ptx::prefetch_map(parameters.rows);
        initialise(shared);
    }
    __syncthreads();
    if (GATHER) wait_for_predecessor();  // else the producer does, later
    allow_successor();

    if (warp < 4) {
        ptx::give_up_registers<PRODUCER_REGISTERS>();
        produce(parameters, shared, warp);
    } else {
        ptx::claim_registers<CONSUMER_REGISTERS>();
        consume(parameters, shared, warp / 4 - 1);
    }
}

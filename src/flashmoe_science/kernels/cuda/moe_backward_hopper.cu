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

#include "moe/backward_hopper_epilogue.cuh"
#include "moe/hopper_consumer.cuh"
#include "moe/hopper_producer.cuh"
#include "mma/descriptor.cuh"
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
            store_panel<N>(p, shared, ring.stage, tile, panel_of_turn(turn), low, weights);
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
}

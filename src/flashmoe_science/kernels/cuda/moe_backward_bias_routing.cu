// The part that the second product's bias has in the gradients of the routing weights: for each slot the product of its token's
// gradient with its expert's bias, added to what is there. A warp a row in sorted order.
//
// Compile-time configuration: IDS64, DEPENDENT (ptx/dependent_launch.cuh), ELEMENT_BF16.
#if DEPENDENT
#include "ptx/dependent_launch.cuh"
#endif
#include "ptx/global.cuh"
#include "ptx/element.cuh"
#include "types.cuh"

constexpr int kThreads = 256;

struct BiasRoutingParameters {
    const char* gradients;  // (tokens, columns), of the output
    const char* bias;       // (experts, columns)
    const void* ids;
    const int* expert_offsets;
    const int* sorted_slots;
    float* output;  // (slots)
    int columns;    // a multiple of 16
    int top_k;
    int experts;
};

extern "C" __global__ void __launch_bounds__(kThreads)
    moe_backward_bias_routing(const __grid_constant__ BiasRoutingParameters p) {
#if DEPENDENT
    wait_for_predecessor();
    allow_successor();
#endif
    const int row = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
    if (row >= p.expert_offsets[p.experts]) return;
    const int slot = p.sorted_slots[row];
#if IDS64
    const int64 expert = static_cast<const int64*>(p.ids)[slot];
#else
    const int64 expert = static_cast<const int*>(p.ids)[slot];
#endif
    const char* gradient = p.gradients + static_cast<int64>(slot / p.top_k) * p.columns * kElementBytes;
    const char* bias = p.bias + expert * p.columns * kElementBytes;
    float sum = 0.0f;
    for (int column = threadIdx.x % 32 * kChunkElements; column < p.columns; column += 32 * kChunkElements) {
        const Chunk g = load_once(gradient + column * kElementBytes);
        const Chunk b = load_global(bias + column * kElementBytes);
        const uint32 left[4] = {g.x, g.y, g.z, g.w};
        const uint32 right[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 x = unpack(left[i]);
            const float2 y = unpack(right[i]);
            sum = fmaf(x.x, y.x, sum);
            sum = fmaf(x.y, y.y, sum);
        }
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffff, sum, distance);
    if (threadIdx.x % 32 == 0) p.output[slot] += sum;
}

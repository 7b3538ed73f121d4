// Gradients of the routing weights: for each slot the sum of what the tiles of columns left, in their order; zero for an id
// that is no expert. A thread a slot, and a thread a row in sorted order.
//
// Compile-time configuration: IDS64, DEPENDENT (ptx/dependent_launch.cuh).
#include "types.cuh"

#if DEPENDENT
#include "ptx/dependent_launch.cuh"
#endif

constexpr int kThreads = 256;
constexpr int kBatch = 8;

struct RoutingGradientParameters {
    const float* sums;  // (parts, slots), rows sorted
    const void* ids;
    const int* expert_offsets;
    const int* sorted_slots;
    float* output;  // (slots)
    int parts;      // a multiple of 8
    int slots;
    int experts;
};

extern "C" __global__ void __launch_bounds__(kThreads)
    moe_backward_routing(const __grid_constant__ RoutingGradientParameters p) {
#if DEPENDENT
    wait_for_predecessor();
    allow_successor();
#endif
    const int64 i = static_cast<int64>(blockIdx.x) * kThreads + threadIdx.x;
    if (i >= p.slots) return;
#if IDS64
    const int64 id = static_cast<const int64*>(p.ids)[i];
#else
    const int id = static_cast<const int*>(p.ids)[i];
#endif
    if (id < 0 || id >= p.experts) p.output[i] = 0.0f;
    if (i >= p.expert_offsets[p.experts]) return;
    float sum = 0.0f;
    for (int part = 0; part < p.parts; part += kBatch) {
        float x[kBatch];
#pragma unroll
        for (int j = 0; j < kBatch; ++j) x[j] = p.sums[static_cast<int64>(part + j) * p.slots + i];
#pragma unroll
        for (int j = 0; j < kBatch; ++j) sum += x[j];
    }
    p.output[p.sorted_slots[i]] = sum;
}

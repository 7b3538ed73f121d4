// The router's losses from the sums that the blocks of topk_routing.cu left, in one block and in a fixed order.
//
// experts * sum over experts of (slots of the expert / tokens) * (its mean probability), and the mean of the squares of the
// logarithms of the softmax's denominators. How often each expert was chosen goes out too.
//
// Macros: THREADS (at least as many as there are experts), DEPENDENT (ptx/dependent_launch.cuh).
#if DEPENDENT
#include "ptx/dependent_launch.cuh"
#endif
#include "types.cuh"

struct LossParameters {
    const float* probabilities;  // (blocks, experts)
    const int* slots;            // (blocks, experts)
    const float* squares;        // (blocks)
    float* balance;              // scalars
    float* z;
    int64* counts;  // (experts)
    int blocks;
    int experts;
    int tokens;
};

constexpr int kWarps = THREADS / 32;

__device__ __forceinline__ float over_block(float x, float (&shared)[kWarps]) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    __syncthreads();  // those of an earlier sum have been read
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0.0f;
    for (int i = 0; i < kWarps; ++i) sum += shared[i];
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS) routing_losses(const __grid_constant__ LossParameters p) {
#if DEPENDENT
    wait_for_predecessor();
    allow_successor();
#endif
    __shared__ float probabilities[THREADS];
    __shared__ int slots[THREADS];
    __shared__ float of_warps[kWarps];
    // Neighbouring threads have neighbouring experts; a slice of them has every slices-th block.
    const int slices = THREADS / p.experts;
    const int expert = threadIdx.x % p.experts, slice = threadIdx.x / p.experts;
    float probability = 0.0f;
    int count = 0;
    if (slice < slices) {
#pragma unroll 8
        for (int block = slice; block < p.blocks; block += slices) {
            const int64 at = static_cast<int64>(block) * p.experts + expert;
            probability += p.probabilities[at];
            count += p.slots[at];
        }
    }
    probabilities[threadIdx.x] = probability;
    slots[threadIdx.x] = count;
    float square = 0.0f;
    for (int block = threadIdx.x; block < p.blocks; block += THREADS) square += p.squares[block];
    __syncthreads();
    float product = 0.0f;
    if (slice == 0) {
        for (int i = 1; i < slices; ++i) {
            probability += probabilities[i * p.experts + expert];
            count += slots[i * p.experts + expert];
        }
        p.counts[expert] = count;
        const float tokens = static_cast<float>(p.tokens);
        product = static_cast<float>(count) / tokens * (probability / tokens);
    }
    product = over_block(product, of_warps);
    square = over_block(square, of_warps);
    if (threadIdx.x == 0) {
        *p.balance = static_cast<float>(p.experts) * product;
        *p.z = square / static_cast<float>(p.tokens);
    }
}

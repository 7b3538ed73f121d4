// Sixty-four running sums per thread. BLOCKS: blocks that must fit a multiprocessor; at 8 there are 32 registers for them.
#include "types.cuh"

constexpr int SUMS = 64;

struct Arguments {
    const float* in;  // one value per thread
    float* out;
    int rounds;
};

extern "C" __global__ void __launch_bounds__(256, BLOCKS) accumulate(const __grid_constant__ Arguments p) {
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    float x = p.in[index];
    float sum[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; ++i) sum[i] = x * i;
#pragma unroll 1
    for (int round = 0; round < p.rounds; ++round) {
#pragma unroll
        for (int i = 0; i < SUMS; ++i) sum[i] = fmaf(sum[i], x, sum[(i + 1) % SUMS]);
        x += 1e-7f;
    }
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < SUMS; ++i) total += sum[i];
    p.out[index] = total;
}

// Blocks of equal length, one to a multiprocessor: how well they fill the chip is up to the grid that is launched.
#include "types.cuh"

struct Arguments {
    float* out;
    int rounds;
};

extern "C" __global__ void __launch_bounds__(512) waves(const __grid_constant__ Arguments p) {
    extern __shared__ char held[];  // so much of it that no second block fits
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = threadIdx.x + i;
#pragma unroll 1
    for (int round = 0; round < p.rounds; ++round) {
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = fmaf(x[i], 0.5f, 1.f);
    }
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) total += x[i];
    p.out[blockIdx.x * blockDim.x + threadIdx.x] = total;
}

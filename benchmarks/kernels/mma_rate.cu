// How fast mma.sync goes when nothing else is in its way: the ceiling of any kernel that uses it.
// LDMATRIX: ldmatrix.x4 per four products; EXPONENTIALS: ex2 (with its multiply-add and sum) per four products.
#include "mma/m16n8k16.cuh"
#include "ptx/ldmatrix.cuh"
#include "types.cuh"

constexpr int kTiles = 16;

struct Arguments {
    float* out;
    int rounds;
};

extern "C" __global__ void __launch_bounds__(128) mma_rate(const __grid_constant__ Arguments arguments) {
    __shared__ __align__(1024) char memory[8192];
    for (int i = threadIdx.x; i < 2048; i += 128) reinterpret_cast<float*>(memory)[i] = 0.0f;
    __syncthreads();
    const uint32 address = shared_address(memory) + threadIdx.x % 32 / 8 * 1024 + threadIdx.x % 8 * 128 +
                           (threadIdx.x % 8 ^ threadIdx.x / 32) * 16;
    float d[kTiles][4] = {};
    float x[4] = {0.1f, 0.2f, 0.3f, 0.4f};
    float sum = 0.0f;
    uint32 a[2][4] = {{1, 2, 3, 4}, {5, 6, 7, 8}};
    uint32 b[4] = {1, 2, 3, 4};
    for (int r = 0; r < arguments.rounds; ++r) {
#pragma unroll
        for (int t = 0; t < kTiles; t += 4) {
#if LDMATRIX
            load_matrices(b, address ^ (t * 32));
#endif
            mma(d[t], a[0], b[0], b[1]);
            mma(d[t + 1], a[1], b[0], b[1]);
            mma(d[t + 2], a[0], b[2], b[3]);
            mma(d[t + 3], a[1], b[2], b[3]);
#pragma unroll
            for (int i = 0; i < EXPONENTIALS; ++i) {
                x[i] = exp2_approx(fmaf(x[i], 0.7f, -1.0f));
                sum += x[i];
            }
        }
    }
    for (int t = 0; t < kTiles; ++t) sum += d[t][0] + d[t][1] + d[t][2] + d[t][3];
    arguments.out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

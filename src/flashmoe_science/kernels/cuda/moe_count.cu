// First step of routing over more slots than a block takes: how many of each block's slots go to each expert.
#include "moe/routing.cuh"

extern "C" __global__ void __launch_bounds__(routing::THREADS) moe_count(const __grid_constant__ routing::Parameters p) {
    using namespace routing;
    extern __shared__ __align__(1024) char shared_memory[];
    int* const count = reinterpret_cast<int*>(shared_memory);  // of each expert
    begin();
    for (int expert = threadIdx.x; expert < p.experts; expert += THREADS) count[expert] = 0;
    __syncthreads();
    const int64 first = static_cast<int64>(blockIdx.x) * CHUNK + threadIdx.x;
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
        const int expert = expert_of(p, first + i * THREADS);
        if (expert >= 0) atomicAdd(count + expert, 1);
    }
    __syncthreads();
    int* counts = p.counts + static_cast<int64>(blockIdx.x) * p.experts;
    for (int expert = threadIdx.x; expert < p.experts; expert += THREADS) counts[expert] = count[expert];
}

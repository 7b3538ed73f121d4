// A copy. WIDE: 0 moves four bytes per thread, one load in flight; 1 moves four times 16 bytes.
#include "ptx/vector.cuh"
#include "types.cuh"

struct Arguments {
    const uint32* from;
    uint32* to;
    int64 bytes;  // a multiple of what a block moves
};

extern "C" __global__ void __launch_bounds__(256) copy(const __grid_constant__ Arguments p) {
#if WIDE
    const int64 first = static_cast<int64>(blockIdx.x) * 1024 + threadIdx.x;
    uint4 held[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) held[i] = reinterpret_cast<const uint4*>(p.from)[first + 256 * i];
#pragma unroll
    for (int i = 0; i < 4; ++i) reinterpret_cast<uint4*>(p.to)[first + 256 * i] = held[i];
#else
    const int64 index = static_cast<int64>(blockIdx.x) * 256 + threadIdx.x;
    p.to[index] = p.from[index];
#endif
}

// The tile of an expert's rows that a block has, where as many blocks are launched as there can be tiles.
#pragma once
#include "types.cuh"

struct ExpertTile {
    int expert;
    int first;  // row, in sorted order
    int rows;   // 0: there is no such tile
};

// Row tile `index`: experts one after another, of each as many as hold its rows. By one warp, whose lanes get the same.
template <int Rows>
__device__ __forceinline__ ExpertTile expert_tile(const int* expert_offsets, int experts, int index) {
    const int lane = threadIdx.x % 32;
    int before = 0;
    for (int base = 0; base < experts; base += 32) {
        const int expert = base + lane;
        const int begin = expert_offsets[min(expert, experts)], end = expert_offsets[min(expert + 1, experts)];
        const int tiles = (end - begin + Rows - 1) / Rows;
        int sum = tiles;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, sum, distance);
            if (lane >= distance) sum += other;
        }
        const int local = index - before - (sum - tiles);  // this expert's, if it is one
        const uint32 owner = __ballot_sync(0xffffffffu, local >= 0 && local < tiles);
        if (owner != 0) {
            const int source = __ffs(owner) - 1;
            const int its = __shfl_sync(0xffffffffu, local, source);
            const int first = __shfl_sync(0xffffffffu, begin, source) + its * Rows;
            return {base + source, first, min(Rows, __shfl_sync(0xffffffffu, end, source) - first)};
        }
        before += __shfl_sync(0xffffffffu, sum, 31);
    }
    return {0, 0, 0};
}

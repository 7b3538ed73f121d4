// Routing: every slot to its place, and the beginnings of all experts.
#include "moe/routing.cuh"

namespace routing {

// Sum of all lanes' values up to this one's.
__device__ __forceinline__ int inclusive_scan(int x) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(ALL, x, distance);
        if (lane >= distance) x += other;
    }
    return x;
}

}  // namespace routing

extern "C" __global__ void __launch_bounds__(routing::THREADS) moe_place(const __grid_constant__ routing::Parameters p) {
    using namespace routing;
    extern __shared__ int next[];  // (WARPS, CAPACITY): a warp's slots of each expert, then the place of its next one
    __shared__ int warp_total[WARPS];
    __shared__ int carried;
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    begin();
    for (int i = threadIdx.x; i < WARPS * CAPACITY; i += THREADS) next[i] = 0;
    if (threadIdx.x == 0) carried = 0;
    if (blockIdx.x == 0 && threadIdx.x < 2) p.tickets[threadIdx.x] = 0;
    __syncthreads();

    int* own = next + warp * CAPACITY;
    const int64 first = static_cast<int64>(blockIdx.x) * CHUNK + warp * (32 * LOADS) + lane;
    int expert[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; ++i) expert[i] = expert_of(p, first + 32 * i);
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
        const uint32 mates = __match_any_sync(ALL, expert[i]);
        if (expert[i] >= 0 && lane == __ffs(mates) - 1) own[expert[i]] += __popc(mates);
        __syncwarp();
    }
    __syncthreads();

    for (int start = 0; start < p.experts; start += THREADS) {
        const int e = start + threadIdx.x;
        int total = 0;   // of all blocks
        int before = 0;  // of the blocks before this one
        if (e < p.experts) {
            if (gridDim.x == 1) {
                for (int w = 0; w < WARPS; ++w) total += next[w * CAPACITY + e];
            } else {
#pragma unroll 8
                for (int block = 0; block < gridDim.x; ++block) {
                    const int count = __ldcg(p.counts + static_cast<int64>(block) * p.experts + e);
                    total += count;
                    if (block < blockIdx.x) before += count;
                }
            }
        }
        const int through = inclusive_scan(total);
        if (lane == 31) warp_total[warp] = through;
        __syncthreads();
        int sum = carried;  // of all experts before this one
        for (int w = 0; w < warp; ++w) sum += warp_total[w];
        sum += through - total;
        __syncthreads();
        if (threadIdx.x == THREADS - 1) carried = sum + total;
        if (e < p.experts) {
            if (blockIdx.x == 0) {
                p.expert_offsets[e] = sum;
                if (e == p.experts - 1) p.expert_offsets[p.experts] = sum + total;
            }
            int place = sum + before;
            for (int w = 0; w < WARPS; ++w) {
                const int count = next[w * CAPACITY + e];
                next[w * CAPACITY + e] = place;
                place += count;
            }
        }
    }
    __syncthreads();

#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
        const uint32 mates = __match_any_sync(ALL, expert[i]);
        const int rank = __popc(mates & ((1u << lane) - 1));
        int place = 0;
        if (expert[i] >= 0) place = own[expert[i]];
        __syncwarp();
        if (expert[i] >= 0) {
            p.sorted_slots[place + rank] = static_cast<int>(first + 32 * i);
            if (rank == 0) own[expert[i]] = place + __popc(mates);
        }
        __syncwarp();
    }
}

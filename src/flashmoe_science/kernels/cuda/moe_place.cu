// Routing: every slot to its place, and the beginnings of all experts.
#include "moe/routing.cuh"

namespace routing {

// With one thread an expert, threads that are left over share the counting of other blocks' slots.
constexpr int GROUPS = THREADS > CAPACITY ? THREADS / CAPACITY : 1;

__device__ __forceinline__ int inclusive_scan(int x) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(ALL, x, distance);
        if (lane >= distance) x += other;
    }
    return x;
}

// The lanes with this lane's expert, bit by bit of its number; none for -1.
__device__ __forceinline__ uint32 mates_of(int expert) {
    uint32 mates = __ballot_sync(ALL, expert >= 0);
#pragma unroll
    for (int bit = 1; bit < CAPACITY; bit *= 2) {
        const bool set = expert & bit;
        const uint32 those = __ballot_sync(ALL, set);
        mates &= set ? those : ~those;
    }
    return expert >= 0 ? mates : 0;
}

}  // namespace routing

extern "C" __global__ void __launch_bounds__(routing::THREADS) moe_place(const __grid_constant__ routing::Parameters p) {
    using namespace routing;
    extern __shared__ __align__(1024) char shared_memory[];
    // (WARPS, CAPACITY): a warp's slots of each expert, then the place of its next one.
    int* const next = reinterpret_cast<int*>(shared_memory);
    __shared__ int partial[2][THREADS];
    __shared__ int warp_total[WARPS];
    __shared__ int carried;
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    begin();
    for (int i = threadIdx.x; i < WARPS * CAPACITY; i += THREADS) next[i] = 0;
    if (threadIdx.x == 0) carried = 0;
    if (blockIdx.x == 0 && threadIdx.x < TICKETS) p.tickets[threadIdx.x] = 0;

    const int64 first = static_cast<int64>(blockIdx.x) * CHUNK + warp * (32 * LOADS) + lane;
    int expert[LOADS];
    uint32 mates[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; ++i) expert[i] = expert_of(p, first + 32 * i);
    __syncthreads();
    int* own = next + warp * CAPACITY;
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
        mates[i] = mates_of(expert[i]);
        if (lane == __ffs(mates[i]) - 1) own[expert[i]] += __popc(mates[i]);
        __syncwarp();
    }
    __syncthreads();

    for (int start = 0; start < p.experts; start += THREADS) {
        if (gridDim.x > 1) {
            const int e = start + threadIdx.x % CAPACITY;
            int all = 0;
            int earlier = 0;
            if (e < p.experts) {
#pragma unroll 8
                for (int block = threadIdx.x / CAPACITY; block < gridDim.x; block += GROUPS) {
                    const int count = __ldcg(p.counts + static_cast<int64>(block) * p.experts + e);
                    all += count;
                    if (block < blockIdx.x) earlier += count;
                }
            }
            partial[0][threadIdx.x] = all;
            partial[1][threadIdx.x] = earlier;
            __syncthreads();
        }
        // One thread an expert.
        const int e = start + threadIdx.x;
        const bool counts = threadIdx.x < CAPACITY && e < p.experts;
        int total = 0;   // of all blocks
        int before = 0;  // of the blocks before this one
        if (counts) {
            if (gridDim.x == 1) {
#pragma unroll 8
                for (int w = 0; w < WARPS; ++w) total += next[w * CAPACITY + e];
            } else {
#pragma unroll
                for (int group = 0; group < GROUPS; ++group) {
                    total += partial[0][group * CAPACITY + threadIdx.x];
                    before += partial[1][group * CAPACITY + threadIdx.x];
                }
            }
        }
        const int through = inclusive_scan(total);
        if (lane == 31) warp_total[warp] = through;
        __syncthreads();
        int sum = carried + through - total;  // of all experts before this one
        for (int w = 0; w < warp; ++w) sum += warp_total[w];
        __syncthreads();
        if (threadIdx.x == THREADS - 1) carried = sum + total;
        if (counts) {
            if (blockIdx.x == 0) {
                p.expert_offsets[e] = sum;
                if (e == p.experts - 1) p.expert_offsets[p.experts] = sum + total;
            }
            int place = sum + before;
            constexpr int AT_ONCE = WARPS < 8 ? WARPS : 8;
            for (int w = 0; w < WARPS; w += AT_ONCE) {
                int of_warp[AT_ONCE];
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) of_warp[i] = next[(w + i) * CAPACITY + e];
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) {
                    next[(w + i) * CAPACITY + e] = place;
                    place += of_warp[i];
                }
            }
        }
    }
    __syncthreads();

#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
        const int rank = __popc(mates[i] & ((1u << lane) - 1));
        int place = 0;
        if (expert[i] >= 0) place = own[expert[i]];
        __syncwarp();
        if (expert[i] >= 0) {
            p.sorted_slots[place + rank] = static_cast<int>(first + 32 * i);
            if (rank == 0) own[expert[i]] = place + __popc(mates[i]);
        }
        __syncwarp();
    }
}

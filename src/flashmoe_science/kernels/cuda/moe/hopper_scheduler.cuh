// From a ticket to the product that it stands for, without a table: experts are counted off 32 at a time.
#pragma once

#include "moe/hopper_shared.cuh"

namespace moe {

// How many tiles of rows share the weights that pass by, before the next such group begins: both stay in L2.
constexpr int GROUP = 16;

constexpr int CLUSTER_TOKENS = TOKENS * CLUSTER;

// An expert's rows are shared out evenly, in steps that waste nothing: a narrow tile moves nearly as many bytes as a wide
// one, for less work.
__device__ __forceinline__ int rows_per_tile(int count) {
    constexpr int step = STEP * CLUSTER;
    const int tiles = max(1, (count + CLUSTER_TOKENS - 1) / CLUSTER_TOKENS);
    return ((count + tiles - 1) / tiles + step - 1) / step * step;
}

__device__ __forceinline__ int tiles_of(int count) {
    const int rows = max(1, rows_per_tile(count));
    return (count + rows - 1) / rows;
}

// Tickets only grow, so a block walks through the experts once. A ticket is a cluster's: its blocks take the same weights, and
// share the rows evenly. Called by a whole warp.
struct Cursor {
    int first_expert = 0;  // of the 32 looked at
    int before = 0;        // tiles of all experts before them

    __device__ __forceinline__ Tile find(const Parameters& p, int ticket, int rank) {
        const int lane = threadIdx.x % 32;
        while (first_expert < p.experts) {
            const int expert = first_expert + lane;
            int begin = 0;
            int count = 0;
            if (expert < p.experts) {
                begin = __ldg(p.expert_offsets + expert);
                count = __ldg(p.expert_offsets + expert + 1) - begin;
            }
            const int row_tiles = tiles_of(count);
            int through = row_tiles * p.weight_tiles;
#pragma unroll
            for (int distance = 1; distance < 32; distance *= 2) {
                const int other = __shfl_up_sync(0xffffffff, through, distance);
                if (lane >= distance) through += other;
            }
            const uint32 past = __ballot_sync(0xffffffff, ticket < before + through);
            if (past != 0) {
                const int found = __ffs(past) - 1;
                const int rows_in_all = __shfl_sync(0xffffffff, count, found);
                const int tiles = __shfl_sync(0xffffffff, row_tiles, found);
                const int per_tile = rows_per_tile(rows_in_all);
                const int local = ticket - before - __shfl_sync(0xffffffff, through, found) + tiles * p.weight_tiles;
                const int per_group = GROUP * p.weight_tiles;
                const int group = local / per_group;
                const int rest = local - group * per_group;
                const int width = min(GROUP, tiles - group * GROUP);
                Tile tile;
                tile.expert = first_expert + found;
                tile.weight_tile = rest / width;
                const int skipped = (group * GROUP + rest - tile.weight_tile * width) * per_tile;
                tile.first = __shfl_sync(0xffffffff, begin, found) + skipped;
                tile.count = min(per_tile, rows_in_all - skipped);
                if constexpr (CLUSTER == 2) {
                    const int half = (tile.count + 1) / 2;
                    tile.first += rank * half;
                    tile.count = rank == 0 ? half : tile.count - half;
                }
                return tile;
            }
            before += __shfl_sync(0xffffffff, through, 31);
            first_expert += 32;
        }
        return {0, 0, 0, NO_TILE};
    }
};

}  // namespace moe

// The tiles of a grouped product that a block works on, found one after another on the device.
//
// Tile `index` of the grid belongs to an expert, to one of its row tiles and to a tile of columns: experts one after
// another; inside an expert equal sections of about `section` row tiles; inside a section column by column, so that tiles
// which run at the same time share rows and weights in L2. Blocks draw tickets for tiles: some tiles have fewer rows than
// others, and neighbouring tiles stay neighbours in time.
#pragma once
#include "moe/portable_parameters.cuh"
#include "types.cuh"

struct WorkTile {
    int rows;      // of this tile; 0: there is no more work
    int position;  // of the first row in the sorted order
    int column;    // first output column
    int expert;
};

// In shared memory. Warp 0 publishes the block's tiles in their order; what others read was published before a barrier.
//
// RING: how many tiles lie between the one that the slowest warp still stores and the one that is published now.
template <int ROWS, int COLUMNS, int RING, bool GATHER>
struct WorkQueue {
    WorkTile tiles[RING];
    uint32 row_chunks[2][GATHER ? ROWS : 1];  // where the rows of the two last published tiles are, in 16-byte chunks
    // Where the search for the next tile starts: all experts before this one have this many row tiles.
    int expert;
    int row_tiles_before;

    __device__ __forceinline__ void start() {
        expert = 0;
        row_tiles_before = 0;
    }

    // By all threads of warp 0. `ticket`: lane 0's, drawn one tile ahead because that takes long; blockIdx.x at first.
    __device__ __forceinline__ void publish(int number, int& ticket, const ProductParameters& p) {
        const int lane = threadIdx.x % 32;
        const uint32 index = static_cast<uint32>(__shfl_sync(0xffffffffu, ticket, 0));
        if (lane == 0) ticket = atomicAdd(p.ticket, 1) + static_cast<int>(gridDim.x);
        const int row_tile = static_cast<int>(index / p.column_tiles);
        int first_expert = expert;
        int before = row_tiles_before;
        WorkTile tile = {0, 0, 0, 0};
        for (; first_expert < p.experts; first_expert += 32) {
            int begin = 0, rows = 0;
            if (first_expert + lane < p.experts) {
                begin = p.expert_offsets[first_expert + lane];
                rows = p.expert_offsets[first_expert + lane + 1] - begin;
            }
            const int row_tiles = (rows + ROWS - 1) / ROWS;
            int end = row_tiles;
#pragma unroll
            for (int distance = 1; distance < 32; distance *= 2) {
                const int other = __shfl_up_sync(0xffffffffu, end, distance);
                if (lane >= distance) end += other;
            }
            const uint32 beyond = __ballot_sync(0xffffffffu, before + end > row_tile);
            if (beyond != 0) {
                const int owner = __ffs(beyond) - 1;
                begin = __shfl_sync(0xffffffffu, begin, owner);
                rows = __shfl_sync(0xffffffffu, rows, owner);
                const int tiles_of_expert = __shfl_sync(0xffffffffu, row_tiles, owner);
                const int first_row_tile = before + __shfl_sync(0xffffffffu, end, owner) - tiles_of_expert;
                const int local = static_cast<int>(index - static_cast<uint32>(first_row_tile) * p.column_tiles);
                const int sections = max(1, (tiles_of_expert + p.section / 2) / p.section);
                const int width = (tiles_of_expert + sections - 1) / sections;
                const int section = local / (width * p.column_tiles);
                const int in_section = local % (width * p.column_tiles);
                const int side_by_side = min(width, tiles_of_expert - section * width);
                const int first_row = (section * width + in_section % side_by_side) * ROWS;
                tile.rows = min(ROWS, rows - first_row);
                tile.position = begin + first_row;
                tile.column = in_section / side_by_side * COLUMNS;
                tile.expert = first_expert + owner;
                break;
            }
            before += __shfl_sync(0xffffffffu, end, 31);
        }
        __syncwarp();
        if (lane == 0) {
            tiles[number % RING] = tile;
            expert = first_expert;
            row_tiles_before = before;
        }
        if (GATHER) {
            const uint32 chunks = p.inner / kChunkElements;
#pragma unroll
            for (int r = lane; r < ROWS; r += 32) {
                if (r < tile.rows) {
                    row_chunks[number % 2][r] = static_cast<uint32>(p.sorted_slots[tile.position + r]) / p.top_k * chunks;
                }
            }
        }
        __syncwarp();
    }
};

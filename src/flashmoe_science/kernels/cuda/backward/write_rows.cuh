// A warp's accumulators, scaled and rounded, through shared memory to 16-byte stores.
#pragma once
#include "backward/tile_copy.cuh"
#include "ptx/vector.cuh"
#include "swizzle.cuh"
#include "types.cuh"

// `stage`: shared memory for RowTiles x 16 rows, this warp's own. `target`: the first row in global memory. Rows from
// `rows` on are left out.
template <int HeadDim, int RowTiles>
__device__ __forceinline__ void write_rows(const float (&sums)[RowTiles][HeadDim / 8][4], float scale, uint32 stage,
                                           char* target, int64 row_bytes, int rows, int head_dim) {
    using T = Tile<HeadDim>;
    const int lane = thread_index() % 32;
    __syncwarp();  // other lanes have read what is overwritten
#pragma unroll
    for (int m = 0; m < RowTiles; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int d = 0; d < HeadDim / 8; ++d) {
                store_shared(stage + T::offset(m * 16 + h * 8 + lane / 4, d) + 4 * (lane % 4),
                             pack(sums[m][d][2 * h] * scale, sums[m][d][2 * h + 1] * scale));
            }
        }
    }
    __syncwarp();
    constexpr int columns = power_of_two_above(T::kChunks);
    const int column = lane % columns;
#pragma unroll
    for (int r = lane / columns; r < RowTiles * 16; r += 32 / columns) {
        if (r < rows && column < head_dim / kChunkElements) {
            store_global(target + r * row_bytes + column * kChunkBytes, load_shared(stage + T::offset(r, column)));
        }
    }
}

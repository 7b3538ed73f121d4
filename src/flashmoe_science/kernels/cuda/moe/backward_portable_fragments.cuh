// Operands of mma.sync from tiles in shared memory.
#pragma once
#include "mma/m16n8k16.cuh"
#include "ptx/ldmatrix.cuh"
#include "swizzle.cuh"
#include "types.cuh"

// sums += A B for 16 of the inner dimension. B lies along its columns: `b` is this lane's place in the warp's first 16 columns.
template <typename TileB, int RowTiles, int ColumnTiles>
__device__ __forceinline__ void multiply_across(float (&sums)[RowTiles][ColumnTiles][4], const uint32 (&a)[RowTiles][4],
                                                uint32 b) {
#pragma unroll
    for (int n = 0; n < ColumnTiles; n += 2) {
        uint32 columns[4];
        load_matrices_transposed(columns, TileB::advance(b, n / 2));
#pragma unroll
        for (int m = 0; m < RowTiles; ++m) {
            mma(sums[m][n], a[m], columns[0], columns[1]);
            mma(sums[m][n + 1], a[m], columns[2], columns[3]);
        }
    }
}

template <int RowTiles, int ColumnTiles>
__device__ __forceinline__ void clear(float (&sums)[RowTiles][ColumnTiles][4]) {
#pragma unroll
    for (int m = 0; m < RowTiles; ++m)
#pragma unroll
        for (int n = 0; n < ColumnTiles; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[m][n][i] = 0.0f;
}

// Gradients from a warpgroup's accumulators to global memory.
#pragma once

#include "ptx/global.cuh"
#include "types.cuh"

namespace backward {

// This lane's two rows of a gradient, of those from `first_row` on and before `rows`, in the columns from `first_column` on
// and before `columns`. Neighbouring lanes exchange halves, so that each writes four columns. `start`: of the head.
template <int COLUMNS>
__device__ __forceinline__ void store_rows(const float (&sum)[COLUMNS / 2], float factor, uint16* start, int64 stride,
                                           int first_row, int rows, int first_column, int columns) {
    const int lane = threadIdx.x % 32;
    const bool odd = lane & 1;
    const int own_row = first_row + threadIdx.x / 32 % 4 * 16 + lane / 4;
    const int own_column = first_column + (odd ? 8 : 0) + (lane & 2) * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = own_row + 8 * half;
        const bool inside = row < rows;
        uint16* own = start + row * stride + own_column;
#pragma unroll
        for (int group = 0; group < COLUMNS / 8; group += 2) {
            const float* pair = sum + 4 * group + 2 * half;
            const uint32 left = pack(pair[0] * factor, pair[1] * factor);
            const uint32 right = pack(pair[4] * factor, pair[5] * factor);
            const uint32 received = __shfl_xor_sync(0xffffffff, odd ? left : right, 1);
            if (inside && group * 8 + own_column < columns) {
                store_global(reinterpret_cast<char*>(own + group * 8), odd ? received : left, odd ? right : received);
            }
        }
    }
}

}  // namespace backward

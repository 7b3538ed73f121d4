// What becomes of a panel of 64 columns of the gradient d = w2^T g: with what was kept of them, the gradient of that and the
// activated rows again, both times the slot's weight s; and of <d, act(z)>, which is the gradient of s, this panel's part.
// `store_panel` is in either file.
#pragma once

#if THROUGH_SHARED
#include "moe/backward_shared_epilogue.cuh"
#else
#include "moe/backward_register_epilogue.cuh"
#endif

namespace moe {

// Rows by slot. A warp has 16 columns of each of the consumer's two panels, 32 bytes each.
template <int N, typename RowOf>
__device__ __forceinline__ void store_across(const Parameters& p, const Tile& tile, const float (&low)[N / 2],
                                             const float (&high)[N / 2], int consumer, RowOf row_of) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32 % 4;
    const int panel = 2 * consumer + (lane & 2) / 2;
    const int column = tile.weight_tile * WEIGHT_ROWS + panel * PANEL_COLUMNS + warp * 16 + lane % 2 * 8;
    const bool inside = column < p.columns;
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
        const float* l = low + 4 * i;
        const float* h = high + 4 * i;
        uint32 block[4] = {pack(l[0], l[1]), pack(l[2], l[3]), pack(h[0], h[1]), pack(h[2], h[3])};
        const Chunk columns = columns_of_four(block);
        const int64 row = row_of(i);
        if (inside && 8 * i + lane / 4 < tile.count) store_columns(p.output + row * p.columns + column, columns);
    }
}

}  // namespace moe

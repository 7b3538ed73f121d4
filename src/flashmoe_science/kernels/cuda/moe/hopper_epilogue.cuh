// From accumulators to memory, without shared memory: rows of the product are columns of the output, so 8x8 blocks are
// transposed within a warp (movmatrix), and a quad of lanes writes its token's columns.
#pragma once

#include "moe/hopper_shared.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/global.cuh"

namespace moe {

// Two blocks of eight columns, packed, as the accumulators hold them: a lane gets four neighbouring columns of token lane / 4,
// those of `quad_column`.
__device__ __forceinline__ uint2 columns_of_two(uint32 left, uint32 right) {
    const bool odd = threadIdx.x & 1;
    left = transpose_matrix(left);
    right = transpose_matrix(right);
    const uint32 received = __shfl_xor_sync(0xffffffff, odd ? left : right, 1);
    return {odd ? received : left, odd ? right : received};
}

__device__ __forceinline__ int quad_column() { return (threadIdx.x & 1) * 8 + (threadIdx.x & 2) * 2; }

// Four blocks of eight columns, packed: lane q of a quad gets the eight columns of block q, of token lane / 4.
__device__ __forceinline__ Chunk columns_of_four(uint32 (&block)[4]) {
    const bool odd = threadIdx.x & 1;
    const bool upper = threadIdx.x & 2;
#pragma unroll
    for (int j = 0; j < 4; ++j) block[j] = transpose_matrix(block[j]);
    // A 4x4 transpose over the quad: first within pairs of lanes, then between the pairs.
    const uint32 first = __shfl_xor_sync(0xffffffff, odd ? block[0] : block[1], 1);
    const uint32 second = __shfl_xor_sync(0xffffffff, odd ? block[2] : block[3], 1);
    const uint32 a0 = odd ? first : block[0];
    const uint32 a1 = odd ? block[1] : first;
    const uint32 b0 = odd ? second : block[2];
    const uint32 b1 = odd ? block[3] : second;
    const uint32 other0 = __shfl_xor_sync(0xffffffff, upper ? a0 : b0, 2);
    const uint32 other1 = __shfl_xor_sync(0xffffffff, upper ? a1 : b1, 2);
    return {upper ? other0 : a0, upper ? other1 : a1, upper ? b0 : other0, upper ? b1 : other1};
}

__device__ __forceinline__ void store_columns(uint16* address, const uint2& columns) {
    store_global(reinterpret_cast<char*>(address), columns.x, columns.y);
}

__device__ __forceinline__ void store_columns(uint16* address, const Chunk& columns) {
    store_global(reinterpret_cast<char*>(address), columns);
}

#if !BACKWARD

// Gated: a warp's two products hold gate values in rows 0-7 and up values of the same columns in rows 8-15; the second
// product's columns are the next eight. 16 columns, 32 bytes, of eight tokens at a time.
template <int N>
__device__ __forceinline__ void store_gated(const Parameters& p, const Tile& tile, const float (&low)[N / 2],
                                            const float (&high)[N / 2], int consumer) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32 % 4;
    const int column = tile.weight_tile * OUTPUT_COLUMNS + consumer * 64 + warp * 16;
    const bool inside = column < p.columns;
    uint16* output = p.output + static_cast<int64>(tile.first) * p.columns + column + quad_column();
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
        const float* l = low + 4 * i;
        const float* h = high + 4 * i;
        const uint2 columns = columns_of_two(pack(activate(l[0]) * factor_of(l[2]), activate(l[1]) * factor_of(l[3])),
                                             pack(activate(h[0]) * factor_of(h[2]), activate(h[1]) * factor_of(h[3])));
        const int token = 8 * i + lane / 4;
        if (inside && token < tile.count) store_columns(output + static_cast<int64>(token) * p.columns, columns);
    }
}

// What is activated later, as it is: 16 gate and the 16 up columns of a warp, or 32 columns where there is no gate.
template <int N>
__device__ __forceinline__ void keep(const Parameters& p, const Tile& tile, const float (&low)[N / 2],
                                     const float (&high)[N / 2], int consumer) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32 % 4;
    const int kept_columns = kGated ? 2 * p.columns : p.columns;
    int column = tile.weight_tile * OUTPUT_COLUMNS;
    if (kGated) {
        column += consumer * 64 + warp * 16 + lane % 2 * 8;
    } else {
        column += consumer * 128 + warp * 32 + lane % 4 * 8;
    }
    const bool inside = column < p.columns;
    uint16* kept = p.kept + static_cast<int64>(tile.first) * kept_columns + column;
    if (kGated && lane & 2) kept += p.columns;
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
        const float* l = low + 4 * i;
        const float* h = high + 4 * i;
        uint32 block[4] = {pack(l[0], l[1]), pack(h[0], h[1]), pack(l[2], l[3]), pack(h[2], h[3])};
        const Chunk columns = columns_of_four(block);
        const int token = 8 * i + lane / 4;
        if (inside && token < tile.count) store_columns(kept + static_cast<int64>(token) * kept_columns, columns);
    }
}

// Ungated: a warp's four blocks of eight rows are 32 neighbouring columns, 64 bytes, of eight tokens at a time. Lane q of
// a quad ends with the 16 bytes of block q. `row_of(i)`: where this lane's token of the i-th eight goes.
template <int N, typename RowOf>
__device__ __forceinline__ void store_plain(const Parameters& p, const Tile& tile, const float (&low)[N / 2],
                                            const float (&high)[N / 2], int consumer, RowOf row_of) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32 % 4;
    const int column = tile.weight_tile * OUTPUT_COLUMNS + consumer * 128 + warp * 32 + lane % 4 * 8;
    const bool inside = column < p.columns;
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
        const float* l = low + 4 * i;
        const float* h = high + 4 * i;
        uint32 block[4] = {pack(activate(l[0]), activate(l[1])), pack(activate(h[0]), activate(h[1])),
                           pack(activate(l[2]), activate(l[3])), pack(activate(h[2]), activate(h[3]))};
        const Chunk columns = columns_of_four(block);
        const int64 row = row_of(i);
        if (inside && 8 * i + lane / 4 < tile.count) store_columns(p.output + row * p.columns + column, columns);
    }
}

#endif

}  // namespace moe

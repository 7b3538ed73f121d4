// Shared-memory matrix descriptors for wgmma (PTX ISA, "Shared memory matrix layout"), 128-byte swizzle, 16-bit types.
//
// All tiles are stored as panels of 64 columns: `rows` rows of 128 bytes, whose eight 16-byte chunks TMA permutes by the
// row's index modulo 8. Panels start on 1024 bytes, so that the permutation depends on the row alone.
#pragma once

#include "types.cuh"

namespace panel {

constexpr int PANEL_COLUMNS = 64;
constexpr int ROW_BYTES = 128;
constexpr uint64 SWIZZLE_128B = 1ull << 62;
constexpr uint64 EIGHT_ROWS = 8 * ROW_BYTES;

// Descriptor offsets (in units of 16 bytes) from the start of a tile to its k-th step of 16 along the inner dimension.
template <int ROWS>
__device__ __forceinline__ constexpr uint32 k_major_offset(int k) {
    return static_cast<uint32>((k / 4) * ROWS * ROW_BYTES + (k % 4) * 32) >> 4;
}

__device__ __forceinline__ constexpr uint32 mn_major_offset(int k) {
    return static_cast<uint32>(k * 16 * ROW_BYTES) >> 4;
}

// A tile whose inner product runs along its rows (query, key): rows are 128 bytes apart, groups of eight 1024.
__device__ __forceinline__ uint64 k_major(uint32 address) {
    return static_cast<uint64>((address & 0x3FFFF) >> 4) | (1ull << 16) | ((EIGHT_ROWS >> 4) << 32) | SWIZZLE_128B;
}

// A tile whose inner product runs across its rows (value): the leading offset leads to the next panel of 64 columns.
template <int ROWS>
__device__ __forceinline__ uint64 mn_major(uint32 address) {
    constexpr uint64 panel = static_cast<uint64>(ROWS) * ROW_BYTES;
    return static_cast<uint64>((address & 0x3FFFF) >> 4) | ((panel >> 4) << 16) | ((EIGHT_ROWS >> 4) << 32) |
           SWIZZLE_128B;
}

// Address of a 16-byte chunk of a tile, for a single warp's ldmatrix.
template <int ROWS>
__device__ __forceinline__ uint32 chunk_address(uint32 tile, uint32 row, uint32 chunk) {
    return tile + (chunk / 8) * ROWS * ROW_BYTES + row * ROW_BYTES + ((chunk % 8 ^ row % 8) << 4);
}

}  // namespace panel

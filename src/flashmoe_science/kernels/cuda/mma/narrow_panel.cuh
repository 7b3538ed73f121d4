// Panels of 16 columns with the 32-byte swizzle, for tiles whose inner product runs across rows and that are not whole panels of
// 64 wide. They start on 256 bytes.
#pragma once

#include "types.cuh"

namespace narrow_panel {

constexpr int ROW_BYTES = 32;
constexpr uint64 SWIZZLE_32B = 3ull << 62;
constexpr uint64 EIGHT_ROWS = 8 * ROW_BYTES;

__device__ __forceinline__ constexpr uint32 mn_major_offset(int k) { return static_cast<uint32>(k * 16 * ROW_BYTES) >> 4; }

template <int ROWS>
__device__ __forceinline__ uint64 mn_major(uint32 address) {
    return static_cast<uint64>((address & 0x3FFFF) >> 4) | (static_cast<uint64>(ROWS * ROW_BYTES >> 4) << 16) |
           ((EIGHT_ROWS >> 4) << 32) | SWIZZLE_32B;
}

template <int ROWS>
__device__ __forceinline__ uint32 chunk_address(uint32 tile, uint32 row, uint32 chunk) {
    return tile + chunk / 2 * ROWS * ROW_BYTES + row * ROW_BYTES + ((chunk % 2 ^ row / 4 % 2) << 4);
}

}  // namespace narrow_panel

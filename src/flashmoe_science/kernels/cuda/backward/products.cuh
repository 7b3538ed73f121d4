// A warp's matrix products with tiles in shared memory.
#pragma once
#include "mma/m16n8k16.cuh"
#include "ptx/ldmatrix.cuh"
#include "swizzle.cuh"
#include "types.cuh"

// This lane's row and chunk for ldmatrix, so that each operand of mma is a pair of neighbouring registers: rows that are
// multiplied along themselves (right operand of `multiply`) as 8 rows x 2 chunks, twice; left operands and rows that are
// summed over (`accumulate`) as 16 rows x 1 chunk, twice.
template <int HeadDim>
__device__ __forceinline__ uint32 lane_along(int lane) {
    return Tile<HeadDim>::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

template <int HeadDim>
__device__ __forceinline__ uint32 lane_across(int lane) {
    return Tile<HeadDim>::offset(lane % 16, lane / 16);
}

// The same address, of which the compiler does not know: what is derived from it is computed where it is needed instead of
// being held in registers throughout the main loop.
__device__ __forceinline__ uint32 derive_here(uint32 address) {
    asm volatile("" : "+r"(address));
    return address;
}

// RowTiles x 16 rows of a tile as left operand. The first RegisterSteps 16-wide slices stay in registers, the rest is read
// whenever it is needed.
template <int HeadDim, int RowTiles, int RegisterSteps>
struct LeftOperand {
    using T = Tile<HeadDim>;
    uint32 fragments[RegisterSteps > 0 ? RegisterSteps : 1][RowTiles][4];
    uint32 address;  // of the lane's row and chunk (lane_across)

    __device__ __forceinline__ void load_registers() {
#pragma unroll
        for (int k = 0; k < RegisterSteps; ++k) {
#pragma unroll
            for (int m = 0; m < RowTiles; ++m) read(address, k, m, fragments[k][m]);
        }
    }
    static __device__ __forceinline__ void read(uint32 from, int k, int m, uint32 (&a)[4]) {
        load_matrices(a, T::advance(from, k) + m * 16 * T::kRowBytes);
    }
    // `from`: the operand's address.
    __device__ __forceinline__ void fragment(uint32 from, int k, int m, uint32 (&a)[4]) const {
        if (k < RegisterSteps) {
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = fragments[k][m][i];
        } else {
            read(from, k, m, a);
        }
    }
};

// sums += left rightᵀ, over the head dimension. `right`: the lane's address (lane_along) in the first row. Fewer registers if
// `Tight`: the compiler reads ahead only within two or four slices.
template <bool Tight, int HeadDim, int RowTiles, int ColumnTiles, int RegisterSteps>
__device__ __forceinline__ void multiply(float (&sums)[RowTiles][ColumnTiles][4],
                                         const LeftOperand<HeadDim, RowTiles, RegisterSteps>& left, uint32 right) {
    using T = Tile<HeadDim>;
    right = derive_here(right);
    const uint32 from = derive_here(left.address);
#pragma unroll (!Tight || RegisterSteps > 0 ? HeadDim / 16 : HeadDim % 128 == 0 ? 4 : 2)
    for (int k = 0; k < HeadDim / 16; ++k) {
        uint32 a[RowTiles][4];
#pragma unroll
        for (int m = 0; m < RowTiles; ++m) left.fragment(from, k, m, a[m]);
#pragma unroll
        for (int g = 0; g < ColumnTiles / 2; ++g) {
            uint32 b[4];
            load_matrices(b, T::advance(right, k) + g * 16 * T::kRowBytes);
#pragma unroll
            for (int m = 0; m < RowTiles; ++m) {
                mma(sums[m][2 * g], a[m], b[0], b[1]);
                mma(sums[m][2 * g + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// Bits of the elements, of the two in `pair`, that are infinite or not a number.
__device__ __forceinline__ uint32 not_finite(uint32 pair) {
    constexpr uint32 exponent = ELEMENT_BF16 ? 0x7f80u : 0x7c00u;
    const uint32 low = (pair & exponent) == exponent ? 0xffffu : 0u;
    const uint32 high = (pair >> 16 & exponent) == exponent ? 0xffff0000u : 0u;
    return low | high;
}

// out += left right over the 16 rows at `right` (the lane's address, lane_across). `guarded`: what is not finite in `right`
// counts as zero.
template <int HeadDim, int RowTiles>
__device__ __forceinline__ void accumulate(float (&out)[RowTiles][HeadDim / 8][4], const uint32 (&left)[RowTiles][4],
                                           uint32 right, bool guarded) {
    using T = Tile<HeadDim>;
    right = derive_here(right);
#pragma unroll
    for (int d = 0; d < HeadDim / 16; ++d) {
        uint32 b[4];
        load_matrices_transposed(b, T::advance(right, d));
        if (guarded) {
#pragma unroll
            for (int i = 0; i < 4; ++i) b[i] &= ~not_finite(b[i]);
        }
#pragma unroll
        for (int m = 0; m < RowTiles; ++m) {
            mma(out[m][2 * d], left[m], b[0], b[1]);
            mma(out[m][2 * d + 1], left[m], b[2], b[3]);
        }
    }
}

template <int RowTiles, int ColumnTiles>
__device__ __forceinline__ void clear(float (&sums)[RowTiles][ColumnTiles][4]) {
#pragma unroll
    for (int m = 0; m < RowTiles; ++m) {
#pragma unroll
        for (int n = 0; n < ColumnTiles; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[m][n][i] = 0.0f;
        }
    }
}

// Accumulators of 16 neighbouring columns, tiles 2g and 2g + 1, as left operand.
template <int RowTiles, int ColumnTiles>
__device__ __forceinline__ void pack_group(const float (&sums)[RowTiles][ColumnTiles][4], int g,
                                           uint32 (&packed)[RowTiles][4]) {
#pragma unroll
    for (int m = 0; m < RowTiles; ++m) {
        packed[m][0] = pack(sums[m][2 * g][0], sums[m][2 * g][1]);
        packed[m][1] = pack(sums[m][2 * g][2], sums[m][2 * g][3]);
        packed[m][2] = pack(sums[m][2 * g + 1][0], sums[m][2 * g + 1][1]);
        packed[m][3] = pack(sums[m][2 * g + 1][2], sums[m][2 * g + 1][3]);
    }
}

// out += sums right over 8 x ColumnTiles rows at `right` (the lane's address, lane_across), with the sums rounded to elements.
template <int HeadDim, int RowTiles, int ColumnTiles>
__device__ __forceinline__ void accumulate_chunk(float (&out)[RowTiles][HeadDim / 8][4],
                                                 const float (&sums)[RowTiles][ColumnTiles][4], uint32 right,
                                                 bool guarded) {
#pragma unroll
    for (int g = 0; g < ColumnTiles / 2; ++g) {
        uint32 packed[RowTiles][4];
        pack_group(sums, g, packed);
        accumulate<HeadDim>(out, packed, right + g * 16 * Tile<HeadDim>::kRowBytes, guarded);
    }
}

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

// sums = left rightᵀ + initial, over the head dimension. `right`: the lane's address (lane_along) in the first row.
// `initial(n, m, c)` gives the fragment that tile (m, n) starts with, and `between(k)` is other work to be done beside slice k.
// Fewer registers if `Tight`: the compiler reads ahead only within two or four slices.
template <bool Tight, int HeadDim, int RowTiles, int ColumnTiles, int RegisterSteps, typename Initial, typename Between>
__device__ __forceinline__ void multiply(float (&sums)[RowTiles][ColumnTiles][4],
                                         const LeftOperand<HeadDim, RowTiles, RegisterSteps>& left, uint32 right,
                                         Initial initial, Between between) {
    using T = Tile<HeadDim>;
    constexpr int steps = HeadDim / 16;
    constexpr bool whole = !Tight || RegisterSteps > 0;
    right = derive_here(right);
    const uint32 from = derive_here(left.address);
    if (!whole) {
#pragma unroll
        for (int n = 0; n < ColumnTiles; ++n) {
#pragma unroll
            for (int m = 0; m < RowTiles; ++m) initial(n, m, sums[m][n]);
        }
    }
#pragma unroll (whole ? steps : steps % 8 == 0 ? 4 : 2)
    for (int k = 0; k < steps; ++k) {
        uint32 a[RowTiles][4];
#pragma unroll
        for (int m = 0; m < RowTiles; ++m) left.fragment(from, k, m, a[m]);
#pragma unroll
        for (int n = 0; n < ColumnTiles; n += 2) {
            uint32 b[4];
            load_matrices(b, T::advance(right, k) + n * 8 * T::kRowBytes);
#pragma unroll
            for (int m = 0; m < RowTiles; ++m) {
                if (whole && k == 0) {
                    float c[2][4];
                    initial(n, m, c[0]);
                    initial(n + 1, m, c[1]);
                    mma(sums[m][n], a[m], b[0], b[1], c[0]);
                    mma(sums[m][n + 1], a[m], b[2], b[3], c[1]);
                } else {
                    mma(sums[m][n], a[m], b[0], b[1]);
                    mma(sums[m][n + 1], a[m], b[2], b[3]);
                }
            }
        }
        if (whole) between(k);
    }
    if (!whole) {
#pragma unroll
        for (int k = 0; k < steps; ++k) between(k);
    }
}

// An `initial` and a `between` for `multiply`.
__device__ __forceinline__ void zero(int, int, float (&c)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) c[i] = 0.0f;
}

__device__ __forceinline__ void nothing(int) {}

// Calls `body(m, n)` for the share of the tiles (m, n), RowTiles x ColumnTiles of them, that belongs beside slice k.
template <int HeadDim, int RowTiles, int ColumnTiles, typename Body>
__device__ __forceinline__ void for_share(int k, Body body) {
    constexpr int steps = HeadDim / 16;
    constexpr int tiles = RowTiles * ColumnTiles;
#pragma unroll
    for (int t = 0; t < tiles; ++t) {
        if (t * steps / tiles == k) body(t % RowTiles, t / RowTiles);
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

// out += sums right over the 16-row groups [first, last) of those at `right` (the lane's address, lane_across), with the sums
// rounded to elements.
template <int HeadDim, int RowTiles, int ColumnTiles>
__device__ __forceinline__ void accumulate_groups(float (&out)[RowTiles][HeadDim / 8][4],
                                                  const float (&sums)[RowTiles][ColumnTiles][4], int first, int last,
                                                  uint32 right, bool guarded) {
#pragma unroll
    for (int g = first; g < last; ++g) {
        uint32 packed[RowTiles][4];
        pack_group(sums, g, packed);
        accumulate<HeadDim>(out, packed, right + g * 16 * Tile<HeadDim>::kRowBytes, guarded);
    }
}

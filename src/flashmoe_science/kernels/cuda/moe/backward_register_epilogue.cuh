// The first product's epilogue: results are transposed in registers.
#pragma once

#include "moe/hopper_epilogue.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/unpack.cuh"

namespace moe {

// Where the four 8x8 matrices are that a lane loads of eight tokens (16 without a gate): blocks of eight columns, of the gate
// and of the up columns, which the warp's accumulators have.
__device__ __forceinline__ uint32 kept_address(const Shared& shared, int stage) {
    const uint32 lane = threadIdx.x % 32;
    const uint32 warp = threadIdx.x / 32 % 4;
    const uint32 matrix = lane / 8;
    const uint32 chunk = 2 * warp + matrix % 2;
    const uint32 in_row = (lane % 8) * ROW_BYTES + ((chunk ^ lane % 8) << 4);
    if (kGated) return (matrix < 2 ? shared.weights(stage) : shared.tokens(stage)) + in_row;
    return shared.weights(stage) + (matrix / 2) * 8 * ROW_BYTES + in_row;
}

// Of a quantity of two tokens a lane, the sums over the eight lanes that have the same ones: in lanes 0 to 3 of the first
// token of each pair, in lanes 16 to 19 of the second.
__device__ __forceinline__ float sum_over_rows(float first, float second) {
    const bool upper = threadIdx.x & 16;
    float sum = upper ? second : first;
    sum += __shfl_xor_sync(0xffffffff, upper ? first : second, 16);
    sum += __shfl_xor_sync(0xffffffff, sum, 8);
    return sum + __shfl_xor_sync(0xffffffff, sum, 4);
}

// `weights`: of the tile's slots, 32 a register, by lane.
template <int N>
__device__ __forceinline__ void store_panel(const Parameters& p, const Shared& shared, int stage, const Tile& tile, int panel,
                                            const float (&d)[N / 2], const float (&weights)[(N + 31) / 32]) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32 % 4;
    const int panels = tile.weight_tile * PANELS + panel;
    const int column = panels * PANEL_COLUMNS + warp * 16;
    const bool inside = column < p.columns;
    const int output_columns = kGated ? 2 * p.columns : p.columns;
    uint16* output = p.output + static_cast<int64>(tile.first) * output_columns + column;
    output += kGated ? lane % 2 * 8 + (lane & 2) / 2 * p.columns : quad_column();
    uint16* activated = p.activated + static_cast<int64>(tile.first) * p.columns + column + quad_column();
    float* sums = p.sums + static_cast<int64>(panels * 4 + warp) * p.slots + tile.first;
    const uint32 address = kept_address(shared, stage);
    uint32 kept[4];
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
        if (kGated || i % 2 == 0) load_matrices_transposed(kept, address + i * 8 * ROW_BYTES);
        const float* gradient = d + 4 * i;
        const float first_weight = __shfl_sync(0xffffffff, weights[i / 4], i % 4 * 8 + lane % 4 * 2);
        const float second_weight = __shfl_sync(0xffffffff, weights[i / 4], i % 4 * 8 + lane % 4 * 2 + 1);
        const float weight[2] = {first_weight, second_weight};
        float to_gate[4];
        float to_up[4];
        float row[4];
        float sum[2] = {0.0f, 0.0f};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float2 gates = unpack(kept[kGated ? half : i % 2 * 2 + half]);
            const float2 ups = kGated ? unpack(kept[2 + half]) : make_float2(1.0f, 1.0f);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float up = j == 0 ? ups.x : ups.y;
                const Activated gate = activate_with_slope(j == 0 ? gates.x : gates.y);
                const float factor = factor_of(up);
                const float value = kGated ? gate.value * factor : gate.value;
                const float weighted = gradient[2 * half + j] * weight[j];
                to_gate[2 * half + j] = weighted * gate.slope * (kGated ? factor : 1.0f);
                to_up[2 * half + j] = weighted * gate.value * slope_of_factor(up);
                row[2 * half + j] = value * weight[j];
                sum[j] += gradient[2 * half + j] * value;
            }
        }
        const int token = 8 * i + lane / 4;
        const bool stored = inside && token < tile.count;
        const uint2 rows = columns_of_two(pack(row[0], row[1]), pack(row[2], row[3]));
        if (stored) store_columns(activated + static_cast<int64>(token) * p.columns, rows);
        uint32 block[4] = {pack(to_gate[0], to_gate[1]), pack(to_gate[2], to_gate[3]), pack(to_up[0], to_up[1]),
                           pack(to_up[2], to_up[3])};
        uint16* to = output + static_cast<int64>(token) * output_columns;
        if constexpr (kGated) {
            const Chunk columns = columns_of_four(block);
            if (stored) store_columns(to, columns);
        } else {
            const uint2 columns = columns_of_two(block[0], block[1]);
            if (stored) store_columns(to, columns);
        }
        // Columns past the end have no gradient, but what was read in their place may be anything.
        const float total = sum_over_rows(inside ? sum[0] : 0.0f, inside ? sum[1] : 0.0f);
        const int summed = 8 * i + lane % 4 * 2 + lane / 16;
        if ((lane & 12) == 0 && summed < tile.count) sums[summed] = total;
    }
}

}  // namespace moe

// Online softmax over the fragments that one warp holds: RowTiles x 16 query rows by BlockN keys.
//
// Scores stay unscaled; exponents are taken in base 2 as ex2(score * scale_log2 - shift), one multiply-add and one
// ex2 per element. `shift` is a row maximum, possibly a stale one: it is raised only when some score of the warp exceeds it
// by more than kSlack (log2 units), because raising it means rescaling the output. Sums and outputs always share
// the same shift, so the result is exact whatever its age, unless values are so large (bf16, above 2^120 / keys) that
// weights of up to 2^kSlack make the unnormalised output overflow.
// Row sums are kept per lane and added up across the four lanes of a row at the end.
#pragma once
#include "ablation.cuh"
#include "quad.cuh"
#include "types.cuh"

constexpr float kSlack = 8.0f;
// The least finite float: no finite score times scale is below it, and nothing here ever subtracts infinities.
constexpr float kNoShift = -3.402823466e38f;

__device__ __forceinline__ float quad_max(float x) {
    return over_quad(x, [](float a, float b) { return fmaxf(a, b); });
}

template <int RowTiles, int OutTiles>
struct Softmax {
    float shift[RowTiles][2];
    float sum[RowTiles][2];

    __device__ __forceinline__ Softmax() {
#pragma unroll
        for (int m = 0; m < RowTiles; ++m) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                shift[m][h] = kNoShift;
                sum[m][h] = 0.0f;
            }
        }
    }

    // Raises the shifts where a score demands it, and rescales sums and outputs to match. Warp-uniform.
    template <int KeyTiles>
    __device__ __forceinline__ void update(const float (&scores)[RowTiles][KeyTiles][4],
                                           float (&out)[RowTiles][OutTiles][4], float scale_log2) {
        float local[RowTiles][2];
        float excess = NEGATIVE_INFINITY;
#pragma unroll
        for (int m = 0; m < RowTiles; ++m) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float x = fmaxf(scores[m][0][2 * h], scores[m][0][2 * h + 1]);
#pragma unroll
                for (int n = 1; n < KeyTiles; ++n) {
                    x = fmaxf(x, fmaxf(scores[m][n][2 * h], scores[m][n][2 * h + 1]));
                }
                local[m][h] = x;
                excess = fmaxf(excess, fmaf(x, scale_log2, -shift[m][h]));
            }
        }
        if (__any_sync(0xffffffffu, excess > kSlack)) {
#pragma unroll
            for (int m = 0; m < RowTiles; ++m) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float raised = fmaxf(shift[m][h], quad_max(local[m][h]) * scale_log2);
                    const float factor = exp2_approx(shift[m][h] - raised);
                    shift[m][h] = raised;
                    sum[m][h] *= factor;
#pragma unroll
                    for (int d = 0; d < OutTiles; ++d) {
                        out[m][d][2 * h] *= factor;
                        out[m][d][2 * h + 1] *= factor;
                    }
                }
            }
        }
    }

    // Exponentials of 16 keys (two tiles of scores), as the A fragment of the product with the values.
    __device__ __forceinline__ void exponentials(const float (&left)[4], const float (&right)[4], int m,
                                                 float scale_log2, uint32 (&p)[4]) {
        float e[8];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            e[i] = exponential(fmaf(left[i], scale_log2, -shift[m][i / 2]));
            e[4 + i] = exponential(fmaf(right[i], scale_log2, -shift[m][i / 2]));
        }
        sum[m][0] += (e[0] + e[1]) + (e[4] + e[5]);
        sum[m][1] += (e[2] + e[3]) + (e[6] + e[7]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            p[i] = pack(e[2 * i], e[2 * i + 1]);
        }
    }
};

// Partial softmax results of disjoint sets of keys: combining and writing them.
#pragma once
#include "small/operands.cuh"

namespace {

// Normalises and writes one quad, and with the row's first quad its lse. Rows without keys: zeros and -inf.
__device__ __forceinline__ void write(const Parameters& p, int first_row, int rows, int lane, int index,
                                      const float4& x, const Statistics& total) {
    const Quad quad(index);
    const int row = first_row + quad.row(lane);
    const int dim = quad.dim(lane);
    if (row >= rows) return;
    const Row at = locate(row, p);
    const int head = blockIdx.y * p.group + at.head;
    const float inverse = total.sum == 0.0f ? 0.0f : reciprocal(total.sum);
    if ((!PADDED && 64 * (quad.group + 1) <= HEAD_DIM) || dim < head_dim(p)) {
        const uint64 offset = blockIdx.z * p.output_strides.batch + static_cast<uint32>(head) * p.output_strides.head +
                              offset_of(at.position, p.output_strides.row) + dim * kElementBytes;
        store_global(p.output + offset, pack(x.x * inverse, x.y * inverse), pack(x.z * inverse, x.w * inverse));
    }
    if (p.lse != nullptr && quad.group == 0 && quad.half == 0 && lane < 4) {
        const long long heads = static_cast<long long>(gridDim.y) * p.group;
        const float natural_log_of_2 = 0.6931471805599453f;
        p.lse[(blockIdx.z * heads + head) * p.seqlen_q + at.position] =
            total.sum == 0.0f ? NEGATIVE_INFINITY : (total.maximum + log2_approx(total.sum)) * natural_log_of_2;
    }
}

}  // namespace

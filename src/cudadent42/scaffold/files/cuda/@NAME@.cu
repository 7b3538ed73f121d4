// @NAME@: exact attention on a GPU, a warp per query row with an online softmax, as a starting point.
#include "cudadent42/attention.h"
#include "cudadent42/element.h"

constexpr int WARP = 32;
constexpr int HEAD_DIM = CUDADENT42_HEAD_DIM;  // the kernel is compiled for each head dim
constexpr int PER_LANE = (HEAD_DIM + WARP - 1) / WARP;

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

__device__ __forceinline__ float sum_over_warp(float value) {
    for (int step = WARP / 2; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffff, value, step);
    return value;
}

// Block (x, y, z) does ROWS rows of head y in batch z; lane l holds the entries l, l + 32, ... of its warp's row.
CUDADENT42_KERNEL @FUNCTION@(const __grid_constant__ Cudadent42Attention problem) {
    const int lane = threadIdx.x % WARP;
    const long long i = (long long)blockIdx.x * ROWS + threadIdx.x / WARP;
    if (i >= problem.seqlen_q) return;
    const long long h = blockIdx.y, b = blockIdx.z, kv = h / (problem.num_heads / problem.num_kv_heads);
    const cudadent42_element *query = (const cudadent42_element *)problem.query + b * problem.query_stride[0] +
                                      h * problem.query_stride[1] + i * problem.query_stride[2];
    const cudadent42_element *key =
        (const cudadent42_element *)problem.key + b * problem.key_stride[0] + kv * problem.key_stride[1];
    const cudadent42_element *value =
        (const cudadent42_element *)problem.value + b * problem.value_stride[0] + kv * problem.value_stride[1];
    cudadent42_element *output = (cudadent42_element *)problem.output + b * problem.output_stride[0] +
                                 h * problem.output_stride[1] + i * problem.output_stride[2];
    long long keys = problem.seqlen_k;
    if (problem.causal) keys += i + 1 - problem.seqlen_q;

    const float scale = (float)problem.softmax_scale;
    float row[PER_LANE], sum[PER_LANE];
#pragma unroll
    for (int n = 0; n < PER_LANE; n++) {
        const int d = n * WARP + lane;
        row[n] = d < HEAD_DIM ? cudadent42_load(query + d) : 0.0f;
        sum[n] = 0.0f;
    }
    float largest = minus_infinity(), weights = 0.0f;
    for (long long j = 0; j < keys; j++) {
        float part = 0.0f;
#pragma unroll
        for (int n = 0; n < PER_LANE; n++) {
            const int d = n * WARP + lane;
            if (d < HEAD_DIM) part += row[n] * cudadent42_load(key + j * problem.key_stride[2] + d);
        }
        const float score = sum_over_warp(part) * scale;
        if (score == minus_infinity()) continue;  // no weight, and minus infinity less itself is not a number
        if (score > largest) {
            const float shrink = expf(largest - score);
            weights *= shrink;
#pragma unroll
            for (int n = 0; n < PER_LANE; n++) sum[n] *= shrink;
            largest = score;
        }
        const float weight = expf(score - largest);
        weights += weight;
#pragma unroll
        for (int n = 0; n < PER_LANE; n++) {
            const int d = n * WARP + lane;
            if (d < HEAD_DIM) sum[n] += weight * cudadent42_load(value + j * problem.value_stride[2] + d);
        }
    }
#pragma unroll
    for (int n = 0; n < PER_LANE; n++) {
        const int d = n * WARP + lane;
        if (d < HEAD_DIM) cudadent42_store(output + d, keys > 0 ? sum[n] / weights : 0.0f);
    }
}

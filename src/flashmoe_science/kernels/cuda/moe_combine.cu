// Combination: a token's output is the sum of its experts' rows, weighted in float32, in the order of its slots. Bound by
// memory: a thread sums 16 bytes of a row, and has loaded up to eight rows' before it adds.
//
// WEIGHTED: otherwise rows are added as they are.
//
// Compile-time configuration: ELEMENT_BF16, IDS64, WEIGHTED, DEPENDENT (ptx/dependent_launch.cuh).
#include "ptx/global.cuh"
#include "ptx/element.cuh"
#include "types.cuh"

#if DEPENDENT
#include "ptx/dependent_launch.cuh"
#endif

namespace combine {

constexpr int THREADS = 256;
constexpr int BATCH = 8;

struct Parameters {
    const char* rows;      // (slots, columns); those of invalid ids hold anything
    const float* weights;  // (tokens, top_k); WEIGHTED
    const void* ids;
    char* output;    // (tokens, columns)
    int row_chunks;  // of 16 bytes
    int top_k;
    int experts;
};

__device__ __forceinline__ bool is_valid(const Parameters& p, int64 slot) {
#if IDS64
    const int64 id = __ldg(static_cast<const int64*>(p.ids) + slot);
#else
    const int id = __ldg(static_cast<const int*>(p.ids) + slot);
#endif
    return id >= 0 && id < p.experts;
}


__device__ __forceinline__ void add(float (&sum)[8], float weight, const Chunk& c) {
    const uint32 pairs[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack(pairs[i]);
        sum[2 * i] = fmaf(weight, pair.x, sum[2 * i]);
        sum[2 * i + 1] = fmaf(weight, pair.y, sum[2 * i + 1]);
    }
}

}  // namespace combine

extern "C" __global__ void __launch_bounds__(combine::THREADS)
    moe_combine(const __grid_constant__ combine::Parameters p) {
    using namespace combine;
#if DEPENDENT
    wait_for_predecessor();
    allow_successor();
#endif
    const int64 token = blockIdx.x;
    const int chunk = blockIdx.y * THREADS + threadIdx.x;
    if (chunk >= p.row_chunks) return;
    const int64 first_slot = token * p.top_k;
    const char* rows = p.rows + (first_slot * p.row_chunks + chunk) * 16;
    float sum[8] = {};
    for (int start = 0; start < p.top_k; start += BATCH) {
        Chunk c[BATCH];
        float weight[BATCH];
        bool valid[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            valid[j] = start + j < p.top_k && is_valid(p, first_slot + start + j);
            if (valid[j]) {
                c[j] = load_once(rows + static_cast<int64>(start + j) * p.row_chunks * 16);
                weight[j] = WEIGHTED ? __ldg(p.weights + first_slot + start + j) : 1.0f;
            }
        }
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            if (valid[j]) add(sum, weight[j], c[j]);
        }
    }
    store_global(p.output + (token * p.row_chunks + chunk) * 16,
                 Chunk{pack(sum[0], sum[1]), pack(sum[2], sum[3]), pack(sum[4], sum[5]), pack(sum[6], sum[7])});
}

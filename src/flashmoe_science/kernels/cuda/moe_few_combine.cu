// The end of a mixture of experts by slots: each token's row is the weighted sum of its slots' rows, in float32 and in the
// order of its choices. Slots without an expert are not read.
//
// A thread has 8 neighbouring columns of a token. Macros: DEPENDENT, IDS64 and those of types.cuh.
#include "ptx/dependent_launch.cuh"
#include "ptx/element.cuh"
#include "ptx/global.cuh"
#include "types.cuh"

struct CombineParameters {
    const char* rows;           // (tokens * top_k, hidden)
    const float* topk_weights;  // (tokens, top_k)
    const void* topk_ids;       // (tokens, top_k)
    char* output;               // (tokens, hidden)
    uint64 unused;
    int chunks;                 // of 8 columns, in all rows of the output
    int row_chunks;             // and in one
    int top_k;
    int experts;
};

__device__ __forceinline__ bool is_chosen(const CombineParameters& p, int slot) {
#if IDS64
    const int64 id = static_cast<const int64*>(p.topk_ids)[slot];
#else
    const int id = static_cast<const int*>(p.topk_ids)[slot];
#endif
    return id >= 0 && id < p.experts;
}

extern "C" __global__ void __launch_bounds__(128) moe_few_combine(const __grid_constant__ CombineParameters p) {
#if DEPENDENT
    wait_for_predecessor();
    allow_successor();
#endif
    const int chunk = blockIdx.x * 128 + threadIdx.x;
    if (chunk >= p.chunks) return;
    const int token = chunk / p.row_chunks;
    const uint64 column = static_cast<uint64>(chunk - token * p.row_chunks) * kChunkBytes;
    const uint64 row_bytes = static_cast<uint64>(p.row_chunks) * kChunkBytes;
    float sum[8] = {};
    // Unrolled, so that several rows are on their way at a time.
#pragma unroll 4
    for (int j = 0; j < p.top_k; ++j) {
        const int slot = token * p.top_k + j;
        if (!is_chosen(p, slot)) continue;
        const float weight = p.topk_weights[slot];
        const Chunk x = load_global(p.rows + slot * row_bytes + column);
        const uint32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 pair = unpack(words[i]);
            sum[2 * i] += weight * pair.x;
            sum[2 * i + 1] += weight * pair.y;
        }
    }
    char* const to = p.output + token * row_bytes + column;
    store_global(to, pack(sum[0], sum[1]), pack(sum[2], sum[3]));
    store_global(to + 8, pack(sum[4], sum[5]), pack(sum[6], sum[7]));
}

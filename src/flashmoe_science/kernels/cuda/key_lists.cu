// Lists of the keys that rows of a mask show, in order: one block a row, one pass.
//
// A warp owns KEYS consecutive keys of a step, and asks for 32 of them at a time. What follows a row's keys is 0.
//
// Compile-time configuration: WARPS, KEYS (of a warp, a multiple of 32), DEPENDENT (ptx/dependent_launch.cuh).
#include "types.cuh"

#if DEPENDENT
#include "ptx/dependent_launch.cuh"
#endif

struct KeyListsParameters {
    const char* mask;  // booleans (batch, seqlen_q, seqlen_k)
    int* keys;         // (batch * seqlen_q, seqlen_k): batch * pitch + key
    int* counts;       // (batch * seqlen_q)
    int* starts;       // (batch * seqlen_q + 1): 0, 1, 2, ...
    int64 mask_batch, mask_query, mask_key;  // from one to the next
    int64 pitch;
    int seqlen_q;
    int seqlen_k;
    int rows;
};

constexpr int kThreads = 32 * WARPS;
constexpr int kAsked = KEYS / 32;

extern "C" __global__ void __launch_bounds__(kThreads) key_lists(const __grid_constant__ KeyListsParameters p) {
    __shared__ int totals[WARPS];
#if DEPENDENT
    wait_for_predecessor();
    allow_successor();
#endif
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = blockIdx.x;
    const int batch = row / p.seqlen_q, query = row % p.seqlen_q;
    const char* const mask = p.mask + batch * p.mask_batch + query * p.mask_query;
    int* const keys = p.keys + static_cast<int64>(row) * p.seqlen_k;
    const int first_key = static_cast<int>(batch * p.pitch);
    int count = 0;  // of the steps before
    for (int step = 0; step < p.seqlen_k; step += WARPS * KEYS) {
        const int first = step + warp * KEYS + lane;
        bool is_seen[kAsked];
#pragma unroll
        for (int i = 0; i < kAsked; ++i) {
            const int key = first + 32 * i;
            is_seen[i] = key < p.seqlen_k && mask[key * p.mask_key] != 0;
        }
        uint32 seen[kAsked];
        int total = 0;
#pragma unroll
        for (int i = 0; i < kAsked; ++i) {
            seen[i] = __ballot_sync(0xffffffffu, is_seen[i]);
            total += __popc(seen[i]);
        }
        if (lane == 0) totals[warp] = total;
        __syncthreads();
        int place = count;
#pragma unroll
        for (int other = 0; other < WARPS; ++other) {
            const int of_other = totals[other];
            place += other < warp ? of_other : 0;
            count += of_other;
        }
#pragma unroll
        for (int i = 0; i < kAsked; ++i) {
            if (is_seen[i]) keys[place + __popc(seen[i] & ((1u << lane) - 1))] = first_key + first + 32 * i;
            place += __popc(seen[i]);
        }
        __syncthreads();  // before the next step's totals
    }
    for (int key = count + threadIdx.x; key < p.seqlen_k; key += kThreads) keys[key] = 0;
    if (threadIdx.x == 0) {
        p.counts[row] = count;
        p.starts[row] = row;
        if (row == p.rows - 1) p.starts[p.rows] = p.rows;
    }
}

// The products of the two-pass kernels, each for one consumer warpgroup, and how a gradient leaves its registers.
#pragma once

#include "hopper_two_pass/parameters.cuh"
#include "ptx/global.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"

namespace two_pass {

using Scores = ptx::Wgmma<ROWS>;
using Gradient = ptx::Wgmma<HEAD_DIM>;

// The same number, of which the compiler knows nothing: what is computed from it is computed again at each step, instead
// of taking up registers throughout.
__device__ __forceinline__ uint32 opaque(uint32 x) {
    asm volatile("" : "+r"(x));
    return x;
}

// Two tiles' rows multiplied with each other, along the head dimension; issued, not awaited.
__device__ __forceinline__ void multiply_rows(float (&s)[ROWS / 2], uint32 left, uint32 right) {
    const uint64 a = panel::k_major(opaque(left));
    const uint64 b = panel::k_major(opaque(right));
    ptx::forget(s);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; ++k) {
        Scores::ss(s, a + panel::k_major_offset<ROWS>(k), b + panel::k_major_offset<ROWS>(k), k != 0);
    }
    ptx::wgmma_commit();
}

// sum += weights rows, along the rows of a tile; issued, not awaited.
__device__ __forceinline__ void accumulate(float (&sum)[HEAD_DIM / 2], const uint32 (&weights)[ROWS / 4], uint32 rows) {
    const uint64 b = panel::mn_major<ROWS>(opaque(rows));
    ptx::pin(sum);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < ROWS / 16; ++k) {
        Gradient::rs(sum, weights[4 * k], weights[4 * k + 1], weights[4 * k + 2], weights[4 * k + 3],
                     b + panel::mn_major_offset(k), 1);
    }
    ptx::wgmma_commit();
}

// An accumulator fragment, pairwise packed, is the operand fragment of a product along its columns.
__device__ __forceinline__ void pack_fragment(const float (&s)[ROWS / 2], uint32 (&packed)[ROWS / 4]) {
#pragma unroll
    for (int i = 0; i < ROWS / 4; ++i) packed[i] = pack(s[2 * i], s[2 * i + 1]);
    // Not later: what they are made of is in registers that the next product takes.
#pragma unroll
    for (int i = 0; i < ROWS / 4; ++i) asm volatile("" : "+r"(packed[i])::"memory");
}

// This lane's two rows of a gradient, the first `row`. `start`: of the head's first row. Neighbouring lanes exchange halves, so that
// each writes four columns.
__device__ __forceinline__ void store_rows(const float (&sum)[HEAD_DIM / 2], float factor, uint16* start, int64 stride, int row,
                                           int rows, int head_dim) {
    const int lane = threadIdx.x % 32;
    const bool odd = lane & 1;
    const int first_column = (odd ? 8 : 0) + (lane & 2) * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const bool inside = row + 8 * half < rows;
        uint16* destination = start + (row + 8 * half) * stride + first_column;
#pragma unroll
        for (int group = 0; group < HEAD_DIM / 8; group += 2) {
            const float* pair = sum + 4 * group + 2 * half;
            const uint32 left = pack(pair[0] * factor, pair[1] * factor);
            const uint32 right = pack(pair[4] * factor, pair[5] * factor);
            const uint32 received = __shfl_xor_sync(0xffffffff, odd ? left : right, 1);
            if (inside && group * 8 + first_column < head_dim) {
                store_global(reinterpret_cast<char*>(destination + group * 8), odd ? received : left, odd ? right : received);
            }
        }
    }
}

// All threads of a block: its shared memory, whose barriers are ready. `initialise` is the kernel's.
template <class Shared>
__device__ __forceinline__ Shared begin(const Parameters& p, uint32 raw, int warp) {
    // Dynamic shared memory is only guaranteed to start on 16 bytes; the launch asks for 1024 more.
    const Shared shared{(raw + 1023) & ~1023u};
    if (warp == 0 && ptx::elect_lane()) {
        ptx::prefetch_map(p.query);
        ptx::prefetch_map(p.key);
        ptx::prefetch_map(p.value);
        ptx::prefetch_map(p.grad_output);
        initialise(shared);
    }
    __syncthreads();
    return shared;
}

}  // namespace two_pass

// Results on their way to memory, by way of shared memory: a store of a warp is then four whole lines of 128 bytes. From
// the accumulators it would be parts of 8 to 16 lines, each of which takes as long as a whole one.
//
// A line is 64 columns of a row, in the layout of TMA's 128-byte swizzle.
#pragma once

#include "moe/hopper_shared.cuh"
#include "ptx/bulk.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/vector.cuh"
#include "swizzle.cuh"

namespace moe {

constexpr int CONSUMER_BARRIER = 2;  // and the next one, of the other consumer
constexpr uint32 STAGING_BYTES = WEIGHT_BYTES / CONSUMERS;

// All warps of a consumer: what each of them did to shared memory before is done.
__device__ __forceinline__ void meet_consumer(int consumer) { ptx::barrier_sync(CONSUMER_BARRIER + consumer, WARPGROUP); }

// Where a consumer's results wait: its half of the weights of the tile's last stage, which it alone has read. Of each of its
// warps the products are complete from here on.
__device__ __forceinline__ uint32 staging(const Shared& shared, int stage, int consumer) {
    meet_consumer(consumer);
    return shared.weights(stage) + consumer * STAGING_BYTES;
}

using Lines = ::Tile<PANEL_COLUMNS>;
static_assert(Lines::kRowBytes == ROW_BYTES, "a line of shared memory is a row of 128 bytes");

// What a thread of a consumer takes of 16 lines: eight columns of one. Derived anew for each group of lines, as beside the
// accumulators there are no registers for it.
struct Own {
    int line;
    int column;
};
constexpr int LINES_AT_ONCE = WARPGROUP / 8;

__device__ __forceinline__ Own own_of_lines() {
    const int thread = thread_index() % WARPGROUP;
    return {thread / 8, thread % 8 * 8};
}

// Lines to memory, by a consumer. `address_of(line, own)`: where this thread's columns go of 16 lines from `line` on, or null.
template <int LINES, class AddressOf>
__device__ __forceinline__ void store_lines(uint32 lines, AddressOf address_of) {
    static_assert(LINES % LINES_AT_ONCE == 0, "all threads have as many lines");
    const Own own = own_of_lines();
    const uint32 from = lines + Lines::offset(own.line, own.column / 8);
#pragma unroll
    for (int line = 0; line < LINES; line += LINES_AT_ONCE) {
        const Chunk columns = load_shared(from + line * ROW_BYTES);
        uint16* to = address_of(line, own);
        if (to != nullptr) store_global(reinterpret_cast<char*>(to), columns);
    }
}

// Rows of two lines each, transposed: a warp has 16 columns of either line, those of `low` and those of `high`.
// `address_of(row, part, own)`: where a thread's columns of 16 rows from `row` on go, of the first line or the second, or null.
template <int N, class AddressOf>
__device__ __forceinline__ void store_two_lines(uint32 lines, int consumer, const float (&low)[N / 2],
                                                const float (&high)[N / 2], AddressOf address_of) {
    constexpr int ROWS = 32;  // at a time, in each of two buffers that take turns
    static_assert(N % ROWS == 0 && 2 * 2 * ROWS * ROW_BYTES <= STAGING_BYTES, "two buffers of two lines a row");
    const int lane = threadIdx.x % 32;
    const int matrix = lane / 8;
    const int warp = threadIdx.x / 32 % 4;
    const uint32 place = matrix / 2 * (ROWS * ROW_BYTES) + Lines::offset(lane % 8, warp * 2 + matrix % 2);
#pragma unroll
    for (int start = 0; start < N; start += ROWS) {
        const uint32 buffer = lines + start / ROWS % 2 * (2 * ROWS * ROW_BYTES);
#pragma unroll
        for (int i = 0; i < ROWS; i += 8) {
            const float* l = low + (start + i) / 2;
            const float* h = high + (start + i) / 2;
            store_matrices_transposed(buffer + i * ROW_BYTES + place, pack(l[0], l[1]), pack(l[2], l[3]), pack(h[0], h[1]),
                                      pack(h[2], h[3]));
        }
        meet_consumer(consumer);
        store_lines<2 * ROWS>(buffer, [&](int line, const Own& own) { return address_of(start + line % ROWS, line / ROWS, own); });
    }
}

}  // namespace moe

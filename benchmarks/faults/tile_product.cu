// C = A B^T by mma.sync, tiles of 64 x 64 x 64 in shared memory, to have something wrong with it on purpose.
//
// SWIZZLED: 0 leaves the rows of a tile where they are, so that the eight rows of an ldmatrix lie in the same banks.
// STAGES: tiles in flight. 1 loads a tile, waits for it, multiplies, and only then loads the next.
#include "mma/m16n8k16.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "types.cuh"

constexpr int SIDE = 64;
constexpr int ROW_BYTES = SIDE * kElementBytes;
constexpr int TILE_BYTES = SIDE * ROW_BYTES;
constexpr int CHUNKS = ROW_BYTES / kChunkBytes;
constexpr int THREADS = 128;

struct Arguments {
    const char* a;  // (n, n), 16-bit, row major; likewise b
    const char* b;
    float* c;
    int n;
};

__device__ __forceinline__ uint32 offset(int row, int chunk) {
    return row * ROW_BYTES + ((SWIZZLED ? chunk ^ (row & 7) : chunk) << 4);
}

__device__ __forceinline__ void load_tile(uint32 tile, const char* source, int64 row_bytes) {
#pragma unroll
    for (int i = threadIdx.x; i < SIDE * CHUNKS; i += THREADS) {
        copy_chunk(tile + offset(i / CHUNKS, i % CHUNKS), source + i / CHUNKS * row_bytes + i % CHUNKS * kChunkBytes, true);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) tile_product(const __grid_constant__ Arguments p) {
    extern __shared__ __align__(1024) char memory[];
    const uint32 shared = shared_address(memory);
    const int64 row_bytes = static_cast<int64>(p.n) * kElementBytes;
    const int side = p.n / SIDE;
    const char* a = p.a + blockIdx.x / side * SIDE * row_bytes;
    const char* b = p.b + blockIdx.x % side * SIDE * row_bytes;
    const int lane = threadIdx.x % 32;
    const int row = threadIdx.x / 64 * 32 + lane % 16;
    const int column = threadIdx.x / 32 % 2 * 32 + lane / 16 * 8 + lane % 8;
    float c[2][4][4] = {};

    const auto load = [&](int step) {
        if (step < side) {
            const uint32 stage = shared + step % STAGES * 2 * TILE_BYTES;
            load_tile(stage, a + step * ROW_BYTES, row_bytes);
            load_tile(stage + TILE_BYTES, b + step * ROW_BYTES, row_bytes);
        }
        copy_commit();
    };
    for (int step = 0; step < STAGES - 1; ++step) load(step);
    for (int step = 0; step < side; ++step) {
        if (STAGES == 1) load(step);
        copy_wait<(STAGES > 1 ? STAGES - 2 : 0)>();
        __syncthreads();
        if (STAGES > 1) load(step + STAGES - 1);
        const uint32 stage = shared + step % STAGES * 2 * TILE_BYTES;
#pragma unroll
        for (int k = 0; k < SIDE / 16; ++k) {
            uint32 left[2][4];
            uint32 right[2][4];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                load_matrices(left[i], stage + offset(row + 16 * i, 2 * k + lane / 16));
                load_matrices(right[i], stage + TILE_BYTES + offset(column + 16 * i, 2 * k + lane / 8 % 2));
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int j = 0; j < 4; ++j) mma(c[i][j], left[i], right[j / 2][j % 2 * 2], right[j / 2][j % 2 * 2 + 1]);
            }
        }
        if (STAGES == 1) __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float* out = p.c + static_cast<int64>(blockIdx.x / side * SIDE + threadIdx.x / 64 * 32 + 16 * i + lane / 4) * p.n +
                         blockIdx.x % side * SIDE + threadIdx.x / 32 % 2 * 32 + 8 * j + 2 * (lane % 4);
            out[0] = c[i][j][0];
            out[1] = c[i][j][1];
            out[8 * p.n] = c[i][j][2];
            out[8 * p.n + 1] = c[i][j][3];
        }
    }
}

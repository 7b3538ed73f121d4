// Grouped product of a mixture of experts for sm_80 and later, on mma.sync, ldmatrix and cp.async: output rows of each
// expert = its input rows times its weights, with the activation applied where there is one.
//
// Blocks draw one tile of BLOCK_M rows and BLOCK_N rows of weights after another. Copies, which gather rows, run STAGES - 1
// slices of BLOCK_K ahead of the products, over the ends of tiles.
//
// Macros: BLOCK_M, BLOCK_N, BLOCK_K, STAGES, WARPS_M, WARPS_N (a warp multiplies BLOCK_M / WARPS_M rows and BLOCK_N /
// WARPS_N rows of weights), MIN_BLOCKS (launch_bounds.cuh), UP (1: rows are gathered by token and the output is in sorted
// order; 0: the input is in sorted order and the output row of a slot is the slot), DEPENDENT (ptx/dependent_launch.cuh),
// ACTIVATION (moe/activation.cuh), and those of types.cuh.
//
// With a gate, eight rows of gate weights and the eight rows of the same columns' up weights alternate in the weight
// tile. Both products of a column are then in the same thread, in neighbouring accumulators.
#include "moe/activation.cuh"
#include "moe/portable_parameters.cuh"
#include "mma/m16n8k16.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/element.cuh"
#if DEPENDENT
#include "ptx/dependent_launch.cuh"
#endif
#include "ptx/ldmatrix.cuh"
#include "ptx/vector.cuh"
#include "swizzle.cuh"
#include "types.cuh"

// The tiles of a grouped product that a block works on, found one after another on the device.
//
// Tile `index` of the grid belongs to an expert, to one of its row tiles and to a tile of columns: experts one after
// another; inside an expert equal sections of about `section` row tiles; inside a section column by column, so that tiles
// which run at the same time share rows and weights in L2. Blocks draw tickets for tiles: some tiles have fewer rows than
// others, and neighbouring tiles stay neighbours in time.
struct WorkTile {
    int rows;      // of this tile; 0: there is no more work
    int position;  // of the first row in the sorted order
    int column;    // first output column
    int expert;
};

// In shared memory. Warp 0 publishes the block's tiles in their order; what others read was published before a barrier.
//
// RING: how many tiles lie between the one that the slowest warp still stores and the one that is published now.
template <int ROWS, int COLUMNS, int RING, bool GATHER>
struct WorkQueue {
    WorkTile tiles[RING];
    uint32 row_chunks[2][GATHER ? ROWS : 1];  // where the rows of the two last published tiles are, in 16-byte chunks
    // Where the search for the next tile starts: all experts before this one have this many row tiles.
    int expert;
    int row_tiles_before;

    __device__ __forceinline__ void start() {
        expert = 0;
        row_tiles_before = 0;
    }

    // By all threads of warp 0. `ticket`: lane 0's, drawn one tile ahead because that takes long; blockIdx.x at first.
    __device__ __forceinline__ void publish(int number, int& ticket, const ProductParameters& p) {
        const int lane = threadIdx.x % 32;
        const uint32 index = static_cast<uint32>(__shfl_sync(0xffffffffu, ticket, 0));
        if (lane == 0) ticket = atomicAdd(p.ticket, 1) + static_cast<int>(gridDim.x);
        const int row_tile = static_cast<int>(index / p.column_tiles);
        int first_expert = expert;
        int before = row_tiles_before;
        WorkTile tile = {0, 0, 0, 0};
        for (; first_expert < p.experts; first_expert += 32) {
            int begin = 0, rows = 0;
            if (first_expert + lane < p.experts) {
                begin = p.expert_offsets[first_expert + lane];
                rows = p.expert_offsets[first_expert + lane + 1] - begin;
            }
            const int row_tiles = (rows + ROWS - 1) / ROWS;
            int end = row_tiles;
#pragma unroll
            for (int distance = 1; distance < 32; distance *= 2) {
                const int other = __shfl_up_sync(0xffffffffu, end, distance);
                if (lane >= distance) end += other;
            }
            const uint32 beyond = __ballot_sync(0xffffffffu, before + end > row_tile);
            if (beyond != 0) {
                const int owner = __ffs(beyond) - 1;
                begin = __shfl_sync(0xffffffffu, begin, owner);
                rows = __shfl_sync(0xffffffffu, rows, owner);
                const int tiles_of_expert = __shfl_sync(0xffffffffu, row_tiles, owner);
                const int first_row_tile = before + __shfl_sync(0xffffffffu, end, owner) - tiles_of_expert;
                const int local = static_cast<int>(index - static_cast<uint32>(first_row_tile) * p.column_tiles);
                const int sections = max(1, (tiles_of_expert + p.section / 2) / p.section);
                const int width = (tiles_of_expert + sections - 1) / sections;
                const int section = local / (width * p.column_tiles);
                const int in_section = local % (width * p.column_tiles);
                const int side_by_side = min(width, tiles_of_expert - section * width);
                const int first_row = (section * width + in_section % side_by_side) * ROWS;
                tile.rows = min(ROWS, rows - first_row);
                tile.position = begin + first_row;
                tile.column = in_section / side_by_side * COLUMNS;
                tile.expert = first_expert + owner;
                break;
            }
            before += __shfl_sync(0xffffffffu, end, 31);
        }
        __syncwarp();
        if (lane == 0) {
            tiles[number % RING] = tile;
            expert = first_expert;
            row_tiles_before = before;
        }
        if (GATHER) {
            const uint32 chunks = p.inner / kChunkElements;
#pragma unroll
            for (int r = lane; r < ROWS; r += 32) {
                if (r < tile.rows) {
                    row_chunks[number % 2][r] = static_cast<uint32>(p.sorted_slots[tile.position + r]) / p.top_k * chunks;
                }
            }
        }
        __syncwarp();
    }
};

constexpr int kThreads = 32 * WARPS_M * WARPS_N;
constexpr int kWarpM = BLOCK_M / WARPS_M;
constexpr int kWarpN = BLOCK_N / WARPS_N;
constexpr int kRowTiles = kWarpM / 16;
constexpr int kWeightTiles = kWarpN / 8;
constexpr int kParts = kGated ? 2 : 1;
constexpr int kOutTiles = kWeightTiles / kParts;
constexpr int kSlices = BLOCK_K / 16;

using T = Tile<BLOCK_K>;
constexpr int kInputBytes = BLOCK_M * T::kRowBytes;
constexpr int kStageBytes = (BLOCK_M + BLOCK_N) * T::kRowBytes;

// How threads share a copy: each owns one chunk column and every kRowsPerPass-th row from its first on.
constexpr int kColumns = T::kChunks;
constexpr int kRowsPerPass = kThreads / kColumns;
constexpr int kInputPasses = BLOCK_M / kRowsPerPass;
constexpr int kWeightPasses = BLOCK_N / kRowsPerPass;

static_assert(BLOCK_M % (16 * WARPS_M) == 0 && BLOCK_N % (16 * WARPS_N) == 0, "warps multiply tiles of 16");
static_assert(kOutTiles % 4 == 0, "a quad stores four tiles of eight columns at a time");
static_assert(BLOCK_K == 32 || BLOCK_K == 64, "rows of 64 or 128 bytes");
static_assert(kRowsPerPass % 16 == 0, "all rows of a thread lie in the same part, and in the same place of the swizzle");
static_assert(BLOCK_M % kRowsPerPass == 0 && BLOCK_N % kRowsPerPass == 0, "whole passes");
static_assert(STAGES >= 2 && MMA_K == 16, "copies run ahead of products m16n8k16");

// Copies run over the ends of up to STAGES tiles, the tile after those is published, and the slowest warp still stores
// the one before them.
constexpr int kRing = STAGES + 2;
using Queue = WorkQueue<BLOCK_M, BLOCK_N / kParts, kRing, UP>;
using Sums = float[kRowTiles][kWeightTiles][4];

struct Fragments {
    uint32 input[kRowTiles][4];
    uint32 weights[kWeightTiles / 2][4];

    __device__ __forceinline__ void load(uint32 input_address, uint32 weight_address, int slice) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m)
            load_matrices(input[m], T::advance(input_address, slice) + m * 16 * T::kRowBytes);
#pragma unroll
        for (int n = 0; n < kWeightTiles / 2; ++n)
            load_matrices(weights[n], T::advance(weight_address, slice) + n * 16 * T::kRowBytes);
    }

    __device__ __forceinline__ void multiply(Sums& sums) const {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
            for (int n = 0; n < kWeightTiles / 2; ++n) {
                mma(sums[m][2 * n], input[m], weights[n][0], weights[n][1]);
                mma(sums[m][2 * n + 1], input[m], weights[n][2], weights[n][3]);
            }
        }
    }
};

// What is copied next, by this thread. Copies have no branches, so that the compiler can put them between products.
struct Loader {
    int number;       // of the tile in the block's order
    int ticket;       // lane 0 of warp 0: of the tile after the next one to be published
    int step;         // of its slices of BLOCK_K
    int rows;         // of the tile, from this thread's first on
    int weight_rows;  // of the tile, from this thread's first on
    uint32 row_chunks[UP ? kInputPasses : 1];
    const char* input;
    const char* weights;

    // Tile `number` was published before the last barrier. Where there is no more work, nothing is copied.
    __device__ __forceinline__ void start(const Queue& queue, const ProductParameters& p) {
        const WorkTile tile = queue.tiles[number % kRing];
        const int first = threadIdx.x / kColumns;
        const int column_bytes = threadIdx.x % kColumns * kChunkBytes;
        step = 0;
        rows = tile.rows - first;
        if (UP) {
#pragma unroll
            for (int i = 0; i < kInputPasses; ++i)
                row_chunks[i] = queue.row_chunks[number % 2][first + i * kRowsPerPass];
            input = p.input + column_bytes;
        } else {
            input = p.input + static_cast<int64>(tile.position + first) * (p.inner * kElementBytes) + column_bytes;
        }
        const int part = kGated ? first / 8 % 2 : 0;
        const int column = kGated ? first / 16 * 8 + first % 8 : first;
        weight_rows = tile.rows > 0 ? (p.columns - tile.column - column) * kParts : 0;
        weights = p.weights + tile.expert * p.weight_expert + (tile.column + column) * p.weight_column +
                  part * p.weight_part + column_bytes;
    }

    // Share `share` of `shares` of a slice into the stage at `address`. What lies beyond the rows, the columns or the
    // inner dimension becomes zero.
    __device__ __forceinline__ void copy(uint32 address, int share, int shares, const ProductParameters& p) const {
        constexpr int passes = kInputPasses + kWeightPasses;
        const int first = threadIdx.x / kColumns;
        const int column = threadIdx.x % kColumns;
        const bool inside = step * BLOCK_K + column * kChunkElements < p.inner;
        const uint32 target = address + T::offset(first, column);
        const int remaining_rows = inside ? rows : 0;
        const int remaining_weights = inside ? weight_rows : 0;
#pragma unroll
        for (int pass = 0; pass < passes; ++pass) {
            if (pass * shares / passes != share) continue;
            if (pass < kInputPasses) {
                const char* source = UP ? input + static_cast<uint64>(row_chunks[UP ? pass : 0]) * kChunkBytes
                                        : input + static_cast<int64>(pass * kRowsPerPass) * (p.inner * kElementBytes);
                copy_chunk(target + pass * kRowsPerPass * T::kRowBytes, source, pass * kRowsPerPass < remaining_rows);
            } else {
                const int i = pass - kInputPasses;
                copy_chunk(target + kInputBytes + i * kRowsPerPass * T::kRowBytes,
                           weights + i * (kRowsPerPass / kParts) * p.weight_column, i * kRowsPerPass < remaining_weights);
            }
        }
    }

    // To the next slice, which may be the next tile's first. That tile is published when the last slice of the one
    // before comes up: a barrier earlier than it is needed. By all threads, after a barrier.
    __device__ __forceinline__ void advance(Queue& queue, const ProductParameters& p) {
        input += BLOCK_K * kElementBytes;
        weights += BLOCK_K * kElementBytes;
        ++step;
        if (step * BLOCK_K >= p.inner) {
            ++number;
            start(queue, p);
        }
        announce(queue, p);
    }

    __device__ __forceinline__ void announce(Queue& queue, const ProductParameters& p) {
        if ((step + 1) * BLOCK_K >= p.inner && threadIdx.x < 32) queue.publish(number + 1, ticket, p);
    }
};

// Lane t of a quad has word t of each of four tiles of eight columns; afterwards it has the four words of tile t.
__device__ __forceinline__ Chunk transpose_in_quad(uint32 (&words)[4]) {
    const bool odd = threadIdx.x % 2, upper = threadIdx.x / 2 % 2;
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
        const uint32 received = __shfl_xor_sync(0xffffffffu, odd ? words[j] : words[j + 1], 1);
        if (odd) words[j] = received;
        else words[j + 1] = received;
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const uint32 received = __shfl_xor_sync(0xffffffffu, upper ? words[j] : words[j + 2], 2);
        if (upper) words[j] = received;
        else words[j + 2] = received;
    }
    return Chunk{words[0], words[1], words[2], words[3]};
}

// Sums begin with the bias of their column, or with zero.
__device__ __forceinline__ void begin(Sums& sums, const WorkTile& tile, const ProductParameters& p) {
    const int first = tile.column + threadIdx.x / 32 % WARPS_N * kOutTiles * 8 + threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < kWeightTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int column = first + n / kParts * 8 + i;
            float bias = 0.0f;
            if (p.bias != nullptr && column < p.columns) {
                bias = load_element(p.bias + static_cast<int64>(tile.expert) * kParts * p.columns + column * p.bias_column +
                                    n % kParts * p.bias_part);
            }
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) {
                sums[m][n][i] = bias;
                sums[m][n][2 + i] = bias;
            }
        }
    }
}

// The tile's results, activated, to global memory: 16 bytes per thread, 64 contiguous ones per quad.
__device__ __forceinline__ void store(const Sums& sums, const WorkTile& tile, const ProductParameters& p) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int column = tile.column + (warp % WARPS_N * kOutTiles + lane % 4) * 8;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = warp / WARPS_N * kWarpM + m * 16 + h * 8 + lane / 4;
            const bool valid = row < tile.rows;
            const int position = tile.position + row;
            const int64 output_row = UP || !valid ? position : p.sorted_slots[position];
            char* address = p.output + (output_row * p.columns + column) * kElementBytes;
#pragma unroll
            for (int n = 0; n < kOutTiles; n += 4) {
                uint32 words[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    float result[2];
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const float first = sums[m][(n + j) * kParts][2 * h + i];
                        result[i] = activate(first);
                        if (kGated) result[i] *= factor_of(sums[m][(n + j) * kParts + kParts - 1][2 * h + i]);
                    }
                    words[j] = pack(result[0], result[1]);
                }
                const Chunk chunk = transpose_in_quad(words);
                if (valid && column + n * 8 < p.columns) store_global(address + n * 8 * kElementBytes, chunk);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
moe_portable(const __grid_constant__ ProductParameters p) {
    extern __shared__ __align__(1024) char shared_memory[];
    const uint32 stages = shared_address(shared_memory);
    Queue& queue = *reinterpret_cast<Queue*>(shared_memory + STAGES * kStageBytes);
#if DEPENDENT
    wait_for_predecessor();
    allow_successor();
#endif
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    Loader loader;
    loader.number = 0;
    loader.ticket = blockIdx.x;
    if (warp == 0) {
        if (lane == 0) queue.start();
        __syncwarp();
        queue.publish(0, loader.ticket, p);
    }
    __syncthreads();
    loader.start(queue, p);
    loader.announce(queue, p);
#pragma unroll 1
    for (int s = 0; s < STAGES - 1; ++s) {
        loader.copy(stages + s * kStageBytes, 0, 1, p);
        copy_commit();
        __syncthreads();
        loader.advance(queue, p);
    }
    uint32 read = 0, write = (STAGES - 1) * kStageBytes;  // byte offsets of stages
    const auto after = [](uint32 stage) { return stage == (STAGES - 1) * kStageBytes ? 0 : stage + kStageBytes; };

    // This lane's row and chunk for ldmatrix: rows of the input as 16 x 1 chunk, twice; weights as 8 rows x 2 chunks, twice.
    const uint32 input_address = stages + warp / WARPS_N * kWarpM * T::kRowBytes + T::offset(lane % 16, lane / 16);
    const uint32 weight_address = stages + kInputBytes + warp % WARPS_N * kWarpN * T::kRowBytes +
                                  T::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    Fragments fragments[2];
    copy_wait<STAGES - 2>();
    __syncthreads();
    fragments[0].load(input_address, weight_address, 0);

    for (int number = 0;; ++number) {
        const WorkTile tile = queue.tiles[number % kRing];
        if (tile.rows == 0) break;
        Sums sums;
        begin(sums, tile, p);
        const auto step = [&](auto active) {
#pragma unroll
            for (int slice = 0; slice < kSlices; ++slice) {
                if (slice == kSlices - 1) {
                    // The next slice of BLOCK_K has arrived, and all warps have this one's last operands in registers.
                    copy_wait<STAGES - 2>();
                    __syncthreads();
                    read = after(read);
                }
                if (active.value || slice == kSlices - 1) {
                    fragments[(slice + 1) % 2].load(input_address + read, weight_address + read, (slice + 1) % kSlices);
                }
                if (slice < kSlices - 1) loader.copy(stages + write, slice, kSlices - 1, p);
                if (slice == kSlices - 2) copy_commit();
                if (active.value) fragments[slice % 2].multiply(sums);
            }
            write = after(write);
            loader.advance(queue, p);
        };
        // Warps all of whose rows lie beyond the expert's last leave the tensor cores to the others. Both ways have the
        // same barriers; PTX's bar.sync counts warps, wherever they wait (synccheck calls that divergent).
        if (warp / WARPS_N * kWarpM < tile.rows) {
            for (int k = 0; k < p.inner; k += BLOCK_K) step(Flag<true>{});
        } else {
            for (int k = 0; k < p.inner; k += BLOCK_K) step(Flag<false>{});
        }
        store(sums, queue.tiles[number % kRing], p);
    }
    copy_wait<0>();
}

// Attention forward for sm_75 and later: FlashAttention-2's algorithm (Dao, 2023) on mma.sync, ldmatrix and cp.async.
//
// A block of WARPS warps owns BLOCK_M query rows of one head, BLOCK_M / WARPS of them per warp, and walks over the
// keys from the last block it needs to the first, so that the blocks that need a mask come first.
// Keys and values are double buffered: block b - 1 arrives while block b is multiplied.
//
// Macros: HEAD_DIM (a multiple of 16, at least the tensor's), BLOCK_M, BLOCK_N, WARPS, MIN_BLOCKS (per multiprocessor),
// QUERY_STEPS (how many 16-wide slices of the query stay in registers; the rest is read from shared memory for
// every block), OVERLAP (1: the next block's scores are computed while this block's exponentials are taken; needs
// the whole query in registers), CAUSAL, and those of types.cuh.
#include "attention_parameters.cuh"
#include "mma/m16n8k16.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/vector.cuh"
#include "softmax.cuh"
#include "swizzle.cuh"
#include "types.cuh"

constexpr int kThreads = WARPS * 32;
constexpr int kRowTiles = BLOCK_M / (16 * WARPS);
constexpr int kWarpRows = 16 * kRowTiles;
constexpr int kSteps = HEAD_DIM / 16;
constexpr int kOutTiles = HEAD_DIM / 8;
constexpr int kKeyTiles = BLOCK_N / 8;
constexpr int kKeyGroups = BLOCK_N / 16;

using T = Tile<HEAD_DIM>;
constexpr int kQueryBytes = BLOCK_M * T::kRowBytes;
constexpr int kBufferBytes = BLOCK_N * T::kRowBytes;

static_assert(HEAD_DIM % 16 == 0 && BLOCK_N % 16 == 0 && BLOCK_M == kWarpRows * WARPS, "tiles of 16");
static_assert(!OVERLAP || QUERY_STEPS == kSteps, "overlap needs the query in registers");
static_assert(MMA_K == 16 || !ELEMENT_BF16, "bfloat16 needs m16n8k16");

using Scores = float[kRowTiles][kKeyTiles][4];
using Output = float[kRowTiles][kOutTiles][4];

constexpr int power_of_two_above(int x) {
    int p = 1;
    while (p < x) p *= 2;
    return p;
}

// Copies Rows rows of a tensor into a swizzled tile; every thread owns one chunk column.
template <int Rows>
struct Loader {
    static constexpr int kColumns = power_of_two_above(T::kChunks);
    static constexpr int kRowsPerPass = kThreads / kColumns;
    static constexpr int kPasses = (Rows + kRowsPerPass - 1) / kRowsPerPass;

    // `rows`: how many rows exist from `global` on; the others, and columns past the head dimension, become zero.
    static __device__ __forceinline__ void load(uint32 shared, const char* global, int64 row_bytes, int rows,
                                                int head_chunks) {
        const int column = threadIdx.x % kColumns;
        const int first = threadIdx.x / kColumns;
        if (T::kChunks != kColumns && column >= T::kChunks) return;
        if (column >= head_chunks) rows = 0;
        const char* source = global + first * row_bytes + column * kChunkBytes;
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
            const int row = first + i * kRowsPerPass;
            if (Rows % kRowsPerPass == 0 || row < Rows) {
                copy_chunk(shared + T::offset(row, column), source, row < rows);
            }
            source += kRowsPerPass * row_bytes;
        }
    }
};

struct Query {
    uint32 fragments[QUERY_STEPS > 0 ? QUERY_STEPS : 1][kRowTiles][4];
    uint32 address;  // this lane's ldmatrix row and chunk in the warp's part of the query tile

    __device__ __forceinline__ void load_registers() {
#pragma unroll
        for (int k = 0; k < QUERY_STEPS; ++k) {
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) load_shared_fragment(k, m, fragments[k][m]);
        }
    }
    __device__ __forceinline__ void load_shared_fragment(int k, int m, uint32 (&a)[4]) const {
        load_matrices(a, T::advance(address, k) + m * 16 * T::kRowBytes);
    }
    __device__ __forceinline__ void fragment(int k, int m, uint32 (&a)[4]) const {
        if (k < QUERY_STEPS) {
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = fragments[k][m][i];
        } else {
            load_shared_fragment(k, m, a);
        }
    }
};

// Scores of 16 keys: tiles 2g and 2g + 1.
__device__ __forceinline__ void multiply_keys(Scores& scores, const Query& query, uint32 key_address, int g) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[m][2 * g][i] = scores[m][2 * g + 1][i] = 0.0f;
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
        uint32 b[4];
        load_matrices(b, T::advance(key_address, k) + g * 16 * T::kRowBytes);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
            uint32 a[4];
            query.fragment(k, m, a);
            mma(scores[m][2 * g], a, b[0], b[1]);
            mma(scores[m][2 * g + 1], a, b[2], b[3]);
        }
    }
}

// Scores of the whole block, reading each query fragment once.
__device__ __forceinline__ void multiply_keys(Scores& scores, const Query& query, uint32 key_address) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) scores[m][n][i] = 0.0f;
        }
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
        uint32 a[kRowTiles][4];
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) query.fragment(k, m, a[m]);
#pragma unroll
        for (int g = 0; g < kKeyGroups; ++g) {
            uint32 b[4];
            load_matrices(b, T::advance(key_address, k) + g * 16 * T::kRowBytes);
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) {
                mma(scores[m][2 * g], a[m], b[0], b[1]);
                mma(scores[m][2 * g + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// Output += P V for the 16 keys of group g.
__device__ __forceinline__ void multiply_values(Output& out, const uint32 (&p)[kRowTiles][4], uint32 value_address,
                                                int g) {
#pragma unroll
    for (int d = 0; d < kSteps; ++d) {
        uint32 b[4];
        load_matrices_transposed(b, T::advance(value_address, d) + g * 16 * T::kRowBytes);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
            mma(out[m][2 * d], p[m], b[0], b[1]);
            mma(out[m][2 * d + 1], p[m], b[2], b[3]);
        }
    }
}

// Scores of keys that a row must not see become minus infinity. `row`: this lane's first row in the sequence;
// `column`: first key of the block.
__device__ __forceinline__ void mask(Scores& scores, int row, int column, const AttentionParameters& p) {
    const int lane_column = column + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int limit = p.seqlen_k;
            if (CAUSAL) limit = min(limit, row + m * 16 + h * 8 + p.seqlen_k - p.seqlen_q + 1);
            limit -= lane_column;
#pragma unroll
            for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    if (n * 8 + i >= limit) scores[m][n][2 * h + i] = NEGATIVE_INFINITY;
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
attention_portable(const __grid_constant__ AttentionParameters p) {
    extern __shared__ __align__(1024) char shared_memory[];
    const uint32 query_tile = shared_address(shared_memory);
    const uint32 key_tiles = query_tile + kQueryBytes;
    const uint32 value_tiles = key_tiles + 2 * kBufferBytes;
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;

    // Which tile. Sections of heads one after another; inside a section row block by row block, all heads of each,
    // with a causal mask the longest row blocks first.
    const int section_tiles = p.slices_per_section * p.num_row_blocks;
    const int section = blockIdx.x / section_tiles;
    const int in_section = blockIdx.x % section_tiles;
    const int slices = min(p.slices_per_section, p.num_slices - section * p.slices_per_section);
    const int slice = section * p.slices_per_section + in_section % slices;
    const int row_block = CAUSAL ? p.num_row_blocks - 1 - in_section / slices : in_section / slices;
    const int batch = slice / p.num_heads;
    const int head = slice % p.num_heads;
    const int kv_head = head / p.heads_per_kv_head;
    const int first_row = row_block * BLOCK_M;

    // Which keys: blocks [0, num_blocks), of which those from first_masked on need the mask.
    const int offset = p.seqlen_k - p.seqlen_q;  // row i sees keys up to i + offset
    int end = p.seqlen_k;
    int unmasked = p.seqlen_k;  // keys that every row sees
    if (CAUSAL) {
        end = min(end, min(first_row + BLOCK_M, p.seqlen_q) + offset);
        unmasked = min(unmasked, first_row + offset + 1);
    }
    const int num_blocks = end > 0 ? (end + BLOCK_N - 1) / BLOCK_N : 0;
    const int first_masked = unmasked > 0 ? unmasked / BLOCK_N : 0;

    const char* query_rows = p.query + batch * p.query_batch + head * p.query_head + first_row * p.query_row;
    const char* key_rows = p.key + batch * p.key_batch + kv_head * p.key_head;
    const char* value_rows = p.value + batch * p.value_batch + kv_head * p.value_head;
    const int head_chunks = p.head_dim / kChunkElements;

    const auto load_keys = [&](int b) {
        Loader<BLOCK_N>::load(key_tiles + (b & 1) * kBufferBytes, key_rows + b * (BLOCK_N * p.key_row), p.key_row,
                              p.seqlen_k - b * BLOCK_N, head_chunks);
    };
    const auto load_values = [&](int b) {
        Loader<BLOCK_N>::load(value_tiles + (b & 1) * kBufferBytes, value_rows + b * (BLOCK_N * p.value_row),
                              p.value_row, p.seqlen_k - b * BLOCK_N, head_chunks);
    };

    Output out;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int d = 0; d < kOutTiles; ++d) {
#pragma unroll
            for (int i = 0; i < 4; ++i) out[m][d][i] = 0.0f;
        }
    }
    Softmax<kRowTiles, kOutTiles> softmax;
    const int row = first_row + warp * kWarpRows + lane / 4;
    const uint32 warp_query = query_tile + warp * kWarpRows * T::kRowBytes;

    if (num_blocks > 0) {
        // This lane's row and chunk for ldmatrix, so that each operand of mma is a pair of neighbouring registers:
        // keys as 8 rows x 2 chunks, twice; the query and the transposed values as 16 rows x 1 chunk, twice.
        const uint32 lane_key = T::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
        const uint32 lane_row = T::offset(lane % 16, lane / 16);
        int b = num_blocks - 1;
        Query query;
        query.address = warp_query + lane_row;
        Scores scores;

        Loader<BLOCK_M>::load(query_tile, query_rows, p.query_row, p.seqlen_q - first_row, head_chunks);
        load_keys(b);
        copy_commit();
        const auto prepare_query = [&]() {
            if (p.query_and != ~0u || p.query_xor != 0) {
                for (int c = lane; c < kWarpRows * T::kRowBytes / kChunkBytes; c += 32) {
                    Chunk q = load_shared(warp_query + c * kChunkBytes);
                    q.x = (q.x & p.query_and) ^ p.query_xor;
                    q.y = (q.y & p.query_and) ^ p.query_xor;
                    q.z = (q.z & p.query_and) ^ p.query_xor;
                    q.w = (q.w & p.query_and) ^ p.query_xor;
                    store_shared(warp_query + c * kChunkBytes, q);
                }
                __syncwarp();
            }
            query.load_registers();
        };

#if OVERLAP
        if (b > 0) load_keys(b - 1);
        load_values(b);
        copy_commit();
        copy_wait<1>();
        __syncthreads();
        prepare_query();
        const auto key_address = [&](int block) { return key_tiles + (block & 1) * kBufferBytes + lane_key; };
#pragma unroll
        for (int g = 0; g < kKeyGroups; ++g) multiply_keys(scores, query, key_address(b), g);
        if (b >= first_masked) mask(scores, row, b * BLOCK_N, p);
        softmax.update(scores, out, p.scale_log2);

        const auto step = [&](auto masked) {
            copy_wait<0>();
            __syncthreads();
            if (b >= 2) load_keys(b - 2);
            load_values(b - 1);
            copy_commit();
            uint32 probabilities[kKeyGroups][kRowTiles][4];
            const uint32 next_keys = key_address(b - 1);
#pragma unroll
            for (int g = 0; g < kKeyGroups; ++g) {
#pragma unroll
                for (int m = 0; m < kRowTiles; ++m) {
                    softmax.exponentials(scores[m][2 * g], scores[m][2 * g + 1], m, p.scale_log2, probabilities[g][m]);
                }
                multiply_keys(scores, query, next_keys, g);
            }
            const uint32 value_address = value_tiles + (b & 1) * kBufferBytes + lane_row;
#pragma unroll
            for (int g = 0; g < kKeyGroups; ++g) multiply_values(out, probabilities[g], value_address, g);
            if (masked.value) mask(scores, row, (b - 1) * BLOCK_N, p);
            softmax.update(scores, out, p.scale_log2);
        };
        for (; b > first_masked; --b) step(Flag<true>{});
        for (; b > 0; --b) step(Flag<false>{});
        copy_wait<0>();
        __syncthreads();
        const uint32 value_address = value_tiles + lane_row;
#pragma unroll
        for (int g = 0; g < kKeyGroups; ++g) {
            uint32 probabilities[kRowTiles][4];
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) {
                softmax.exponentials(scores[m][2 * g], scores[m][2 * g + 1], m, p.scale_log2, probabilities[m]);
            }
            multiply_values(out, probabilities, value_address, g);
        }
#else
        load_values(b);
        copy_commit();
        copy_wait<1>();
        __syncthreads();
        prepare_query();
        const auto step = [&](auto masked) {
            copy_wait<0>();
            __syncthreads();
            if (b > 0) {
                load_keys(b - 1);
                load_values(b - 1);
                copy_commit();
            }
            // Rows wholly above the diagonal see nothing of this block.
            const bool visible = !CAUSAL || !masked.value ||
                                 b * BLOCK_N <= first_row + (warp + 1) * kWarpRows - 1 + offset;
            if (visible) {
                multiply_keys(scores, query, key_tiles + (b & 1) * kBufferBytes + lane_key);
                if (masked.value) mask(scores, row, b * BLOCK_N, p);
                softmax.update(scores, out, p.scale_log2);
                const uint32 value_address = value_tiles + (b & 1) * kBufferBytes + lane_row;
#pragma unroll
                for (int g = 0; g < kKeyGroups; ++g) {
                    uint32 probabilities[kRowTiles][4];
#pragma unroll
                    for (int m = 0; m < kRowTiles; ++m) {
                        softmax.exponentials(scores[m][2 * g], scores[m][2 * g + 1], m, p.scale_log2,
                                             probabilities[m]);
                    }
                    multiply_values(out, probabilities, value_address, g);
                }
            }
        };
        for (; b >= first_masked; --b) step(Flag<true>{});
        for (; b >= 0; --b) step(Flag<false>{});
#endif
    }

    // Epilogue: normalise, then through this warp's own part of the query tile to 16-byte stores.
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float sum = quad_sum(softmax.sum[m][h]);
            const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
            const int r = m * 16 + h * 8 + lane / 4;
            const int global_row = first_row + warp * kWarpRows + r;
            if (p.lse != nullptr && lane % 4 == 0 && global_row < p.seqlen_q) {
                constexpr float ln2 = 0.6931471805599453f;
                p.lse[static_cast<int64>(slice) * p.seqlen_q + global_row] =
                    sum == 0.0f ? NEGATIVE_INFINITY : (softmax.shift[m][h] + log2_approx(sum)) * ln2;
            }
#pragma unroll
            for (int d = 0; d < kOutTiles; ++d) {
                store_shared(warp_query + T::offset(r, d) + 4 * (lane % 4),
                             pack(out[m][d][2 * h] * inverse, out[m][d][2 * h + 1] * inverse));
            }
        }
    }
    __syncwarp();
    char* output_rows = p.output + batch * p.output_batch + head * p.output_head +
                        (first_row + warp * kWarpRows) * p.output_row;
    const int rows = p.seqlen_q - first_row - warp * kWarpRows;
    constexpr int columns = power_of_two_above(T::kChunks);
    const int column = lane % columns;
#pragma unroll
    for (int r = lane / columns; r < kWarpRows; r += 32 / columns) {
        if (r < rows && column < head_chunks) {
            store_global(output_rows + r * p.output_row + column * kChunkBytes,
                         load_shared(warp_query + T::offset(r, column)));
        }
    }
}

// Attention forward for sm_75 and later: FlashAttention-2's algorithm (Dao, 2023) on mma.sync, ldmatrix and cp.async.
//
// A block of WARPS warps owns BLOCK_M query rows of one head and walks over the keys from the last block it needs to the
// first, so that the blocks that need a mask come first. Block b - 1 arrives while block b is multiplied.
//
// Macros: HEAD_DIM (a multiple of 16, at least the tensor's), BLOCK_M, BLOCK_N, WARPS, MIN_BLOCKS (launch_bounds.cuh),
// QUERY_STEPS (how many 16-wide slices of the query stay in registers; the rest is read for every block), OVERLAP (1: the next
// block's scores are computed while this block's exponentials are taken; needs the whole query in registers), ABLATE
// (ablation.cuh), and those of types.cuh.
#include "ablation.cuh"
#include "portable/copier.cuh"
#include "portable/products.cuh"
#include "ptx/vector.cuh"
#include "softmax.cuh"

// The arguments of an attention forward kernel that reads its tensors through plain pointers. One struct, passed
// by value; the host packs it field by field in this order (all pointers first, then 64-bit, then 32-bit fields).
struct AttentionParameters {
    const char* query;
    const char* key;
    const char* value;
    char* output;
    float* lse;  // (batch, heads, seqlen_q), contiguous; null where it is not wanted
    // Strides in bytes. The head dimension is contiguous.
    int64 query_batch, query_head, query_row;
    int64 key_batch, key_head, key_row;
    int64 value_batch, value_head, value_row;
    int64 output_batch, output_head, output_row;
    int num_heads;
    int heads_per_kv_head;
    int seqlen_q;
    int seqlen_k;
    int head_dim;
    int causal_offset;      // row i sees keys up to i + causal_offset: seqlen_k - seqlen_q, or 2^30 without a mask
    int last_rows_first;    // 1: the grid starts with the last row blocks
    int num_row_blocks;     // blocks of BLOCK_M query rows per head
    int num_slices;         // batch x num_heads
    int slices_per_section;  // heads whose tiles are interleaved, so that their keys and values share the L2 cache
    float scale_log2;       // |softmax_scale| x log2(e), positive
    uint32 query_xor;       // query elements are q ^ query_xor, two at a time: a negative softmax scale flips signs
};

static_assert(!OVERLAP || QUERY_STEPS == kSteps, "overlap needs the query in registers");

// The part of the problem that this thread works on. Cheap enough to be found anew before the main loop, for every block
// that needs a mask, and after the loop: the volatile reads keep the compiler from holding it in registers meanwhile.
struct WorkTile {
    int lane, warp, slice, batch, head, kv_head, first_row;

    __device__ __forceinline__ explicit WorkTile(const AttentionParameters& p) {
        int thread, block;
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
        asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
        lane = thread % 32;
        warp = thread / 32;
        // Sections of heads one after another; inside a section row block by row block, all heads of each; with a
        // causal mask the last rows, which see the most keys, come first.
        const int section_tiles = p.slices_per_section * p.num_row_blocks;
        const int section = block / section_tiles;
        const int in_section = block % section_tiles;
        const int slices = min(p.slices_per_section, p.num_slices - section * p.slices_per_section);
        slice = section * p.slices_per_section + in_section % slices;
        const int row_block = p.last_rows_first ? p.num_row_blocks - 1 - in_section / slices : in_section / slices;
        batch = slice / p.num_heads;
        head = slice % p.num_heads;
        kv_head = head / p.heads_per_kv_head;
        first_row = row_block * BLOCK_M;
    }
};

// Scores of keys that a row must not see become minus infinity. `column`: first key of the block.
__device__ __forceinline__ void mask(Scores& scores, int column, const AttentionParameters& p) {
    if (NO_MASK) return;
    const WorkTile tile(p);
    const int row = tile.first_row + tile.warp * kWarpRows + tile.lane / 4;
    const int lane_column = column + 2 * (tile.lane % 4);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int limit = min(p.seqlen_k, row + m * 16 + h * 8 + p.causal_offset + 1) - lane_column;
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

extern "C" __global__ void LAUNCH_BOUNDS
attention_portable(const __grid_constant__ AttentionParameters p) {
    extern __shared__ __align__(1024) char shared_memory[];
    const uint32 query_tile = shared_address(shared_memory);
    const uint32 key_tiles = query_tile + kQueryBytes;
    const uint32 value_tiles = key_tiles + kStages * kKeyBytes;
    const WorkTile tile(p);
    const int first_row = tile.first_row;

    // Which keys: blocks [0, num_blocks), of which those from first_masked on need the mask.
    const int end = min(p.seqlen_k, min(first_row + BLOCK_M, p.seqlen_q) + p.causal_offset);
    const int unmasked = min(p.seqlen_k, first_row + p.causal_offset + 1);  // keys that every row sees
    const int num_blocks = end > 0 ? (end + BLOCK_N - 1) / BLOCK_N : 0;
    const int first_masked = unmasked > 0 ? unmasked / BLOCK_N : 0;

    const Copier<HEAD_DIM> copier(p.head_dim);
    // This thread's chunk of the block that is copied next; blocks are copied from the last to the first.
    const int last_key = (num_blocks - 1) * BLOCK_N + copier.first;
    const char* key_source = p.key + tile.batch * p.key_batch + tile.kv_head * p.key_head + last_key * p.key_row +
                             copier.global_offset;
    const char* value_source = p.value + tile.batch * p.value_batch + tile.kv_head * p.value_head + last_key * p.value_row +
                               copier.global_offset;
    // Only the last block can be partial.
    const auto copy_keys = [&](int b, auto whole) {
        if (NO_LOADS && b < num_blocks - kStages) return;
        copier.copy<BLOCK_N, whole.value>(key_tiles + (b & 1) * kKeyBytes, key_source, p.key_row,
                                          p.seqlen_k - b * BLOCK_N);
        key_source -= BLOCK_N * p.key_row;
    };
    const auto copy_values = [&](int b, auto whole) {
        if (NO_LOADS && b < num_blocks - kStages) return;
        copier.copy<BLOCK_N, whole.value>(value_tiles + (b & 1) * kValueBytes, value_source, p.value_row,
                                          p.seqlen_k - b * BLOCK_N);
        value_source -= BLOCK_N * p.value_row;
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

    if (num_blocks > 0) {
        const int lane = tile.lane;
        const int warp = tile.warp;
        const uint32 warp_query = query_tile + warp * kWarpRows * T::kRowBytes;
        // This lane's row and chunk for ldmatrix, so that each operand of mma is a pair of neighbouring registers:
        // keys as 8 rows x 2 chunks, twice; the query and the transposed values as 16 rows x 1 chunk, twice.
        const uint32 lane_key = T::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
        const uint32 lane_row = T::offset(lane % 16, lane / 16);
        int b = num_blocks - 1;
        Query query;
        query.address = warp_query + lane_row;
        Scores scores;

        copier.copy<BLOCK_M, false>(query_tile,
                                    p.query + tile.batch * p.query_batch + tile.head * p.query_head +
                                        (first_row + copier.first) * p.query_row + copier.global_offset,
                                    p.query_row, p.seqlen_q - first_row);
        copy_keys(b, Flag<false>{});
        copy_commit();
        const auto prepare_query = [&]() {
            if (p.query_xor != 0) {
                for (int c = lane; c < kWarpRows * T::kRowBytes / kChunkBytes; c += 32) {
                    Chunk q = load_shared(warp_query + c * kChunkBytes);
                    q.x ^= p.query_xor;
                    q.y ^= p.query_xor;
                    q.z ^= p.query_xor;
                    q.w ^= p.query_xor;
                    store_shared(warp_query + c * kChunkBytes, q);
                }
                __syncwarp();
            }
            query.load_registers();
        };

#if OVERLAP
        if (b > 0) copy_keys(b - 1, Flag<true>{});
        copy_values(b, Flag<false>{});
        copy_commit();
        copy_wait<1>();
        __syncthreads();
        prepare_query();
        const auto key_address = [&](int block) { return key_tiles + (block & 1) * kKeyBytes + lane_key; };
#pragma unroll
        for (int g = 0; g < kKeyGroups; ++g) multiply_keys(scores, query, key_address(b), g);
        if (b >= first_masked) mask(scores, b * BLOCK_N, p);
        softmax.update(scores, out, p.scale_log2);

        const auto step = [&]() {
            copy_wait<0>();
            __syncthreads();
            if (b >= 2) copy_keys(b - 2, Flag<true>{});
            copy_values(b - 1, Flag<true>{});
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
            const uint32 value_address = value_tiles + (b & 1) * kValueBytes + lane_row;
#pragma unroll
            for (int g = 0; g < kKeyGroups; ++g) multiply_values(out, probabilities[g], value_address, g);
            if (b > first_masked) mask(scores, (b - 1) * BLOCK_N, p);
            softmax.update(scores, out, p.scale_log2);
        };
        for (; b > 0; --b) step();
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
        copy_values(b, Flag<false>{});
        copy_commit();
        copy_wait<1>();
        __syncthreads();
        prepare_query();
        const auto step = [&](auto masked) {
            copy_wait<0>();
            __syncthreads();
            if (b > 0) {
                copy_keys(b - 1, Flag<true>{});
                copy_values(b - 1, Flag<true>{});
                copy_commit();
            }
            // Rows wholly above the diagonal see nothing of this block.
            const bool visible =
                !masked.value || b * BLOCK_N < first_row + (warp + 1) * kWarpRows + p.causal_offset;
            if (visible) {
                multiply_keys(scores, query, key_tiles + (b & 1) * kKeyBytes + lane_key);
                if (masked.value) mask(scores, b * BLOCK_N, p);
                softmax.update(scores, out, p.scale_log2);
                const uint32 value_address = value_tiles + (b & 1) * kValueBytes + lane_row;
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
    const WorkTile done(p);
    const int lane = done.lane;
    const int warp_row = done.first_row + done.warp * kWarpRows;
    const uint32 warp_output = query_tile + done.warp * kWarpRows * T::kRowBytes;
    __syncwarp();  // other lanes have read the queries there
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float sum = quad_sum(softmax.sum[m][h]);
            const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
            const int r = m * 16 + h * 8 + lane / 4;
            const int global_row = warp_row + r;
            if (p.lse != nullptr && lane % 4 == 0 && global_row < p.seqlen_q) {
                constexpr float ln2 = 0.6931471805599453f;
                p.lse[static_cast<int64>(done.slice) * p.seqlen_q + global_row] =
                    sum == 0.0f ? NEGATIVE_INFINITY : (softmax.shift[m][h] + log2_approx(sum)) * ln2;
            }
#pragma unroll
            for (int d = 0; d < kOutTiles; ++d) {
                store_shared(warp_output + T::offset(r, d) + 4 * (lane % 4),
                             pack(out[m][d][2 * h] * inverse, out[m][d][2 * h + 1] * inverse));
            }
        }
    }
    __syncwarp();
    char* output_rows = p.output + done.batch * p.output_batch + done.head * p.output_head +
                        warp_row * p.output_row;
    const int rows = p.seqlen_q - warp_row;
    const int column = lane % copier.kColumns;
#pragma unroll
    for (int r = lane / copier.kColumns; r < kWarpRows; r += 32 / copier.kColumns) {
        if (r < rows && column < p.head_dim / kChunkElements) {
            store_global(output_rows + r * p.output_row + column * kChunkBytes,
                         load_shared(warp_output + T::offset(r, column)));
        }
    }
}

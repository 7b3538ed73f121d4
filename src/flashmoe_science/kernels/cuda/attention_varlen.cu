// Attention forward over sequences of any lengths, for sm_80 and later: the algorithm of attention_portable.cu with rows
// that are found on the device. Lengths, and pages of keys, are read here; the host knows upper bounds.
//
// Blocks of keys outside the window are skipped. What no row of the tile sees is not read: keys behind the last and before the
// first visible one are zeros, so that NaN in unused slots cannot spread.
//
// Macros: those of attention_portable.cu without OVERLAP and ABLATE, and
// VALUE_DIM (of value and output, at most HEAD_DIM), PAGED (keys in pages), SAME_STRIDES (of key and value), PACKED_HEADS (the heads of a group share a tile:
// for few rows), LEFT_WINDOW (a row sees no key more than window_left before its position), SOFTCAP, ALIBI,
// CHUNK (with LEFT_WINDOW: a row sees the keys of its own chunk alone; may be left out),
// TREE (without LEFT_WINDOW: a row has a bit for each of the keys of its sequence's own queries; may be left out),
// ONLY (2: sequences of one token are another launch's; may be left out).
#include "portable/copier.cuh"
#include "portable/products.cuh"
#include "ptx/global.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/vector.cuh"
#include "softmax.cuh"
#include "varlen/parameters.cuh"
#include "varlen/scores.cuh"
#include "varlen/work_tile.cuh"

// Where the keys and values of a block lie. Packed: one row after another. In pages: a thread for each row looks its page
// up in the table, once, and leaves its place in shared memory for the threads that copy the row.
struct KeyRow {
    int64 key;  // bytes from the head's first page
#if SAME_STRIDES
    __device__ __forceinline__ int64 of_value() const { return key; }
#else
    int64 value;
    __device__ __forceinline__ int64 of_value() const { return value; }
#endif
};

struct PageLookup {
    int page;
    int slot;

    // The row with this thread's number of the block of keys that begins at `column`; nothing is read but for keys in
    // [begin, end).
    __device__ __forceinline__ PageLookup(int column, int begin, int end, const int* table, const VarlenParameters& p) {
        page = 0;
        slot = 0;
        const int key = column + static_cast<int>(threadIdx.x);
        if (static_cast<int>(threadIdx.x) < BLOCK_N && key >= begin && key < end) {
            const int index = __umulhi(2 * static_cast<uint32>(key), p.page_multiplier) >> p.page_shift;
            page = load_index(table + index);
            slot = key - index * static_cast<int>(p.page_size);
        }
    }

    __device__ __forceinline__ void publish(KeyRow (&rows)[PAGED ? BLOCK_N : 1], const VarlenParameters& p) const {
        if (static_cast<int>(threadIdx.x) < BLOCK_N) {
            rows[threadIdx.x].key = page * p.key_batch + slot * p.key_row;
#if !SAME_STRIDES
            rows[threadIdx.x].value = page * p.value_batch + slot * p.value_row;
#endif
        }
    }
};

static_assert(!PAGED || BLOCK_N <= kThreads, "a thread for each row looks its page up");

extern "C" __global__ void LAUNCH_BOUNDS
attention_varlen(const __grid_constant__ VarlenParameters p) {
    extern __shared__ __align__(1024) char shared_memory[];
    __shared__ WorkTile shared_work;
    __shared__ KeyRow key_rows[PAGED ? kStages : 1][PAGED ? BLOCK_N : 1];
    const volatile WorkTile& work = shared_work;
    const uint32 query_tile = shared_address(shared_memory);
    const uint32 key_tiles = query_tile + kQueryBytes;
    const uint32 value_tiles = key_tiles + kStages * kKeyBytes;
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;

    if (warp == 0) {
        const WorkTile mine = work_tile(block_index(), lane, p);
        if (lane == 0) shared_work = mine;
    }
    __syncthreads();
    const int first_row = work.first_row;
    const int rows = work.rows;
    if (first_row >= rows) return;

    const int batch = work.batch;
    const int slice = work.slice;
    const int group = rows_per_token(p);
    const int kv_head = PACKED_HEADS ? slice : slice / p.heads_per_kv_head;
    const int first_block = work.begin / BLOCK_N;
    const int first_masked = work.first_masked;

    const Copier<HEAD_DIM> key_copier(p.head_dim);
    const Copier<VALUE_DIM> value_copier(p.value_dim);

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

    if (work.begin < work.end) {
        const int64 key_start = work.key_start;
        const char* const keys = p.key + (PAGED ? 0 : batch * p.key_batch + key_start * p.key_row) + kv_head * p.key_head;
        const char* const values =
            p.value + (PAGED ? 0 : batch * p.value_batch + key_start * p.value_row) + kv_head * p.value_head;
        const int* const table = PAGED ? p.page_table + batch * p.table_row : nullptr;
        const auto copy_keys = [&](int b, auto whole) {
            key_copier.template copy_rows<BLOCK_N>(key_tiles + (b & 1) * kKeyBytes, [&](int row) {
                const int key = b * BLOCK_N + row;
                const int64 from = PAGED ? key_rows[b & 1][row].key : key * p.key_row;
                return RowSource{keys + from, whole.value || (key >= work.begin && key < work.end)};
            });
        };
        const auto copy_values = [&](int b, auto whole) {
            value_copier.template copy_rows<BLOCK_N>(value_tiles + (b & 1) * kValueBytes, [&](int row) {
                const int key = b * BLOCK_N + row;
                const int64 from = PAGED ? key_rows[b & 1][row].of_value() : key * p.value_row;
                return RowSource{values + from, whole.value || (key >= work.begin && key < work.end)};
            });
        };

        const uint32 warp_query = query_tile + warp * kWarpRows * T::kRowBytes;
        // This lane's row and chunk for ldmatrix: see attention_portable.cu.
        const uint32 lane_key = T::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
        const uint32 lane_value = V::offset(lane % 16, lane / 16);
        int b = (work.end - 1) / BLOCK_N;
        Query query;
        query.address = warp_query + T::offset(lane % 16, lane / 16);
        Scores scores;

        if (PAGED) {
            PageLookup(b * BLOCK_N, work.begin, work.end, table, p).publish(key_rows[b & (kStages - 1)], p);
            __syncthreads();
        }
        const char* const queries = p.query + batch * p.query_batch + work.query_start * p.query_row + slice * group * p.query_head;
        key_copier.template copy_rows<BLOCK_M>(query_tile, [&](int row) {
            const TokenOfRow at = token_of(first_row + row, p);
            return RowSource{queries + at.token * p.query_row + at.head * p.query_head, first_row + row < rows};
        });
        copy_keys(b, Flag<false>{});
        copy_commit();
        copy_values(b, Flag<false>{});
        copy_commit();
        if (PAGED) {
            PageLookup((b - 1) * BLOCK_N, work.begin, work.end, table, p).publish(key_rows[(b - 1) & (kStages - 1)], p);
        }
        copy_wait<1>();
        __syncthreads();
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

        // Keys that some row of this warp sees. A warp whose rows are all behind the sequence's end does nothing.
        const int warp_row = first_row + warp * kWarpRows;
        const VisibleKeys of_warp(warp_row, min(warp_row + kWarpRows, rows) - 1, work.offset, work.seqlen_k, p);
        const int warp_begin = of_warp.begin;
        const int warp_end = warp_row < rows ? of_warp.end : 0;
        const int lane_row = warp * kWarpRows + lane / 4;
        float slopes[kRowTiles][2];
        if (ALIBI) {
            constexpr float log2e = 1.4426950408889634f;
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int head = slice * group + token_of(first_row + lane_row + m * 16 + h * 8, p).head;
                    slopes[m][h] = p.alibi_slopes[batch * p.alibi_batch + head] * log2e;
                }
            }
        }
        const float scale_log2 = kScaled ? 1.0f : p.scale_log2;

        for (; b >= first_block; --b) {
            copy_wait<0>();
            __syncthreads();
#if TREE
            if (work.unseen != 0 && (b + 1) * BLOCK_N > work.tree) {
                clear_unseen(value_tiles + (b & 1) * kValueBytes, b * BLOCK_N, work);
                __syncthreads();
            }
#endif
            if (b > first_block) {
                // Only the last block, which is copied above, and with a window the first can be partial.
                if (LEFT_WINDOW && b - 1 == first_block) {
                    copy_keys(b - 1, Flag<false>{});
                    copy_values(b - 1, Flag<false>{});
                } else {
                    copy_keys(b - 1, Flag<true>{});
                    copy_values(b - 1, Flag<true>{});
                }
                copy_commit();
            }
            // Read now, needed when the next block's copies start; stored at the end, when it has long arrived.
            const PageLookup next(PAGED ? (b - 2) * BLOCK_N : 0, work.begin, PAGED ? work.end : 0, table, p);
            if (b * BLOCK_N < warp_end && (!LEFT_WINDOW || (b + 1) * BLOCK_N > warp_begin)) {
                multiply_keys(scores, query, key_tiles + (b & 1) * kKeyBytes + lane_key);
                if (SOFTCAP) cap_scores(scores, p);
                if (ALIBI) add_alibi(scores, b * BLOCK_N, lane_row, slopes, work, p);
                if (b >= first_masked || (LEFT_WINDOW && b < work.first_clear)) mask(scores, b * BLOCK_N, lane_row, work, p);
                softmax.update(scores, out, scale_log2);
                const uint32 value_address = value_tiles + (b & 1) * kValueBytes + lane_value;
#pragma unroll
                for (int g = 0; g < kKeyGroups; ++g) {
                    uint32 probabilities[kRowTiles][4];
#pragma unroll
                    for (int m = 0; m < kRowTiles; ++m) {
                        softmax.exponentials(scores[m][2 * g], scores[m][2 * g + 1], m, scale_log2, probabilities[m]);
                    }
                    multiply_values(out, probabilities, value_address, g);
                }
            }
            if (PAGED) next.publish(key_rows[b & (kStages - 1)], p);
        }
    }

    // Epilogue: normalise, then through this warp's own part of the query tile to 16-byte stores.
    const int done_lane = thread_index() % 32;
    const int done_warp = thread_index() / 32;
    const int warp_row = work.first_row + done_warp * kWarpRows;
    const int remaining = work.rows - warp_row;
    const int first_head = work.slice * group;
    const uint32 warp_output = query_tile + done_warp * kWarpRows * T::kRowBytes;
    __syncwarp();  // other lanes have read the queries there
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int r = m * 16 + h * 8 + done_lane / 4;
            const TokenOfRow at = token_of(warp_row + r, p);
            const float sum = quad_sum(softmax.sum[m][h]);
            float total = sum;
            if (p.sinks != nullptr && r < remaining) {
                constexpr float log2e = 1.4426950408889634f;
                total += exp2_approx(p.sinks[first_head + at.head] * log2e - softmax.shift[m][h]);
            }
            const float inverse = sum == 0.0f ? 0.0f : 1.0f / total;
            if (p.lse != nullptr && done_lane % 4 == 0 && r < remaining) {
                constexpr float ln2 = 0.6931471805599453f;
                p.lse[work.batch * p.lse_batch + (first_head + at.head) * p.lse_head +
                      (work.query_start + at.token) * p.lse_row] =
                    sum == 0.0f ? NEGATIVE_INFINITY : (softmax.shift[m][h] + log2_approx(sum)) * ln2;
            }
#pragma unroll
            for (int d = 0; d < kOutTiles; ++d) {
#if TREE
                if (sum == 0.0f) out[m][d][2 * h] = out[m][d][2 * h + 1] = 0.0f;  // NaN where another row of the tile sees one
#endif
                store_shared(warp_output + V::offset(r, d) + 4 * (done_lane % 4),
                             pack(out[m][d][2 * h] * inverse, out[m][d][2 * h + 1] * inverse));
            }
        }
    }
    __syncwarp();
    char* const output = p.output + work.batch * p.output_batch + work.query_start * p.output_row;
    constexpr int columns = Copier<VALUE_DIM>::kColumns;
    const int column = done_lane % columns;
#pragma unroll
    for (int r = done_lane / columns; r < kWarpRows; r += 32 / columns) {
        if (r < remaining && column < p.value_dim / kChunkElements) {
            const TokenOfRow at = token_of(warp_row + r, p);
            store_global(output + at.token * p.output_row + (first_head + at.head) * p.output_head + column * kChunkBytes,
                         load_shared(warp_output + V::offset(r, column)));
        }
    }
}

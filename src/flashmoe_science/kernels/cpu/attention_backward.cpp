// Gradients of exact attention (attention_forward.cpp), never holding the scores of more than one tile. With
// P = exp(S - lse), dP = dO V^T and delta = rowsum(O * dO) - dlse:
//
//   dS = P * (dP - delta)     dV = P^T dO     dK = softmax_scale * dS^T Q     dQ = softmax_scale * dS K
//
// A tile is up to 64 queries of one head; it meets the keys in blocks of 64. S^T = K Q^T and dP^T = V dO^T have queries in
// lanes, the other three products the head dimension. The order of the sums does not depend on the threads, of which each
// takes a head's keys or a strip of tiles: docs/kernels/cpu-backward.md.
//
// Masked keys have weights and gradients that are exact zeros; where a block on the diagonal meets an operand that is not
// finite, only visible products are summed.

#include <math.h>
#include <sched.h>

#include "backward_tile.h"
#include "parallel.h"
#include "python_call.h"
#include "scratch.h"

namespace {

// Of a thread's buffers for the tiles of a strip; they should stay in the second-level cache.
constexpr int64_t STRIP_BYTES = 400 << 10;
// Strips to share among the threads, for each of them.
constexpr int64_t STRIPS_PER_THREAD = 4;
constexpr int SPINS = 200;

// The strip's head and its place among the strips of its space, in the order of their sums.
struct Strip {
    int64_t batch, kv_head, head, in_group, index;
};

// The space's sums that a strip adds to, and who is ahead of it; no one where the thread has the whole space.
struct SpaceSums {
    float *key, *value;
    int* strips_done;
};

template <class Bytes>
Bytes* row_at(Bytes* tensor, const int64_t stride[3], int64_t batch, int64_t head, int64_t row) {
    return tensor + batch * stride[0] + head * stride[1] + row * stride[2];
}

// Keys that a strip of any head sees.
int64_t keys_seen(const BackwardJob& job, int64_t strip) {
    const AttentionBackwardProblem& p = *job.problem;
    if (!job.causal) return p.seqlen_k;
    const int64_t end = smaller((strip + 1) * job.strip_rows, p.seqlen_q);
    return larger<int64_t>(0, end + p.seqlen_k - p.seqlen_q);
}

// The first strip of a head that sees a key of the block.
int64_t first_strip(const BackwardJob& job, int64_t block) {
    if (!job.causal) return 0;
    return larger<int64_t>(0, block * BLOCK_KEYS - (job.problem->seqlen_k - job.problem->seqlen_q)) / job.strip_rows;
}

void wait_for_strips(const int* done, int strips) {
    for (int spins = 0; __atomic_load_n(done, __ATOMIC_ACQUIRE) < strips; ++spins)
        if (spins >= SPINS) sched_yield();
}

template <class Path>
void start_strip(const BackwardJob& job, BackwardWorkspace& w, const Strip& strip, int& tiles) {
    const AttentionBackwardProblem& p = *job.problem;
    const char* const out = row_at(job.out, p.out_stride, strip.batch, strip.head, 0);
    const float* const lse = job.lse + (strip.batch * p.heads + strip.head) * p.seqlen_q;
    const char* const grad_lse =
        job.grad_lse ? row_at(job.grad_lse, p.grad_lse_stride, strip.batch, strip.head, 0) : nullptr;
    const int64_t end = smaller(p.seqlen_q, (strip.index + 1) * job.strip_rows);
    tiles = 0;
    for (int64_t row = strip.index * job.strip_rows; row < end; row += job.tile_queries, ++tiles) {
        QueryTile& tile = w.tile[tiles];
        tile.first_row = row;
        tile.rows = (int)smaller<int64_t>(job.tile_queries, end - row);
        tile.query = row_at(job.query, p.query_stride, strip.batch, strip.head, row);
        tile.grad_out = row_at(job.grad_out, p.grad_out_stride, strip.batch, strip.head, row);
        start_tile<Path>(job, tile, out, lse, grad_lse, up_to_multiple(tile.rows, W) / W, job.tile_queries);
    }
}

template <class Path>
void run_strip(const BackwardJob& job, BackwardWorkspace& w, const Strip& strip, const SpaceSums& sums) {
    typedef typename Path::Element Element;
    const AttentionBackwardProblem& p = *job.problem;
    const int ld = job.tile_queries;
    const int head_dim = (int)p.head_dim;
    const bool last = strip.in_group == job.group - 1 && strip.index == job.strips - 1;
    int tiles;
    start_strip<Path>(job, w, strip, tiles);
    const int64_t keys = keys_seen(job, strip.index);
    for (int64_t b = 0; b * BLOCK_KEYS < keys; ++b) {
        BackwardBlock block;
        block.first = b * BLOCK_KEYS;
        block.count = (int)smaller<int64_t>(BLOCK_KEYS, p.seqlen_k - block.first);
        block.padded = (int)smaller<int64_t>(BLOCK_KEYS, job.sum_rows - block.first);
        const int64_t from = NO_LOADS ? 0 : block.first;
        block.key = block.raw_key = row_at(job.key, p.key_stride, strip.batch, strip.kv_head, from);
        block.value = row_at(job.value, p.value_stride, strip.batch, strip.kv_head, from);
        block.key_row = block.raw_key_row = p.key_stride[2];
        block.value_row = p.value_stride[2];
        const int64_t sum_at = block.first * job.row;
        block.grad_key = job.grad_key ? sums.key + sum_at : nullptr;
        block.grad_value = job.grad_value ? sums.value + sum_at : nullptr;
        Path::prepare_block(job, w, block);
        const int64_t first = first_strip(job, b);
        const int64_t before = strip.in_group * (job.strips - first) + strip.index - first;
        bool waited = sums.strips_done == nullptr;
        const auto wait = [&] {
            if (!waited) wait_for_strips(sums.strips_done + b, (int)before);
            waited = true;
            if (before > 0) return;
            if (block.grad_key) memset(block.grad_key, 0, sizeof(float) * block.padded * job.row);
            if (block.grad_value) memset(block.grad_value, 0, sizeof(float) * block.padded * job.row);
        };
        bool begun = false;
        for (int t = 0; t < tiles; ++t) {
            QueryTile& tile = w.tile[t];
            if (block.first >= tile.keys) continue;
            const int columns = up_to_multiple(tile.rows, W) / W;
            const bool diagonal = block.first + block.count - 1 > tile.diagonal;
            weigh_tile<Path>(job, w, tile, block, diagonal, columns, ld);
            if (!begun) wait();
            begun = true;
            if (diagonal &&
                (tile.nonfinite || has_nonfinite<Element>(block.raw_key, block.raw_key_row, block.count, head_dim)))
                add_visible_products<Path>(job, w, tile, block, ld);
            else
                add_products<Path>(job, w, tile, block, columns, ld);
        }
        if (last && block.grad_key)
            store_sums<Element>(
                block.grad_key, job.row, row_at(job.grad_key, p.grad_key_stride, strip.batch, strip.kv_head, block.first),
                p.grad_key_stride[2], block.count, head_dim, job.scale);
        if (last && block.grad_value)
            store_sums<Element>(
                block.grad_value, job.row,
                row_at(job.grad_value, p.grad_value_stride, strip.batch, strip.kv_head, block.first), p.grad_value_stride[2],
                block.count, head_dim, 1.0f);
        if (sums.strips_done) __atomic_store_n(sums.strips_done + b, (int)before + 1, __ATOMIC_RELEASE);
    }
    if (!job.grad_query) return;
    for (int t = 0; t < tiles; ++t) {
        const QueryTile& tile = w.tile[t];
        char* const to = row_at(job.grad_query, p.grad_query_stride, strip.batch, strip.head, tile.first_row);
        if (job.on_amx)
            store_columns<Element>(tile.grad_query, ld, to, p.grad_query_stride[2], tile.rows, head_dim, job.scale);
        else
            store_sums<Element>(tile.grad_query, job.row, to, p.grad_query_stride[2], tile.rows, head_dim, job.scale);
    }
}

// Floats of a tile's buffers.
size_t tile_floats(const BackwardJob& job) {
    const size_t ld = job.tile_queries;
    const size_t d = job.problem->head_dim;
    // Rows are read in whole vectors, so past the end of the last one.
    return 2 * d * ld + 2 * (ld * d + W) + ld * job.row + 2 * ld;
}

bool arrange(const BackwardJob& job, BackwardWorkspace& w) {
    const size_t ld = job.tile_queries;
    const size_t d = job.problem->head_dim;
    const size_t tiles = job.strip_rows / job.tile_queries;
    const size_t block = BLOCK_KEYS * d + W;
    float* at = reserve_scratch(tiles * tile_floats(job) + 5 * BLOCK_KEYS * ld + 2 * block);
    if (at == nullptr) return false;
    const auto take = [&at](size_t floats) {
        float* const taken = at;
        at += floats;
        return taken;
    };
    for (size_t t = 0; t < tiles; ++t) {
        w.tile[t].query_columns = take(d * ld);
        w.tile[t].grad_columns = take(d * ld);
        w.tile[t].grad_query = take(ld * job.row);
        w.tile[t].lse = take(ld);
        w.tile[t].delta = take(ld);
        w.tile[t].query_copy = take(ld * d + W);
        w.tile[t].grad_copy = take(ld * d + W);
    }
    w.scores = take(BLOCK_KEYS * ld);
    w.gradients = take(BLOCK_KEYS * ld);
    w.weight_pairs = take(BLOCK_KEYS * ld);
    w.gradient_pairs = take(BLOCK_KEYS * ld);
    w.gradient_key_pairs = take(BLOCK_KEYS * ld);
    w.key = take(block);
    w.value = take(block);
    return true;
}

template <class Path>
void work(void* data) {
    BackwardJob& job = *(BackwardJob*)data;
    const AttentionBackwardProblem& p = *job.problem;
    BackwardWorkspace w;
    if (!arrange(job, w)) {
        __atomic_store_n(&job.out_of_memory, 1, __ATOMIC_RELAXED);
        return;
    }
    [[maybe_unused]] const typename Path::Session session;
    const int64_t own_sums = job.whole_spaces ? __atomic_fetch_add(&job.next_sums, 1, __ATOMIC_RELAXED) : 0;
    const int64_t space_strips = job.group * job.strips;
    for (;;) {
        const int64_t ticket = __atomic_fetch_add(&job.next_ticket, 1, __ATOMIC_RELAXED);
        if (ticket >= job.tickets) return;
        const int64_t space = job.whole_spaces ? ticket : ticket / space_strips;
        const int64_t first = job.whole_spaces ? 0 : ticket % space_strips;
        const int64_t count = job.whole_spaces ? space_strips : 1;
        float* const at = job.sums + (job.whole_spaces ? own_sums : space) * job.space_sums;
        const SpaceSums sums = {
            at, at + (job.grad_key ? job.sum_rows * job.row : 0),
            job.whole_spaces ? nullptr : job.strips_done + space * job.blocks};
        Strip strip;
        strip.batch = space / p.kv_heads;
        strip.kv_head = space % p.kv_heads;
        for (int64_t i = first; i < first + count; ++i) {
            strip.in_group = i / job.strips;
            strip.index = i % job.strips;
            strip.head = strip.kv_head * job.group + strip.in_group;
            run_strip<Path>(job, w, strip, sums);
        }
    }
}

// Who takes what. The tiles, and with them the order of the sums, depend on the shape alone.
int divide(BackwardJob& job, int threads) {
    const AttentionBackwardProblem& p = *job.problem;
    const double pairs = (double)p.seqlen_q * p.seqlen_k * (job.causal ? 0.5 : 1.0);
    if ((double)p.batch * p.heads * pairs * p.head_dim * 5 < MIN_PARALLEL_WORK) threads = 1;
    job.tile_queries =
        (int)smaller<int64_t>(GRADIENT_TILE_QUERIES, up_to_multiple(p.seqlen_q, job.on_amx ? AMX_STEP : W));
    const int64_t tiles = (p.seqlen_q + job.tile_queries - 1) / job.tile_queries;
    job.whole_spaces = threads == 1 || job.spaces >= 2 * threads || job.spaces % threads == 0;
    int64_t strip_tiles = larger<int64_t>(1, STRIP_BYTES / (int64_t)(tile_floats(job) * sizeof(float)));
    strip_tiles = smaller<int64_t>(smaller<int64_t>(strip_tiles, MAX_STRIP_TILES), tiles);
    if (!job.whole_spaces) {
        const int64_t shared = job.spaces * job.group * tiles / (threads * STRIPS_PER_THREAD);
        strip_tiles = larger<int64_t>(1, smaller(strip_tiles, shared));
    }
    job.strip_rows = strip_tiles * job.tile_queries;
    job.strips = (tiles + strip_tiles - 1) / strip_tiles;
    job.tickets = job.whole_spaces ? job.spaces : job.spaces * job.group * job.strips;
    return (int)smaller<int64_t>(threads, job.tickets);
}

int run(BackwardJob& job, int threads) {
    const AttentionBackwardProblem& p = *job.problem;
    threads = divide(job, threads);
    job.blocks = (p.seqlen_k + BLOCK_KEYS - 1) / BLOCK_KEYS;
    job.sum_rows = job.on_amx ? up_to_multiple(p.seqlen_k, AMX_STEP) : p.seqlen_k;
    job.space_sums = job.sum_rows * job.row * ((job.grad_key != nullptr) + (job.grad_value != nullptr));
    const int64_t sums = (job.whole_spaces ? threads : job.spaces) * job.space_sums * (int64_t)sizeof(float);
    const int64_t counters = job.whole_spaces ? 0 : job.spaces * job.blocks * (int64_t)sizeof(int);
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, sums + counters + 64) != 0) return OUT_OF_MEMORY;
    job.sums = (float*)memory;
    job.strips_done = (int*)((char*)memory + sums);
    memset(job.strips_done, 0, counters);
    const auto of_element =
        for_element(p.element_type, work<FloatBackwardPath<float>>, work<BFloat16BackwardPath>, work<FloatBackwardPath<Half>>);
    run_on_threads(of_element, &job, threads);
    free(memory);
    return job.out_of_memory ? OUT_OF_MEMORY : SUCCESS;
}

}  // namespace

// Every tensor has elements. lse is contiguous (batch, heads, seqlen_q), as flashmoe_attention_forward left it; grad_lse and
// the three gradients may be null: not given, not needed. After OUT_OF_MEMORY (for the sums, or for a thread's scratch) the
// gradients are undefined; after NULL_TENSOR nothing was touched.
EXPORTED int flashmoe_attention_backward(
    const AttentionBackwardProblem* problem, const void* query, const void* key, const void* value, const void* out,
    const float* lse, const void* grad_out, const void* grad_lse, void* grad_query, void* grad_key, void* grad_value,
    int threads) {
    const AttentionBackwardProblem& p = *problem;
    if (!query || !key || !value || !out || !lse || !grad_out) return NULL_TENSOR;
    BackwardJob job = {};
    job.problem = problem;
    job.query = (const char*)query;
    job.key = (const char*)key;
    job.value = (const char*)value;
    job.out = (const char*)out;
    job.lse = lse;
    job.grad_out = (const char*)grad_out;
    job.grad_lse = (const char*)grad_lse;
    job.grad_query = (char*)grad_query;
    job.grad_key = (char*)grad_key;
    job.grad_value = (char*)grad_value;
    job.scale = (float)p.softmax_scale;
    // One query, aligned bottom-right, sees every key.
    job.causal = p.causal && p.seqlen_q > 1;
    job.needs_score_gradients = grad_query || grad_key;
    job.row = up_to_multiple(p.head_dim, W);
    job.group = p.heads / p.kv_heads;
    job.spaces = p.batch * p.kv_heads;
    job.on_amx = takes_amx(p);
    return run(job, threads);
}

PYTHON_METHOD(flashmoe_attention_backward_method, "attention_backward", PythonCall<flashmoe_attention_backward>::call)

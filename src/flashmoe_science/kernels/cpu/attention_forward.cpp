// Exact attention, forward, with online softmax: out = softmax(softmax_scale * Q K^T) V, never holding the
// scores of more than one tile.
//
// A tile is up to 64 queries (24 or 16 with AVX2) of one head (or, where few queries share a key/value head, of its whole group).
// Queries lie in vector lanes, so S^T = K Q^T and O^T = V^T P^T read K and V row-major, in place, by broadcast. Key blocks
// are visited in order. Only Q and O are transposed, once a tile. A task is one or more tiles of the same head that share each
// prepared key block: docs/kernels/cpu.md. A few rows of a key/value head take another way: decode.h.
//
// Causal masks align bottom-right. Where a block on the diagonal holds a value that is not finite (0 * NaN), only visible
// products are summed.

#include <math.h>

#include "decode.h"
#include "integer_tile.h"
#include "parallel.h"
#include "python_call.h"
#include "scratch.h"
#include "split.h"
#include "tile.h"

namespace {

// A block's keys and values as the products of fp32 numbers, pairs or the matrix unit read them.
template <class Path>
void prepare(const Job& job, const Workspace& w, KeyBlock& block) {
    const int head_dim = (int)job.problem->head_dim;
    block.on_amx = takes_amx<Path>(head_dim | block.count);
    if (block.on_amx)
        prepare_on_amx(w, block, head_dim);
    else
        Path::prepare(w, block, head_dim, head_dim);
}

// Rows of a row space, those of its `part`th task, against keys [first_key, last_key). Where keys are split these are the
// `part`th ones, of all rows.
template <class Path>
void run_task(const Job& job, Workspace& w, int64_t space, int64_t part, int64_t first_key, int64_t last_key) {
    typedef typename Path::Element Element;
    [[maybe_unused]] constexpr bool IN_INTEGERS = sizeof(Element) == 2;
    const AttentionProblem& p = *job.problem;
    const int64_t heads = p.heads / job.fold;
    const int64_t batch = space / heads;
    const int64_t head = space % heads * job.fold;
    const int64_t kv_head = head / (p.heads / p.kv_heads);
    const int64_t task_rows = (int64_t)job.tile_queries * job.task_tiles;
    const char* query = job.query + batch * p.query_stride[0] + head * p.query_stride[1];
    const char* key = job.key + batch * p.key_stride[0] + kv_head * p.key_stride[1];
    const char* value = job.value + batch * p.value_stride[0] + kv_head * p.value_stride[1];
    char* out = job.out + batch * p.out_stride[0] + head * p.out_stride[1];
    const int ld = job.tile_queries;
    [[maybe_unused]] const int64_t row_bytes = p.head_dim * (int64_t)sizeof(Element);

    if (job.parts > 1) use_part(job, w, space, part);
    int tiles = 0;
    int64_t keys = 0;
    const int64_t first_row = job.parts > 1 ? 0 : part * task_rows;
    const int64_t end = smaller(job.rows, first_row + task_rows);
    for (int64_t row = first_row; row < end; row += job.tile_queries, ++tiles) {
        Tile& tile = w.tile[tiles];
        tile.first_row = row;
        tile.rows = (int)smaller<int64_t>(job.tile_queries, end - row);
        start_tile<Path>(job, tile, query, out, up_to_multiple(tile.rows, W) / W, ld);
#if HAS_INTEGERS
        if constexpr (IN_INTEGERS)
            if (job.integers) {
                round_queries<Element>(tile, (int)p.head_dim, up_to_multiple(tile.rows, W) / W, ld, tile.integers);
                if constexpr (NARROW_INTEGER_TILES)
                    if (ld < TILE_QUERIES) bound_by_whole_tile<Element>(job, w, tile, query, out);
            }
#endif
        keys = larger(keys, tile.keys);
    }
    // Whole blocks: how many keys one has goes by the shape, whichever rows share the task.
    keys = smaller<int64_t>((keys + BLOCK_KEYS - 1) / BLOCK_KEYS * BLOCK_KEYS, last_key);
    for (int64_t first = first_key; first < keys; first += BLOCK_KEYS) {
        const int64_t from = NO_LOADS ? 0 : first;
        KeyBlock block;
        block.first = first;
        block.count = (int)smaller<int64_t>(BLOCK_KEYS, keys - first);
        block.key = key + from * p.key_stride[2];
        block.value = block.raw_value = value + from * p.value_stride[2];
        block.key_row = p.key_stride[2];
        block.value_row = p.value_stride[2];
        [[maybe_unused]] bool rounded = false;
#if HAS_INTEGERS
        if constexpr (IN_INTEGERS)
            rounded = job.integers && round_block<Element>(job, w.tile, tiles, block, (int)p.head_dim, w.integers);
#endif
        bool prepared = false;
        for (int t = 0; t < tiles; ++t) {
            Tile& tile = w.tile[t];
            if (first >= tile.keys) continue;
            const int columns = up_to_multiple(tile.rows, W) / W;
#if HAS_INTEGERS
            if constexpr (IN_INTEGERS)
                if (job.integers && attends_in_integers<Element>(job, w, tile, block, rounded, columns, ld)) continue;
#endif
            if (!prepared) prepare<Path>(job, w, block);
            prepared = true;
            if constexpr (WIDE_COLUMNS > MAX_COLUMNS)
                if (attends_wide(job, tile, block, columns)) {
                    if (first + 2 * BLOCK_KEYS <= keys) {
                        fetch_rows(key + (first + BLOCK_KEYS) * p.key_stride[2], p.key_stride[2], row_bytes, t, tiles);
                        fetch_rows(value + (first + BLOCK_KEYS) * p.value_stride[2], p.value_stride[2], row_bytes, t, tiles);
                    }
                    attend_wide<Path>(job, w, tile, block, w.tile[t + 1 < tiles ? t + 1 : 0]);
                    continue;
                }
            attend<Path>(job, w, tile, block, columns, ld);
        }
    }
    if (job.parts > 1) {
        if (!is_last_part(job, space)) return;
        use_part(job, w, space, 0);
        for (int t = 0; t < tiles; ++t)
            for (int c = 0; c < up_to_multiple(w.tile[t].rows, W) / W; ++c)
                combine_column(job, w.tile[t], c);
    }
    float* lse = job.lse ? job.lse + (batch * p.heads + head) * p.seqlen_q : nullptr;
    for (int t = 0; t < tiles; ++t)
        finish_tile<Path>(job, w, w.tile[t], lse, up_to_multiple(w.tile[t].rows, W) / W, ld);
}

struct ThreadWorkspace : Workspace {
    DecodeWorkspace decode;
};

bool arrange(const Job& job, ThreadWorkspace& w) {
    if (job.few) {
        float* const at = reserve_scratch(decode_floats(job));
        if (at != nullptr) arrange_decode(job, w.decode, at);
        return at != nullptr;
    }
    const size_t ld = job.tile_queries;
    const size_t d = job.problem->head_dim;
    const size_t block = BLOCK_KEYS * d;
    const size_t of_tile = 2 * d * ld + 2 * ld + (job.integers ? d / 2 * ld + ld : 0);
    const size_t of_integers = job.integers ? block + d + ld : 0;
    float* at = reserve_scratch(job.task_tiles * of_tile + 2 * BLOCK_KEYS * ld + 2 * ld + 2 * block + of_integers);
    if (at == nullptr) return false;
    const auto take = [&at](size_t floats) {
        float* const taken = at;
        at += floats;
        return taken;
    };
    for (int t = 0; t < job.task_tiles; ++t) {
        w.tile[t].query = take(d * ld);
        w.tile[t].out = take(d * ld);
        w.tile[t].maximum = take(ld);
        w.tile[t].sum = take(ld);
        if (job.integers) w.tile[t].integers = {take(d / 2 * ld), take(ld), 0.0f, 0.0f, 0};
    }
    w.scores = take(BLOCK_KEYS * ld);
    w.pairs = take(BLOCK_KEYS * ld);
    w.rescale = take(ld);
    w.block_max = take(ld);
    w.key = take(block);
    w.value = take(block);
    if (job.integers) {
        w.integers = {(int16_t*)take(block / 2), take(block / 2), take(d), 0.0f, 0.0f, 0.0f};
        w.gain = take(ld);
    }
    return true;
}

template <class Path>
void work(void* data) {
    Job& job = *(Job*)data;
    ThreadWorkspace w;
    if (!arrange(job, w)) {
        __atomic_store_n(&job.out_of_memory, 1, __ATOMIC_RELAXED);
        return;
    }
    [[maybe_unused]] const typename Path::Session session;
    for (;;) {
        const int64_t task = __atomic_fetch_add(&job.next_task, 1, __ATOMIC_RELAXED);
        if (task >= job.tasks) return;
        const int64_t space = task % job.row_spaces;
        int64_t part = task / job.row_spaces;
        int64_t first_key = 0, last_key = job.problem->seqlen_k;
        if (job.parts > 1) {
            first_key = part * job.part_keys;
            last_key = smaller(last_key, first_key + job.part_keys);
        } else if (job.causal) {
            // Later queries of a causal mask see more keys: longest tasks first.
            part = job.tasks_per_space - 1 - part;
        }
        if (job.few)
            run_few<typename Path::Element>(job, w.decode, space, part, first_key, last_key);
        else
            run_task<Path>(job, w, space, part, first_key, last_key);
    }
}

// Bytes of this processor's second-level cache.
int64_t second_level_cache() {
    static int64_t bytes = 0;
    int64_t size = __atomic_load_n(&bytes, __ATOMIC_RELAXED);
    if (size == 0) {
#ifdef _SC_LEVEL2_CACHE_SIZE
        size = sysconf(_SC_LEVEL2_CACHE_SIZE);
#endif
        if (size <= 0) size = USUAL_CACHE;
        __atomic_store_n(&bytes, size, __ATOMIC_RELAXED);
    }
    return size;
}

// As many queries as have room, with their outputs, in half of the second-level cache.
int64_t most_queries(const Job& job) {
    const int64_t fitting = second_level_cache() / 2 / (job.problem->head_dim * 2 * (int64_t)sizeof(float));
    const int64_t most = smaller<int64_t>(MAX_DENSE_TASK_QUERIES, larger<int64_t>(fitting, MAX_TASK_QUERIES));
    return WIDE_COLUMNS > MAX_COLUMNS && job.wide ? up_to_multiple(most, WIDE_TILE_QUERIES) : most;
}

// How many tiles a task has without a mask: every task reads and prepares the blocks of its keys anew, so few are better
// than many, if they keep all threads at work.
int tiles_of_task(const Job& job, int64_t tiles, int most, int threads) {
    int best = 1;
    int64_t least = INT64_MAX;
    for (int each = 1; each <= most; ++each) {
        const int64_t tasks = (tiles + each - 1) / each * job.row_spaces;
        const int64_t time = (tasks + threads - 1) / threads * (each * job.tile_queries + QUERIES_PER_BLOCK);
        if (time <= least) {
            least = time;
            best = each;
        }
    }
    return best;
}

// Whether whole tiles are wide: by the shape alone, as the bits beside a diagonal go by the whole tile. Integers take two vectors.
bool takes_wide_tiles(const Job& job) {
    return !job.integers && job.rows >= MIN_WIDE_ROWS && job.rows * job.row_spaces >= MIN_WIDE_QUERIES;
}

// Tile and task sizes: full tiles where there are enough of them for every thread, narrower ones where not.
int divide(Job& job, int threads) {
    const AttentionProblem& p = *job.problem;
    const double pairs = (double)p.seqlen_q * p.seqlen_k * (job.causal ? 0.5 : 1.0);
    if ((double)p.batch * p.heads * pairs * p.head_dim * 2 < MIN_PARALLEL_WORK) threads = 1;
    const int whole = whole_tile(job);
    int tile = (int)smaller<int64_t>(whole, up_to_multiple(job.rows, W));
    job.part_keys = keys_of_part(job);
    job.parts = larger<int64_t>(1, (p.seqlen_k + job.part_keys - 1) / job.part_keys);
    if (job.parts > 1) {
        job.tile_queries = tile;
        job.task_tiles = (int)((job.rows + tile - 1) / tile);
        job.tasks_per_space = 1;
        job.tasks = job.parts * job.row_spaces;
        return (int)smaller<int64_t>(threads, job.tasks);
    }
    const int64_t wanted = (threads + job.row_spaces - 1) / job.row_spaces;
    if ((NARROW_INTEGER_TILES || !job.integers) && (job.rows + tile - 1) / tile < wanted) {
        tile = smaller(tile, up_to_multiple((job.rows + wanted - 1) / wanted, W));
        while (whole % tile != 0) tile -= W;  // see vectors_before
    }
    job.tile_queries = tile;
    const int64_t tiles = (job.rows + tile - 1) / tile;
    const int64_t each = tiles * job.row_spaces / threads;
    int64_t shared = larger(each / (job.causal ? 4 : 2), smaller<int64_t>(each, MIN_TASK_QUERIES / tile));
    // Integers are made of a block for each task, so that few tasks are worth more than even ones.
    if (job.integers && !job.causal) shared = tiles;
    const int64_t room = smaller<int64_t>(most_queries(job) / tile, MAX_DENSE_TASK_TILES);
    const int most = (int)larger<int64_t>(1, smaller(smaller(shared, tiles), room));
    job.task_tiles = job.causal ? most : tiles_of_task(job, tiles, most, threads);
    job.tasks_per_space = (tiles + job.task_tiles - 1) / job.task_tiles;
    job.tasks = job.tasks_per_space * job.row_spaces;
    return (int)smaller<int64_t>(threads, job.tasks);
}

}  // namespace

// lse may be null; else it is contiguous (batch, heads, seqlen_q). After OUT_OF_MEMORY (a thread could not allocate
// its scratch memory) the output is undefined; after NULL_TENSOR nothing was touched.
EXPORTED int flashmoe_attention_forward(
    const AttentionProblem* problem, const void* query, const void* key, const void* value, void* out, float* lse,
    int threads) {
    const AttentionProblem& p = *problem;
    if (p.batch == 0 || p.heads == 0 || p.seqlen_q == 0) return SUCCESS;
    if (!query || !out || (p.seqlen_k > 0 && (!key || !value))) return NULL_TENSOR;
    Job job;
    job.problem = problem;
    job.query = (const char*)query;
    job.key = (const char*)key;
    job.value = (const char*)value;
    job.out = (char*)out;
    job.lse = lse;
    // A scale of 0 makes the scores 0 (NaN where they are not finite), but masked ones stay minus infinity: it goes into
    // the queries.
    job.scale = p.softmax_scale == 0 ? 1.0f : (float)(fabs(p.softmax_scale) * LOG2_E);
    job.query_factor = p.softmax_scale < 0 ? -1.0f : p.softmax_scale == 0 ? 0.0f : 1.0f;
    // One query, aligned bottom-right, sees every key.
    job.causal = p.causal && p.seqlen_q > 1;
    const int64_t group = p.heads / p.kv_heads;
    job.fold = !job.causal && p.seqlen_q < FOLD_QUERIES ? group : 1;
    job.rows = job.fold * p.seqlen_q;
    job.row_spaces = p.batch * p.heads / job.fold;
    job.next_task = 0;
    job.out_of_memory = 0;
    job.integers = takes_integers(job);
    job.few = takes_few(job);
    if constexpr (WIDE_COLUMNS > MAX_COLUMNS) job.wide = takes_wide_tiles(job);
    threads = divide(job, threads);
    void* memory = nullptr;
    if (job.parts > 1) {
        const size_t floats = job.row_spaces * job.parts * part_floats(job);
        if (posix_memalign(&memory, 64, floats * sizeof(float) + job.row_spaces * sizeof(int)) != 0) return OUT_OF_MEMORY;
        job.part_sums = (float*)memory;
        job.parts_done = (int*)(job.part_sums + floats);
        memset(job.parts_done, 0, job.row_spaces * sizeof(int));
    }
    run_on_threads(for_element(p.element_type, work<DirectPath>, work<BFloat16Path>, work<WidenPath<Half>>), &job, threads);
    free(memory);
    return job.out_of_memory ? OUT_OF_MEMORY : SUCCESS;
}

PYTHON_METHOD(flashmoe_attention_method, "attention_forward", PythonCall<flashmoe_attention_forward>::call)

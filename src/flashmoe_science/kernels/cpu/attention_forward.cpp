// Exact attention, forward, with online softmax: out = softmax(softmax_scale * Q K^T) V, never holding the scores
// of more than one tile.
//
// A tile is up to 64 queries of one head (or, where few queries share a key/value head, of its whole group).
// Queries lie in vector lanes, so S^T = K Q^T and O^T = V^T P^T read K and V row-major, in place, by broadcast,
// and maxima and sums over keys are vertical. Key blocks are visited in order; each block's P V starts from zero
// and is added to the rescaled output, which also makes the summation blocked. Only Q and O are transposed, once
// a tile. A task is one or more tiles of the same head that share each prepared key block.
//
// How the three element types run:
//   fp32           multiply-adds on the user's K and V (copied block by block if their rows are far apart)
//   bf16           AVX512-BF16 dot products of pairs: along d for scores, along keys for the output
//   fp16 (bf16)    blocks of K and V widened to fp32, then as fp32
//
// Causal masks align bottom-right. Blocks above the diagonal are skipped; in a block on the diagonal each vector of
// queries stops after its last visible key. A row without keys gives zeros and a log-sum-exp of minus infinity.
//
// NaN and infinities spread as in the exact formula: weights of masked keys are exact zeros, and where a block on
// the diagonal holds a value that is not finite (0 * NaN), only visible products are summed.

#include <math.h>
#include <stdlib.h>

#include "gemm.h"
#include "layout.h"
#include "parallel.h"
#include "python_call.h"
#include "softmax.h"

enum ElementType : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

// Mirrored by flashmoe_science.cpu. Strides are in bytes, for (batch, head, row).
struct AttentionProblem {
    int64_t element_type;
    int64_t batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim;
    int64_t query_stride[3], key_stride[3], value_stride[3], out_stride[3];
    int64_t causal;
    double softmax_scale;
};

namespace {

constexpr int TILE_QUERIES = 64;
constexpr int BLOCK_KEYS = 64;
constexpr int MAX_TASK_TILES = 4;
constexpr int64_t NO_DIAGONAL = INT64_MAX / 4;
// Below this many multiply-adds waking another thread costs more than it saves.
constexpr double MIN_PARALLEL_WORK = 2e5;
constexpr double LOG2_E = 1.4426950408889634;

constexpr int up_to_multiple(int64_t x, int of) { return (int)((x + of - 1) / of * of); }
template <class T>
constexpr T smaller(T a, T b) { return a < b ? a : b; }
template <class T>
constexpr T larger(T a, T b) { return a > b ? a : b; }

struct Job {
    const AttentionProblem* problem;
    const char *query, *key, *value;
    char* out;
    float* lse;
    float scale;          // |softmax_scale| * log2(e)
    bool negate;          // softmax_scale < 0: the sign goes into the queries
    bool causal;
    int64_t fold;         // query heads whose rows share one row space: 1, or the group size
    int64_t rows;         // rows in one row space: fold * seqlen_q
    int64_t row_spaces;
    int tile_queries;     // a multiple of W
    int task_tiles;
    int64_t tasks_per_space;
    int64_t tasks;
    int64_t next_task;
    int out_of_memory;
};

struct Tile {
    int64_t first_row;
    int rows;
    int64_t keys;      // keys that its last row sees
    int64_t diagonal;  // the last key that row 0 sees, and row i sees i more; NO_DIAGONAL without a mask
    float *query, *out, *maximum, *sum;  // [head_dim][ld], [head_dim][ld], [ld], [ld]
    const char* query_row[TILE_QUERIES];
    char* out_row[TILE_QUERIES];
};

// What tiles of a task share.
struct Workspace {
    Tile tile[MAX_TASK_TILES];
    float *scores, *pairs, *rescale, *block_max, *key, *value;
};

// Keys [first, first + count) as the products read them.
struct KeyBlock {
    int64_t first;
    int count;
    const char *key, *value;
    ptrdiff_t key_row, value_row;
    const char* raw_value;
};

struct ScoreEpilogue {
    float* s;
    ptrdiff_t ld;
    template <int R, int C>
    __attribute__((always_inline)) void store(int row, int column, const F acc[R][C]) const {
        float* to = s + row * ld + column * W;
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) ::store(to + r * ld + c * W, acc[r][c]);
    }
};

struct ScoreAndMaximumEpilogue {
    float* s;
    ptrdiff_t ld;
    float* block_max;
    template <int R, int C>
    __attribute__((always_inline)) void store(int row, int column, const F acc[R][C]) const {
        ScoreEpilogue{s, ld}.store<R, C>(row, column, acc);
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
            F highest = load(block_max + (column + c) * W);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) highest = max(acc[r][c], highest);
            ::store(block_max + (column + c) * W, highest);
        }
    }
};

struct OutputEpilogue {
    float* out;
    ptrdiff_t ld;
    const float* rescale;  // null: what is there already stays as it is
    template <int R, int C>
    __attribute__((always_inline)) void store(int row, int column, const F acc[R][C]) const {
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
            const F factor = rescale ? load(rescale + (column + c) * W) : set1(1.0f);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                float* to = out + (row + r) * ld + (column + c) * W;
                ::store(to, madd(load(to), factor, acc[r][c]));
            }
        }
    }
};

// fp32 from the user's memory.
struct DirectPath {
    typedef float Element;
    typedef FloatProduct Product;
    static constexpr bool PAIRS = false;

    static void prepare(const Job& job, const Workspace& w, KeyBlock& block) {
        const int d = (int)job.problem->head_dim;
        // Rows a multiple of a large power of two apart would share a few sets of the first-level cache.
        if (block.key_row != d * 4) {
            widen_rows<float>(block.key, block.key_row, block.count, d, w.key);
            block.key = (const char*)w.key;
            block.key_row = d * 4;
        }
        if (block.value_row != d * 4) {
            widen_rows<float>(block.value, block.value_row, block.count, d, w.value);
            block.value = (const char*)w.value;
            block.value_row = d * 4;
        }
    }
};

// 16-bit elements through fp32.
template <class T>
struct WidenPath {
    typedef T Element;
    typedef FloatProduct Product;
    static constexpr bool PAIRS = false;

    static void prepare(const Job& job, const Workspace& w, KeyBlock& block) {
        const int d = (int)job.problem->head_dim;
        widen_rows<T>(block.key, block.key_row, block.count, d, w.key);
        widen_rows<T>(block.value, block.value_row, block.count, d, w.value);
        block.key = (const char*)w.key;
        block.value = (const char*)w.value;
        block.key_row = block.value_row = d * 4;
    }
};

#ifdef __AVX512BF16__
struct PairPath {
    typedef BFloat16 Element;
    typedef PairProduct Product;
    static constexpr bool PAIRS = true;

    static void prepare(const Job& job, const Workspace& w, KeyBlock& block) {
        const int d = (int)job.problem->head_dim;
        interleave_rows(block.value, block.value_row, block.count, d, w.value);
        block.value = (const char*)w.value;
        block.value_row = d * 4;
    }
};
typedef PairPath BFloat16Path;
#else
typedef WidenPath<BFloat16> BFloat16Path;
#endif

// How many keys of the block the vector of queries `column` sees at most (its last lane does).
int visible(const Tile& tile, const KeyBlock& block, int column) {
    return (int)larger<int64_t>(0, smaller<int64_t>(tile.diagonal + (column + 1) * W - block.first, block.count));
}

// Masks the scores of a block on the diagonal and finds their maximum.
void mask_scores(const Tile& tile, const KeyBlock& block, float* s, ptrdiff_t ld, int columns, float* block_max) {
    for (int c = 0; c < columns; ++c) {
        F highest = set1(-__builtin_inff());
        const int64_t lane_of_block = block.first - tile.diagonal - c * W;
        const int keys = visible(tile, block, c);
        float* at = s + c * W;
        for (int k = 0; k < keys; ++k, at += ld) {
            F x = load(at);
            if (lane_of_block + k > 0) {
                x = keep_from(x, (int)(lane_of_block + k));
                store(at, x);
            }
            highest = max(x, highest);
        }
        store(block_max + c * W, highest);
    }
}

template <class Path>
void weigh_block(const Job& job, const Workspace& w, const Running& running, int keys, int first, int last, int ld) {
    if constexpr (Path::PAIRS) {
#ifdef __AVX512BF16__
        for (; first + 2 <= last; first += 2)
            weigh_pairs<2>(w.scores, w.pairs, ld, keys, first, w.block_max, running, job.scale);
        if (first < last) weigh_pairs<1>(w.scores, w.pairs, ld, keys, first, w.block_max, running, job.scale);
#endif
    } else {
        if constexpr (MAX_COLUMNS == 4)
            for (; first + 4 <= last; first += 4)
                weigh<4>(w.scores, ld, keys, first, w.block_max, running, job.scale);
        for (; first + 2 <= last; first += 2)
            weigh<2>(w.scores, ld, keys, first, w.block_max, running, job.scale);
        if (first < last) weigh<1>(w.scores, ld, keys, first, w.block_max, running, job.scale);
    }
}

// The output of a block on the diagonal whose values are not all finite: only visible products, one by one.
template <class Path>
void add_visible_products(const Job& job, const Workspace& w, const Tile& tile, const KeyBlock& block, int ld) {
    typedef typename Path::Element Element;
    const int head_dim = (int)job.problem->head_dim;
    const ptrdiff_t row = job.problem->value_stride[2];
    for (int i = 0; i < tile.rows; ++i) {
        if (visible(tile, block, i / W) == 0) continue;
        const int keys = (int)larger<int64_t>(0, smaller<int64_t>(tile.diagonal + i + 1 - block.first, block.count));
        for (int d = 0; d < head_dim; ++d) {
            float total = 0.0f;
            for (int k = 0; k < keys; ++k) {
                float weight;
                if constexpr (Path::PAIRS) {
                    const BFloat16* pair = (const BFloat16*)(w.pairs + (k / 2) * ld + i);
                    weight = widen(pair[k % 2]);
                } else {
                    weight = w.scores[k * ld + i];
                }
                total += weight * widen(((const Element*)(block.raw_value + k * row))[d]);
            }
            float* out = tile.out + d * ld + i;
            *out = *out * w.rescale[i] + total;
        }
    }
}

template <class Path>
void attend(const Job& job, const Workspace& w, const Tile& tile, const KeyBlock& block, int columns, int ld) {
    typedef typename Path::Product Product;
    typedef typename Path::Element Element;
    const int head_dim = (int)job.problem->head_dim;
    const int depth = Path::PAIRS ? head_dim / 2 : head_dim;
    const Running running = {tile.maximum, tile.sum, w.rescale};
    const bool diagonal = block.first + block.count - 1 > tile.diagonal;

    if (!diagonal) {
        for (int c = 0; c < columns; ++c) store(w.block_max + c * W, set1(-__builtin_inff()));
        multiply<Product>(
            block.key, block.key_row, 4, block.count, tile.query, ld, depth, 0, columns,
            ScoreAndMaximumEpilogue{w.scores, ld, w.block_max});
        weigh_block<Path>(job, w, running, block.count, 0, columns, ld);
    } else {
        // Rectangles: each further vector of queries sees W more keys.
        for (int c = 0, from = 0; c < columns; ++c) {
            const int to = visible(tile, block, c);
            if (to == from) continue;
            multiply<Product>(
                block.key + from * block.key_row, block.key_row, 4, to - from, tile.query, ld, depth, c, columns,
                ScoreEpilogue{w.scores + from * ld, ld});
            from = to;
        }
        mask_scores(tile, block, w.scores, ld, columns, w.block_max);
        for (int c = 0; c < columns; ++c) {
            const int keys = visible(tile, block, c);
            if (keys > 0) weigh_block<Path>(job, w, running, keys, c, c + 1, ld);
        }
        if (has_nonfinite<Element>(block.raw_value, job.problem->value_stride[2], block.count, head_dim)) {
            add_visible_products<Path>(job, w, tile, block, ld);
            return;
        }
    }

    const float* weights = Path::PAIRS ? w.pairs : w.scores;
    const int step = Path::PAIRS ? 2 : 1;
    const float* rescale = w.rescale;
    for (int c = 0, from = 0; c < columns && from < block.count; ++c) {
        const int to = diagonal ? up_to_multiple(visible(tile, block, c), step) : up_to_multiple(block.count, step);
        if (to == from) continue;
        multiply<Product>(
            block.value + from / step * block.value_row, 4, block.value_row, head_dim, weights + from / step * ld, ld,
            (to - from) / step, c, columns, OutputEpilogue{tile.out, ld, rescale});
        rescale = nullptr;
        from = to;
    }
}

template <class Path>
void start_tile(const Job& job, Tile& tile, const char* query, char* out, int columns, int ld) {
    const AttentionProblem& p = *job.problem;
    const int head_dim = (int)p.head_dim;
    for (int i = 0; i < tile.rows; ++i) {
        const int64_t row = tile.first_row + i;
        const int64_t head = job.fold > 1 ? row / p.seqlen_q : 0;
        const int64_t position = row - head * p.seqlen_q;
        tile.query_row[i] = query + head * p.query_stride[1] + position * p.query_stride[2];
        tile.out_row[i] = out + head * p.out_stride[1] + position * p.out_stride[2];
    }
    const int64_t offset = p.seqlen_k - p.seqlen_q;
    tile.diagonal = job.causal ? tile.first_row + offset : NO_DIAGONAL;
    tile.keys = larger<int64_t>(0, smaller<int64_t>(p.seqlen_k, tile.diagonal + tile.rows));
    memset(tile.out, 0, sizeof(float) * head_dim * ld);
    for (int i = 0; i < ld; ++i) {
        tile.maximum[i] = -__builtin_inff();
        tile.sum[i] = 0.0f;
    }
    if constexpr (Path::PAIRS) {
#ifdef __AVX512BF16__
        load_query_pairs(tile.query_row, tile.rows, head_dim, job.negate, tile.query, ld, columns);
#endif
    } else {
        load_queries<typename Path::Element>(
            tile.query_row, tile.rows, head_dim, job.negate ? -1.0f : 1.0f, tile.query, ld, columns);
    }
}

template <class Path>
void finish_tile(const Job& job, const Workspace& w, const Tile& tile, float* lse, int columns, int ld) {
    float* factor = w.rescale;
    for (int c = 0; c < columns; ++c) store(factor + c * W, div(set1(1.0f), load(tile.sum + c * W)));
    // Rows before the diagonal reaches the first key see none.
    const int64_t empty = job.problem->seqlen_k == 0 ? tile.rows : -tile.diagonal;
    for (int i = 0; i < tile.rows && i < empty; ++i) factor[i] = 0.0f;
    store_outputs<typename Path::Element>(
        tile.out, ld, factor, tile.out_row, tile.rows, (int)job.problem->head_dim, columns);
    if (lse == nullptr) return;
    const double to_natural = (double)job.scale / LOG2_E;
    for (int i = 0; i < tile.rows; ++i) {
        const bool has_keys = i >= empty;
        lse[tile.first_row + i] =
            has_keys ? (float)(tile.maximum[i] * to_natural + log((double)tile.sum[i])) : -__builtin_inff();
    }
}

template <class Path>
void run_task(const Job& job, Workspace& w, int64_t task) {
    const AttentionProblem& p = *job.problem;
    // Later queries of a causal mask see more keys: longest tasks first.
    const int64_t space = task % job.row_spaces;
    int64_t part = task / job.row_spaces;
    if (job.causal) part = job.tasks_per_space - 1 - part;
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

    int tiles = 0;
    int64_t keys = 0;
    const int64_t end = smaller(job.rows, (part + 1) * task_rows);
    for (int64_t row = part * task_rows; row < end; row += job.tile_queries, ++tiles) {
        Tile& tile = w.tile[tiles];
        tile.first_row = row;
        tile.rows = (int)smaller<int64_t>(job.tile_queries, end - row);
        start_tile<Path>(job, tile, query, out, up_to_multiple(tile.rows, W) / W, ld);
        keys = larger(keys, tile.keys);
    }
    for (int64_t first = 0; first < keys; first += BLOCK_KEYS) {
        KeyBlock block;
        block.first = first;
        block.count = (int)smaller<int64_t>(BLOCK_KEYS, keys - first);
        block.key = key + first * p.key_stride[2];
        block.value = block.raw_value = value + first * p.value_stride[2];
        block.key_row = p.key_stride[2];
        block.value_row = p.value_stride[2];
        Path::prepare(job, w, block);
        for (int t = 0; t < tiles; ++t)
            if (first < w.tile[t].keys)
                attend<Path>(job, w, w.tile[t], block, up_to_multiple(w.tile[t].rows, W) / W, ld);
    }
    float* lse = job.lse ? job.lse + (batch * p.heads + head) * p.seqlen_q : nullptr;
    for (int t = 0; t < tiles; ++t)
        finish_tile<Path>(job, w, w.tile[t], lse, up_to_multiple(w.tile[t].rows, W) / W, ld);
}

// One buffer a thread, kept between calls and freed when the thread ends.
struct Scratch {
    void* memory;
    size_t bytes;
};
thread_local Scratch scratch;
pthread_key_t scratch_key;
pthread_once_t scratch_once = PTHREAD_ONCE_INIT;

void make_scratch_key() { pthread_key_create(&scratch_key, free); }

float* reserve_scratch(size_t floats) {
    const size_t bytes = floats * sizeof(float);
    if (bytes > scratch.bytes) {
        pthread_once(&scratch_once, make_scratch_key);
        void* memory = nullptr;
        if (posix_memalign(&memory, 64, bytes) != 0) return nullptr;
        free(scratch.memory);
        scratch.memory = memory;
        scratch.bytes = bytes;
        pthread_setspecific(scratch_key, memory);
    }
    return (float*)scratch.memory;
}

bool arrange(const Job& job, Workspace& w) {
    const size_t ld = job.tile_queries;
    const size_t d = job.problem->head_dim;
    const size_t block = BLOCK_KEYS * d;
    float* at = reserve_scratch(job.task_tiles * (2 * d * ld + 2 * ld) + 2 * BLOCK_KEYS * ld + 2 * ld + 2 * block);
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
    }
    w.scores = take(BLOCK_KEYS * ld);
    w.pairs = take(BLOCK_KEYS * ld);
    w.rescale = take(ld);
    w.block_max = take(ld);
    w.key = take(block);
    w.value = take(block);
    return true;
}

template <class Path>
void work(void* data) {
    Job& job = *(Job*)data;
    Workspace w;
    if (!arrange(job, w)) {
        __atomic_store_n(&job.out_of_memory, 1, __ATOMIC_RELAXED);
        return;
    }
    for (;;) {
        const int64_t task = __atomic_fetch_add(&job.next_task, 1, __ATOMIC_RELAXED);
        if (task >= job.tasks) return;
        run_task<Path>(job, w, task);
    }
}

// Tile and task sizes: full tiles where there are enough of them for every thread, narrower ones where not.
int divide(Job& job, int threads) {
    const AttentionProblem& p = *job.problem;
    const double pairs = (double)p.seqlen_q * p.seqlen_k * (job.causal ? 0.5 : 1.0);
    if ((double)p.batch * p.heads * pairs * p.head_dim * 2 < MIN_PARALLEL_WORK) threads = 1;
    int tile = (int)smaller<int64_t>(TILE_QUERIES, up_to_multiple(job.rows, W));
    const int64_t wanted = (threads + job.row_spaces - 1) / job.row_spaces;
    if ((job.rows + tile - 1) / tile < wanted)
        tile = smaller(tile, up_to_multiple((job.rows + wanted - 1) / wanted, W));
    job.tile_queries = tile;
    const int64_t tiles = (job.rows + tile - 1) / tile;
    const int64_t shared = tiles * job.row_spaces / (threads * (job.causal ? 4 : 2));
    job.task_tiles = (int)larger<int64_t>(1, smaller<int64_t>(smaller<int64_t>(shared, tiles), MAX_TASK_TILES));
    job.tasks_per_space = (tiles + job.task_tiles - 1) / job.task_tiles;
    job.tasks = job.tasks_per_space * job.row_spaces;
    return (int)smaller<int64_t>(threads, job.tasks);
}

}  // namespace

// Returns 0, or 1 if a thread could not allocate its scratch memory (the output is then undefined).
// lse may be null; else it is contiguous (batch, heads, seqlen_q).
extern "C" __attribute__((visibility("default"))) int flashmoe_attention_forward(
    const AttentionProblem* problem, const void* query, const void* key, const void* value, void* out, float* lse,
    int threads) {
    const AttentionProblem& p = *problem;
    if (p.batch == 0 || p.heads == 0 || p.seqlen_q == 0) return 0;
    Job job;
    job.problem = problem;
    job.query = (const char*)query;
    job.key = (const char*)key;
    job.value = (const char*)value;
    job.out = (char*)out;
    job.lse = lse;
    job.scale = (float)(fabs(p.softmax_scale) * LOG2_E);
    job.negate = p.softmax_scale < 0;
    // One query, aligned bottom-right, sees every key.
    job.causal = p.causal && p.seqlen_q > 1;
    const int64_t group = p.heads / p.kv_heads;
    job.fold = !job.causal && p.seqlen_q < TILE_QUERIES ? group : 1;
    job.rows = job.fold * p.seqlen_q;
    job.row_spaces = p.batch * p.heads / job.fold;
    job.next_task = 0;
    job.out_of_memory = 0;
    threads = divide(job, threads);
    switch (p.element_type) {
        case FLOAT32: run_on_threads(work<DirectPath>, &job, threads); break;
        case BFLOAT16: run_on_threads(work<BFloat16Path>, &job, threads); break;
        case FLOAT16: run_on_threads(work<WidenPath<Half>>, &job, threads); break;
    }
    return job.out_of_memory;
}

// The same as a Python function of seven integers: the addresses above (0 for no lse) and the number of threads.
// Raises MemoryError. Other Python threads run meanwhile.
static PyObject* attention_forward_call(PyObject*, PyObject* const* arguments, intptr_t count) {
    constexpr int COUNT = 7;
    void* value[COUNT] = {};
    for (int i = 0; i < COUNT && i < count; ++i) value[i] = PyLong_AsVoidPtr(arguments[i]);
    if (PyErr_Occurred()) return nullptr;
    void* const state = PyEval_SaveThread();
    const int failed = flashmoe_attention_forward(
        (const AttentionProblem*)value[0], value[1], value[2], value[3], value[4], (float*)value[5],
        (int)(intptr_t)value[6]);
    PyEval_RestoreThread(state);
    return failed ? PyErr_NoMemory() : PyLong_FromLong(0);
}

// A PyMethodDef, for PyCFunction_NewEx.
extern "C" __attribute__((visibility("default"))) PyMethodDef flashmoe_attention_method = {
    "attention_forward", attention_forward_call, METH_FASTCALL, nullptr};

// Mixture of experts, forward: out[t] = sum over j of weight[t][j] * (w2[e] act(w13[e] x[t] + b13[e]) + b2[e]), e = id[t][j];
// biases only where they are given.
//
// Slots (a token and one of its choices) are sorted by expert. Two products follow, each row of weights with every token
// that chose its expert: the first writes activated intermediate values, in the tensors' type and in sorted order, the
// second each slot's result, in the tensors' type. The combination then reads a token's k results. All sums are in fp32
// and in an order that does not depend on the number of threads.
//
// Weights of 8 or 4 bits with scales of groups (quantized.h) are compiled from this file with WEIGHT_BITS set.
//
// Tokens are taken in chunks, and threads take tasks from a counter: docs/kernels/moe-cpu.md. Where there is a matrix unit,
// bf16 goes there as moe_amx.h says.

#include <stdlib.h>

#include "quantized_integers.h"

// Bits of a weight; 0: weights have the tokens' type.
#ifndef WEIGHT_BITS
#define WEIGHT_BITS 0
#endif
#if WEIGHT_BITS == 8
typedef Int8Weights WeightsOf;
#elif WEIGHT_BITS == 4
typedef Int4Weights WeightsOf;
#endif

#include "activation.h"
#include "dot.h"
#include "moe_amx.h"
#include "moe_job.h"
#include "parallel.h"
#include "python_call.h"

namespace {

// What a thread has while it takes tasks: nothing.
struct NoWorker {
    explicit NoWorker(const Job&) {}
    bool can_work(const Job&) const { return true; }
};

// How rows of weights of the tokens' type are multiplied with tokens.
template <class Dot>
struct PlainRows {
    typedef NoWorker Worker;
    static constexpr bool TILED = false;
    typedef typename Dot::Element Element;
    static constexpr int BITS = 8 * sizeof(Element);
    static constexpr bool PREPARES = false;
    static int64_t token_bytes(int64_t depth) { return depth * sizeof(Element); }
    // Rows first, first + step, ... of the matrix. The thread multiplies row `next` after them.
    static void multiply(
        const Matrix& matrix, int64_t first, int64_t step, int64_t rows, int64_t, const char* const* tokens, int count,
        int64_t depth, float* out) {
        dot_rows<Dot>(
            matrix.data + first * matrix.row_bytes, step * matrix.row_bytes, (int)rows, tokens, count, (int)depth, out,
            TASK_ROWS);
    }
};

template <class T>
WeightRows<T> rows_of(const Matrix& matrix, int64_t first, int64_t step, int64_t rows, int64_t next) {
    return {
        matrix.data + first * matrix.row_bytes, matrix.data + next * matrix.row_bytes, step * matrix.row_bytes,
        (const T*)matrix.scales + first * matrix.groups, (const T*)matrix.scales + next * matrix.groups,
        step * matrix.groups, (int)rows};
}

template <class Weights, class T>
struct QuantizedRows {
    typedef NoWorker Worker;
    static constexpr bool TILED = false;
    typedef T Element;
    static constexpr int BITS = Weights::BITS;
    static constexpr bool PREPARES = false;
    static int64_t token_bytes(int64_t depth) { return depth * sizeof(Element); }
    static void multiply(
        const Matrix& matrix, int64_t first, int64_t step, int64_t rows, int64_t next, const char* const* tokens, int count,
        int64_t depth, float* out) {
        quantized_rows<Weights, T>(
            rows_of<T>(matrix, first, step, rows, next), tokens, count, (int)depth, (int)(depth / matrix.groups), out,
            TASK_ROWS);
    }
};

#if HAS_INTEGER_ROWS
template <class T>
struct IntegerRows {
    typedef NoWorker Worker;
    static constexpr bool TILED = false;
    typedef T Element;
    static constexpr int BITS = Int4Weights::BITS;
    static constexpr bool PREPARES = true;
    static int64_t token_bytes(int64_t depth) { return (depth + INTEGER_STEP - 1) / INTEGER_STEP * sizeof(TokenStep<T>); }
    // `count` token rows, to rows of token_bytes.
    static void prepare(const Matrix& matrix, const char* from, int64_t count, int64_t depth, char* to) {
        for (int64_t i = 0; i < count; ++i)
            prepare_token(
                (const T*)from + i * depth, (TokenStep<T>*)(to + i * token_bytes(depth)), (int)depth,
                (int)(depth / matrix.groups));
    }
    static void multiply(
        const Matrix& matrix, int64_t first, int64_t step, int64_t rows, int64_t next, const char* const* tokens, int count,
        int64_t depth, float* out) {
        integer_rows<T>(
            rows_of<T>(matrix, first, step, rows, next), tokens, count, (int)depth, (int)(depth / matrix.groups), out,
            TASK_ROWS);
    }
};
#endif

#if WEIGHT_BITS
template <class T>
using RowsOf = QuantizedRows<WeightsOf, T>;
typedef RowsOf<BFloat16> BFloat16DotRows;
#else
template <class T>
using RowsOf = PlainRows<WidenDot<T>>;
typedef PlainRows<BFloat16Dot> BFloat16DotRows;
#endif
#if HAS_AMX
// Groups of a few tokens by dot products, others on the matrix unit.
struct BFloat16Rows : BFloat16DotRows {
    typedef AmxWorker Worker;
    static constexpr bool TILED = true;
};
#else
typedef BFloat16DotRows BFloat16Rows;
#endif

// Rows of the first product to z, their columns in the order of w13's rows.
template <class Element>
void keep_projected(
    const Job& job, const Part& part, int64_t z_row, const float* gate, const float* up, int count) {
    const MoeProblem& p = *job.problem;
    const bool gated = is_gated(p.activation);
    const int64_t columns = p.intermediate * (gated ? 2 : 1);
    for (int i = 0; i < count; ++i) {
        Element* const to = (Element*)job.z + (z_row + i) * columns;
        const float* const a = gate + i * TASK_ROWS;
        const float* const b = up + i * TASK_ROWS;
        if (gated && p.interleaved) {
            float both[2 * TASK_ROWS];
            for (int r = 0; r < part.rows; ++r) both[2 * r] = a[r], both[2 * r + 1] = b[r];
            for (int r = 0; r < 2 * part.rows; r += W) store_first(to + 2 * part.row + r, load(both + r), W);
        } else {
            for (int r = 0; r < part.rows; r += W) store_first(to + part.row + r, load(a + r), W);
            for (int r = 0; gated && r < part.rows; r += W)
                store_first(to + p.intermediate + part.row + r, load(b + r), W);
        }
    }
}

// Bias of rows first, first + step, ... to each token's sums; no bias where `biases` is null.
template <class T>
void add_bias(const char* biases, int64_t first, int64_t step, int64_t rows, int count, float* sums) {
    if (!biases) return;
    float bias[TASK_ROWS];
    for (int r = 0; r < rows; ++r) bias[r] = widen(((const T*)biases)[first + r * step]);
    for (int i = 0; i < count; ++i)
        for (int r = 0; r < rows; ++r) sums[i * TASK_ROWS + r] += bias[r];
}

template <class Rows>
void project_up(Job& job, typename Rows::Worker& worker, int64_t task, int64_t next_task) {
    typedef typename Rows::Element Element;
    const MoeProblem& p = *job.problem;
    const Part part = part_of(job, task, p.intermediate);
    const bool gated = is_gated(p.activation);
    const int64_t row_bytes = Rows::token_bytes(p.hidden);
    const char* const rows = Rows::PREPARES ? job.prepared_tokens : job.hidden_states + job.first_token * row_bytes;
    const int64_t step = gated && p.interleaved ? 2 : 1;
    const auto first_row = [&](const Part& part) {
        return part.expert * p.intermediate * (gated ? 2 : 1) + part.row * step;
    };
    const int64_t gate = first_row(part), next = first_row(part_of(job, next_task, p.intermediate));
    const int64_t up = gate + (p.interleaved ? 1 : p.intermediate);
#if HAS_AMX
    if constexpr (Rows::TILED)
        if (takes_amx(job, part)) return project_up_on_amx(job, worker, part, gate, up, step, next);
#endif
    for (int64_t first = 0; first < part.count; first += TILE_TOKENS) {
        const int count = (int)smaller<int64_t>(TILE_TOKENS, part.count - first);
        const char* token[TILE_TOKENS];
        float projected[2][TILE_TOKENS * TASK_ROWS];
        for (int i = 0; i < count; ++i) token[i] = rows + job.slots[part.first + first + i] / p.top_k * row_bytes;
        Rows::multiply(job.w13, gate, step, part.rows, gated ? up : next, token, count, p.hidden, projected[0]);
        if (gated) Rows::multiply(job.w13, up, step, part.rows, next, token, count, p.hidden, projected[1]);
        add_bias<Element>(job.w13_bias, gate, step, part.rows, count, projected[0]);
        if (gated) add_bias<Element>(job.w13_bias, up, step, part.rows, count, projected[1]);
        if (job.z) keep_projected<Element>(job, part, part.z_row + first, projected[0], projected[1], count);
        if (!job.out) continue;
        for (int i = 0; i < count; ++i) {
            Element* const to = (Element*)(job.between + (part.between + first + i) * job.between_row) + part.row;
            for (int r = 0; r < part.rows; r += W) {
                F x = activate(p.activation, load(projected[0] + i * TASK_ROWS + r));
                if (gated) x = mul(x, factor_of(p.activation, load(projected[1] + i * TASK_ROWS + r)));
                store_first(to + r, x, W);
            }
        }
    }
}

template <class Rows>
void project_down(Job& job, [[maybe_unused]] typename Rows::Worker& worker, int64_t task, int64_t next_task) {
    typedef typename Rows::Element Element;
    const MoeProblem& p = *job.problem;
    const Part part = part_of(job, task, p.hidden);
    const int64_t row_bytes = Rows::PREPARES ? Rows::token_bytes(p.intermediate) : job.between_row;
    const char* const rows = Rows::PREPARES ? job.prepared_between : job.between;
    const Part next_part = part_of(job, next_task, p.hidden);
    const int64_t row = part.expert * p.hidden + part.row, next = next_part.expert * p.hidden + next_part.row;
#if HAS_AMX
    if constexpr (Rows::TILED)
        if (takes_amx(job, part)) return project_down_on_amx(job, worker, part, row, next);
#endif
    for (int64_t first = 0; first < part.count; first += TILE_TOKENS) {
        const int count = (int)smaller<int64_t>(TILE_TOKENS, part.count - first);
        const char* token[TILE_TOKENS];
        float projected[TILE_TOKENS * TASK_ROWS];
        for (int i = 0; i < count; ++i) token[i] = rows + (part.between + first + i) * row_bytes;
        Rows::multiply(job.w2, row, 1, part.rows, next, token, count, p.intermediate, projected);
        add_bias<Element>(job.w2_bias, row, 1, part.rows, count, projected);
        for (int i = 0; i < count; ++i) {
            Element* const to = (Element*)job.down + job.slots[part.first + first + i] * p.hidden + part.row;
            for (int r = 0; r < part.rows; r += W) store_first(to + r, load(projected + i * TASK_ROWS + r), W);
        }
    }
}

// out = sum over the choices of their weight times their result, in the order of the choices.
template <class Rows>
void combine(Job& job, NoWorker&, int64_t task, int64_t) {
    typedef typename Rows::Element Element;
    const MoeProblem& p = *job.problem;
    const int64_t last = smaller<int64_t>(job.chunk_tokens, (task + 1) * COMBINE_TOKENS);
    for (int64_t token = task * COMBINE_TOKENS; token < last; ++token) {
        const int64_t slot = token * p.top_k;
        const float* const weight = job.weights + job.first_token * p.top_k + slot;
        Element* const to = (Element*)job.out + (job.first_token + token) * p.hidden;
        for (int64_t h = 0; h < p.hidden; h += W) {
            F sum = set1(0.0f);
            for (int64_t j = 0; j < p.top_k; ++j)
                if (is_valid(job, id_of(job, slot + j)))
                    sum = madd(set1(weight[j]), load_first((const Element*)job.down + (slot + j) * p.hidden + h, W), sum);
            store_first(to + h, sum, W);
        }
    }
}

// Takes runs of neighbouring tasks, the shorter the fewer are left, so that most tasks know which is the thread's next.
template <class Worker, void (*do_task)(Job&, Worker&, int64_t, int64_t)>
void work(void* data) {
    Job& job = *(Job*)data;
    Worker worker(job);
    if (!worker.can_work(job)) return;
    int64_t first = __atomic_load_n(&job.next_task, __ATOMIC_RELAXED);
    while (first < job.tasks) {
        const int64_t last = first + larger<int64_t>(1, (job.tasks - first) / job.share);
        if (!__atomic_compare_exchange_n(&job.next_task, &first, last, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) continue;
        for (int64_t task = first; task < last; ++task) do_task(job, worker, task, smaller(task + 1, last - 1));
        first = __atomic_load_n(&job.next_task, __ATOMIC_RELAXED);
    }
}

template <class Worker, void (*do_task)(Job&, Worker&, int64_t, int64_t)>
void run(Job& job, int64_t tasks, int threads) {
    job.tasks = tasks;
    job.next_task = 0;
    const int used = (int)smaller<int64_t>(threads, tasks);
    job.share = used * SHARES;
    run_on_threads(work<Worker, do_task>, &job, used);
}

template <class Rows>
void run_chunk(Job& job, int threads) {
    typedef typename Rows::Worker Worker;
    const MoeProblem& p = *job.problem;
    job.w13.row_bytes = p.hidden * Rows::BITS / 8;
    job.w2.row_bytes = p.intermediate * Rows::BITS / 8;
    const int64_t groups = job.task[job.active];
    job.blocks = (p.intermediate + TASK_ROWS - 1) / TASK_ROWS;
    if constexpr (Rows::PREPARES)
        Rows::prepare(
            job.w13, job.hidden_states + job.first_token * p.hidden * sizeof(typename Rows::Element), job.chunk_tokens,
            p.hidden, job.prepared_tokens);
    if (groups > 0) run<Worker, project_up<Rows>>(job, groups * job.blocks, threads);
    if (!job.out) return;
    if constexpr (Rows::PREPARES)
        Rows::prepare(job.w2, job.between, job.offset[job.active], p.intermediate, job.prepared_between);
    job.blocks = (p.hidden + TASK_ROWS - 1) / TASK_ROWS;
    if (groups > 0) run<Worker, project_down<Rows>>(job, groups * job.blocks, threads);
    run<NoWorker, combine<Rows>>(job, (job.chunk_tokens + COMBINE_TOKENS - 1) / COMBINE_TOKENS, threads);
}

// Of a 16-bit type.
template <class Rows>
void run_short_chunk(Job& job, int threads) {
#if HAS_INTEGER_ROWS && WEIGHT_BITS == 4
    if (job.prepared_tokens) {
        run_chunk<IntegerRows<typename Rows::Element>>(job, threads);
        return;
    }
#endif
    run_chunk<Rows>(job, threads);
}

// Whether tokens are prepared for products in integers.
bool are_prepared(const MoeProblem& p) {
#if HAS_INTEGER_ROWS && WEIGHT_BITS == 4
#if HAS_AMX
    // Where experts have more tokens on average the matrix unit is faster.
    if (p.element_type == BFLOAT16 && p.tokens * p.top_k > MOE_AMX_LEAST_TOKENS * p.experts) return false;
#endif
    return p.element_type != FLOAT32 && p.tokens <= MOST_PREPARED_TOKENS && is_integer_group(p.w13_group) &&
           is_integer_group(p.w2_group);
#else
    return false;
#endif
}

// Whether groups may go to the matrix unit.
bool have_columns(const MoeProblem& p, int64_t slots) {
#if HAS_AMX
    return p.element_type == BFLOAT16 && slots >= MOE_AMX_LEAST_TOKENS && !are_prepared(p);
#else
    return false;
#endif
}

// How `between` lies, for so many slots; the bytes that it takes. With columns this thread has what it packs tokens in; less
// than zero: there is no memory for that.
int64_t arrange_between(Job& job, int64_t slots, int64_t size) {
    const MoeProblem& p = *job.problem;
    job.between_row = p.intermediate * size;
    job.columns = have_columns(p, slots);
    if (!job.columns) return slots * job.between_row;
#if HAS_AMX
    job.between_row = panel_pairs(p.intermediate) * sizeof(float);
    job.panel_floats = panel_floats_of(p, slots);
    // Of quantised weights the rows of a task, of w13's both halves.
    job.scratch_floats = job.panel_floats + (WEIGHT_BITS ? TASK_ROWS * larger(p.hidden, p.intermediate) : 0);
    if (!reserve_scratch(job.scratch_floats)) return -1;
#endif
    return columns_of(slots, smaller(slots, p.experts)) * job.between_row;
}

// Bytes of a prepared row.
int64_t prepared_bytes(int64_t depth) {
#if HAS_INTEGER_ROWS
    return IntegerRows<BFloat16>::token_bytes(depth);
#else
    return 0;
#endif
}

}  // namespace

// w13_scales and w2_scales are null unless weights are quantised, biases unless there are some. z may be null; with z, out may: then nothing else is computed. After OUT_OF_MEMORY and NULL_TENSOR (a tensor that is not empty has no memory) nothing was written.
EXPORTED int flashmoe_moe_forward(
    const MoeProblem* problem, const void* hidden_states, const void* w13, const void* w2, const float* weights,
    const void* ids, void* out, const void* w13_scales, const void* w2_scales, const void* w13_bias, const void* w2_bias,
    void* z, int threads) {
    const MoeProblem& p = *problem;
    if (p.tokens == 0) return SUCCESS;
    if (!hidden_states || !w13 || !w2 || !weights || !ids || (!out && !z)) return NULL_TENSOR;
    if (WEIGHT_BITS != 0 && (!w13_scales || !w2_scales)) return NULL_TENSOR;
    const int64_t size = p.element_type == FLOAT32 ? 4 : 2;
    const int64_t slot_bytes = (p.hidden + p.intermediate) * size;
    const int64_t chunk = smaller(
        p.tokens, larger(CHUNK_BYTES / (slot_bytes * p.top_k), CHUNK_TOKENS_PER_EXPERT * p.experts / p.top_k) + 1);
    const int64_t slots = chunk * p.top_k;

    Job job = {};
    job.problem = problem;
    job.hidden_states = (const char*)hidden_states;
    job.w13 = {(const char*)w13, (const char*)w13_scales, 0, p.w13_group > 0 ? p.hidden / p.w13_group : 0};
    job.w2 = {(const char*)w2, (const char*)w2_scales, 0, p.w2_group > 0 ? p.intermediate / p.w2_group : 0};
    job.w13_bias = (const char*)w13_bias;
    job.w2_bias = (const char*)w2_bias;
    job.weights = weights;
    job.ids = ids;
    job.out = (char*)out;
    job.z = (char*)z;
    const int64_t task_bytes = (p.experts + 1) * 8, count_bytes = (p.experts + 1) * 4;
    const bool prepared = are_prepared(p);
    const int64_t tokens_bytes = prepared ? chunk * prepared_bytes(p.hidden) : 0;
    const int64_t between_bytes = prepared ? slots * prepared_bytes(p.intermediate) : 0;
    // Rows that straddle cache lines would cost a second access for each vector.
    void* memory = nullptr;
    const int64_t values_bytes = arrange_between(job, slots, size);
    if (values_bytes < 0) return OUT_OF_MEMORY;
    const int64_t bytes = tokens_bytes + between_bytes + values_bytes + slots * (p.hidden * size + 4) +
                          (z ? 3 : 1) * task_bytes + 3 * count_bytes + CACHE_LINE;
    if (posix_memalign(&memory, CACHE_LINE, bytes) != 0) return OUT_OF_MEMORY;
    char* at = (char*)memory;
    const auto take = [&at](int64_t bytes) {
        char* const taken = at;
        at += bytes;
        return taken;
    };
    if (prepared) {
        job.prepared_tokens = take(tokens_bytes);
        job.prepared_between = take(between_bytes);
    }
    job.between = take(values_bytes);
    job.down = take((slots * p.hidden * size + 7) / 8 * 8);
    job.task = (int64_t*)take(task_bytes);
    if (z) {
        job.z_next = (int64_t*)take(task_bytes);
        job.z_row = (int64_t*)take(task_bytes);
        begin_z(job);
    }
    job.expert = (int32_t*)take(count_bytes);
    job.offset = (int32_t*)take(count_bytes);
    int32_t* const count = (int32_t*)take(count_bytes);
    job.slots = (int32_t*)take(slots * 4);

    const double products = (double)p.tokens * p.top_k * p.hidden * p.intermediate * (is_gated(p.activation) ? 3 : 2);
    if (products < MIN_PARALLEL_WORK) threads = 1;
    for (; job.first_token < p.tokens; job.first_token += chunk) {
        job.chunk_tokens = smaller(chunk, p.tokens - job.first_token);
        sort_slots(job, count);
        const auto run =
            for_element(p.element_type, run_chunk<RowsOf<float>>, run_short_chunk<BFloat16Rows>, run_short_chunk<RowsOf<Half>>);
        run(job, threads);
    }
    free(memory);
    return SUCCESS;
}

PYTHON_METHOD(flashmoe_moe_method, "moe_forward", PythonCall<flashmoe_moe_forward>::call)

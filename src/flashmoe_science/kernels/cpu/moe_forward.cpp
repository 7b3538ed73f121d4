// Mixture of experts, forward: out[t] = sum over j of weight[t][j] * w2[e] act(w13[e] x[t]), e = id[t][j].
//
// Slots (a token and one of its choices) are sorted by expert. Two products follow, each row of weights with every token
// that chose its expert: the first writes activated intermediate values, in the tensors' type and in sorted order, the
// second each slot's result, in the tensors' type. The combination then reads a token's k results. All sums are in fp32
// and in an order that does not depend on the number of threads.
//
// Weights of 8 or 4 bits with scales of groups (quantized.h) are compiled from this file with WEIGHT_BITS set.
//
// Weights and tokens are read where they lie (dot.h); what is written in between is all that a call allocates. Many
// tokens are taken in chunks, so that this stays small. A task is one expert's block of weight rows with up to TASK_TOKENS
// tokens; threads take tasks from a counter.

#include <stdlib.h>

#include "activation.h"
#include "dot.h"
#include "parallel.h"
#include "python_call.h"
#include "quantized.h"

// Bits of a weight; 0: weights have the tokens' type.
#ifndef WEIGHT_BITS
#define WEIGHT_BITS 0
#endif

enum ElementType : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };
enum Status : int { SUCCESS = 0, OUT_OF_MEMORY = 1, NULL_TENSOR = 2 };

// Mirrored by flashmoe_science.cpu.moe. All tensors are contiguous.
struct MoeProblem {
    int64_t element_type;
    int64_t tokens, hidden, intermediate, experts, top_k;
    int64_t activation;
    int64_t interleaved;  // w13's rows: gate 0, up 0, gate 1, ...
    int64_t ids64;        // ids are int64, not int32
    int64_t w13_group, w2_group;  // numbers that share a scale, along the depth; for quantised weights
};

namespace {

// Below this many multiply-adds waking another thread costs more than it saves.
constexpr double MIN_PARALLEL_WORK = 2e5;
// Intermediate values, or entries of the result, that a task computes of a token; a multiple of DOT_ROWS.
constexpr int TASK_ROWS = 32;
// Tokens that meet a block of weight rows before the next: their rows and the block's stay in the second-level cache.
constexpr int TILE_TOKENS = 64;
// Tokens of one expert in a task.
constexpr int TASK_TOKENS = 256;
constexpr int COMBINE_TOKENS = 8;
constexpr int CACHE_LINE = 64;
// A chunk's intermediate values and results should stay in a large cache,
constexpr int64_t CHUNK_BYTES = 32 << 20;
// but every expert's weights are read once a chunk: not for fewer tokens than this, on average.
constexpr int64_t CHUNK_TOKENS_PER_EXPERT = 64;

template <class T>
constexpr T smaller(T a, T b) { return a < b ? a : b; }
template <class T>
constexpr T larger(T a, T b) { return a > b ? a : b; }

// Weights of all experts, and their scales where they are quantised: of the tokens' type, a row's beside each other.
struct Matrix {
    const char *data, *scales;
    int64_t row_bytes, groups;
};

struct Job {
    const MoeProblem* problem;
    const char* hidden_states;
    Matrix w13, w2;
    const float* weights;
    const void* ids;
    char* out;
    int64_t first_token, chunk_tokens;
    int64_t active;          // experts that a slot of the chunk chose
    int32_t* expert;         // [active]
    int32_t* offset;         // [active + 1]: their slots in `slots`
    int64_t* task;           // [active + 1]: their tasks, for a block of rows each
    int32_t* slots;          // (token - first_token) * top_k + choice, by expert, ascending within one
    char* z;                 // null, or [slot of the whole call in sorted order][rows of w13]: the first product
    int64_t* z_next;         // [experts]: where in z the expert's next slot goes
    int64_t* z_row;          // [active]: where in z the expert's first slot of the chunk goes
    char* between;           // [slot in sorted order][intermediate]
    char* down;              // [slot][hidden]
    int64_t blocks;          // blocks of TASK_ROWS rows
    int64_t tasks;
    int64_t next_task;
};

int64_t id_of(const Job& job, int64_t slot) {
    const int64_t at = job.first_token * job.problem->top_k + slot;
    return job.problem->ids64 ? ((const int64_t*)job.ids)[at] : ((const int32_t*)job.ids)[at];
}

bool is_valid(const Job& job, int64_t id) { return id >= 0 && id < job.problem->experts; }

// Groups the chunk's slots by expert. `count` has room for one number for each expert.
void sort_slots(Job& job, int32_t* count) {
    const MoeProblem& p = *job.problem;
    const int64_t slots = job.chunk_tokens * p.top_k;
    memset(count, 0, p.experts * sizeof *count);
    for (int64_t slot = 0; slot < slots; ++slot) {
        const int64_t id = id_of(job, slot);
        if (is_valid(job, id)) ++count[id];
    }
    job.active = 0;
    int32_t total = 0;
    int64_t tasks = 0;
    for (int64_t e = 0; e < p.experts; ++e) {
        if (count[e] == 0) continue;
        job.expert[job.active] = (int32_t)e;
        job.offset[job.active] = total;
        job.task[job.active] = tasks;
        if (job.z) {
            job.z_row[job.active] = job.z_next[e];
            job.z_next[e] += count[e];
        }
        ++job.active;
        tasks += (count[e] + TASK_TOKENS - 1) / TASK_TOKENS;
        const int32_t begin = total;
        total += count[e];
        count[e] = begin;  // from here on: where the expert's next slot goes
    }
    job.offset[job.active] = total;
    job.task[job.active] = tasks;
    for (int64_t slot = 0; slot < slots; ++slot) {
        const int64_t id = id_of(job, slot);
        if (is_valid(job, id)) job.slots[count[id]++] = (int32_t)slot;
    }
}

// Where in z each expert begins.
void begin_z(Job& job) {
    const MoeProblem& p = *job.problem;
    memset(job.z_next, 0, (p.experts + 1) * sizeof *job.z_next);
    for (int64_t slot = 0; slot < p.tokens * p.top_k; ++slot) {
        const int64_t id = id_of(job, slot);
        if (is_valid(job, id)) ++job.z_next[id + 1];
    }
    for (int64_t e = 1; e <= p.experts; ++e) job.z_next[e] += job.z_next[e - 1];
}

// One task: which expert, which of its slots, which rows.
struct Part {
    int64_t expert;
    int64_t first, count;  // in sorted order
    int64_t row, rows;
    int64_t z_row;         // of the first
};

// Tasks run over the blocks of rows first: their tokens are then in the cache.
Part part_of(const Job& job, int64_t task, int64_t rows) {
    const int64_t group = task / job.blocks;
    int64_t low = 0, high = job.active - 1;
    while (low < high) {
        const int64_t middle = (low + high + 1) / 2;
        if (job.task[middle] <= group) low = middle;
        else high = middle - 1;
    }
    Part part;
    part.expert = job.expert[low];
    part.first = job.offset[low] + (group - job.task[low]) * TASK_TOKENS;
    part.count = smaller<int64_t>(TASK_TOKENS, job.offset[low + 1] - part.first);
    part.row = task % job.blocks * TASK_ROWS;
    part.rows = smaller<int64_t>(TASK_ROWS, rows - part.row);
    part.z_row = job.z ? job.z_row[low] + part.first - job.offset[low] : 0;
    return part;
}

// How rows of weights of the tokens' type are multiplied with tokens.
template <class Dot>
struct PlainRows {
    typedef typename Dot::Element Element;
    static constexpr int BITS = 8 * sizeof(Element);
    // Rows first, first + step, ... of the matrix.
    static void multiply(
        const Matrix& matrix, int64_t first, int64_t step, int64_t rows, const char* const* tokens, int count,
        int64_t depth, float* out) {
        dot_rows<Dot>(
            matrix.data + first * matrix.row_bytes, step * matrix.row_bytes, (int)rows, tokens, count, (int)depth, out,
            TASK_ROWS);
    }
};

template <class Weights, class T>
struct QuantizedRows {
    typedef T Element;
    static constexpr int BITS = Weights::BITS;
    static void multiply(
        const Matrix& matrix, int64_t first, int64_t step, int64_t rows, const char* const* tokens, int count,
        int64_t depth, float* out) {
        quantized_rows<Weights, T>(
            matrix.data + first * matrix.row_bytes, step * matrix.row_bytes,
            (const T*)matrix.scales + first * matrix.groups, step * matrix.groups, (int)rows, tokens, count, (int)depth,
            (int)(depth / matrix.groups), out, TASK_ROWS);
    }
};

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

template <class Rows>
void project_up(Job& job, int64_t task) {
    typedef typename Rows::Element Element;
    const MoeProblem& p = *job.problem;
    const Part part = part_of(job, task, p.intermediate);
    const bool gated = is_gated(p.activation);
    const int64_t row_bytes = p.hidden * sizeof(Element);
    const int64_t step = gated && p.interleaved ? 2 : 1;
    const int64_t gate = part.expert * p.intermediate * (gated ? 2 : 1) + part.row * step;
    const int64_t up = gate + (p.interleaved ? 1 : p.intermediate);
    for (int64_t first = 0; first < part.count; first += TILE_TOKENS) {
        const int count = (int)smaller<int64_t>(TILE_TOKENS, part.count - first);
        const char* token[TILE_TOKENS];
        float projected[2][TILE_TOKENS * TASK_ROWS];
        for (int i = 0; i < count; ++i)
            token[i] = job.hidden_states +
                       (job.first_token + job.slots[part.first + first + i] / p.top_k) * row_bytes;
        Rows::multiply(job.w13, gate, step, part.rows, token, count, p.hidden, projected[0]);
        if (gated) Rows::multiply(job.w13, up, step, part.rows, token, count, p.hidden, projected[1]);
        if (job.z) keep_projected<Element>(job, part, part.z_row + first, projected[0], projected[1], count);
        if (!job.out) continue;
        for (int i = 0; i < count; ++i) {
            Element* const to = (Element*)job.between + (part.first + first + i) * p.intermediate + part.row;
            for (int r = 0; r < part.rows; r += W) {
                F x = activate(p.activation, load(projected[0] + i * TASK_ROWS + r));
                if (gated) x = mul(x, load(projected[1] + i * TASK_ROWS + r));
                store_first(to + r, x, W);
            }
        }
    }
}

template <class Rows>
void project_down(Job& job, int64_t task) {
    typedef typename Rows::Element Element;
    const MoeProblem& p = *job.problem;
    const Part part = part_of(job, task, p.hidden);
    const int64_t row_bytes = p.intermediate * sizeof(Element);
    const int64_t row = part.expert * p.hidden + part.row;
    for (int64_t first = 0; first < part.count; first += TILE_TOKENS) {
        const int count = (int)smaller<int64_t>(TILE_TOKENS, part.count - first);
        const char* token[TILE_TOKENS];
        float projected[TILE_TOKENS * TASK_ROWS];
        for (int i = 0; i < count; ++i) token[i] = job.between + (part.first + first + i) * row_bytes;
        Rows::multiply(job.w2, row, 1, part.rows, token, count, p.intermediate, projected);
        for (int i = 0; i < count; ++i) {
            Element* const to = (Element*)job.down + job.slots[part.first + first + i] * p.hidden + part.row;
            for (int r = 0; r < part.rows; r += W) store_first(to + r, load(projected + i * TASK_ROWS + r), W);
        }
    }
}

// out = sum over the choices of their weight times their result, in the order of the choices.
template <class Rows>
void combine(Job& job, int64_t task) {
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

template <void (*do_task)(Job&, int64_t)>
void work(void* data) {
    Job& job = *(Job*)data;
    for (;;) {
        const int64_t task = __atomic_fetch_add(&job.next_task, 1, __ATOMIC_RELAXED);
        if (task >= job.tasks) return;
        do_task(job, task);
    }
}

template <void (*do_task)(Job&, int64_t)>
void run(Job& job, int64_t tasks, int threads) {
    job.tasks = tasks;
    job.next_task = 0;
    run_on_threads(work<do_task>, &job, (int)smaller<int64_t>(threads, tasks));
}

template <class Rows>
void run_chunk(Job& job, int threads) {
    const MoeProblem& p = *job.problem;
    job.w13.row_bytes = p.hidden * Rows::BITS / 8;
    job.w2.row_bytes = p.intermediate * Rows::BITS / 8;
    const int64_t groups = job.task[job.active];
    job.blocks = (p.intermediate + TASK_ROWS - 1) / TASK_ROWS;
    if (groups > 0) run<project_up<Rows>>(job, groups * job.blocks, threads);
    if (!job.out) return;
    job.blocks = (p.hidden + TASK_ROWS - 1) / TASK_ROWS;
    if (groups > 0) run<project_down<Rows>>(job, groups * job.blocks, threads);
    run<combine<Rows>>(job, (job.chunk_tokens + COMBINE_TOKENS - 1) / COMBINE_TOKENS, threads);
}

#if WEIGHT_BITS == 8
template <class T>
using RowsOf = QuantizedRows<Int8Weights, T>;
#elif WEIGHT_BITS == 4
template <class T>
using RowsOf = QuantizedRows<Int4Weights, T>;
#else
template <class T>
using RowsOf = PlainRows<WidenDot<T>>;
#endif
#if WEIGHT_BITS == 0
typedef PlainRows<BFloat16Dot> BFloat16Rows;
#else
typedef RowsOf<BFloat16> BFloat16Rows;
#endif

}  // namespace

// w13_scales and w2_scales are null unless weights are quantised. z may be null; with z, out may: then nothing else is computed. After OUT_OF_MEMORY and NULL_TENSOR (a tensor that is not empty has no memory) nothing was written.
extern "C" __attribute__((visibility("default"))) int flashmoe_moe_forward(
    const MoeProblem* problem, const void* hidden_states, const void* w13, const void* w2, const float* weights,
    const void* ids, void* out, const void* w13_scales, const void* w2_scales, void* z,
    int threads) {
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
    job.weights = weights;
    job.ids = ids;
    job.out = (char*)out;
    job.z = (char*)z;
    const int64_t task_bytes = (p.experts + 1) * 8, count_bytes = (p.experts + 1) * 4;
    // Rows that straddle cache lines would cost a second access for each vector.
    void* memory = nullptr;
    if (posix_memalign(&memory, CACHE_LINE, slots * (slot_bytes + 4) + (z ? 3 : 1) * task_bytes + 3 * count_bytes + CACHE_LINE) != 0)
        return OUT_OF_MEMORY;
    char* at = (char*)memory;
    const auto take = [&at](int64_t bytes) {
        char* const taken = at;
        at += bytes;
        return taken;
    };
    job.between = take(slots * p.intermediate * size);
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
        switch (p.element_type) {
            case FLOAT32: run_chunk<RowsOf<float>>(job, threads); break;
            case BFLOAT16: run_chunk<BFloat16Rows>(job, threads); break;
            case FLOAT16: run_chunk<RowsOf<Half>>(job, threads); break;
        }
    }
    free(memory);
    return SUCCESS;
}

// The same as a Python function of eleven integers: the addresses above and the number of threads. Returns SUCCESS or
// NULL_TENSOR, raises MemoryError. Other Python threads run meanwhile.
static PyObject* moe_forward_call(PyObject*, PyObject* const* arguments, intptr_t count) {
    constexpr int COUNT = 11;
    void* value[COUNT] = {};
    for (int i = 0; i < COUNT && i < count; ++i) value[i] = PyLong_AsVoidPtr(arguments[i]);
    if (PyErr_Occurred()) return nullptr;
    void* const state = PyEval_SaveThread();
    const int status = flashmoe_moe_forward(
        (const MoeProblem*)value[0], value[1], value[2], value[3], (const float*)value[4], value[5], value[6],
        value[7], value[8], value[9], (int)(intptr_t)value[10]);
    PyEval_RestoreThread(state);
    return status == OUT_OF_MEMORY ? PyErr_NoMemory() : PyLong_FromLong(status);
}

// A PyMethodDef, for PyCFunction_NewEx.
extern "C" {
__attribute__((visibility("default"))) PyMethodDef flashmoe_moe_method = {
    "moe_forward", moe_forward_call, METH_FASTCALL, nullptr};
}

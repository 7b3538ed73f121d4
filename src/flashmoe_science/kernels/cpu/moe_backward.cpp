// Mixture of experts, backward: gradients of the tokens, the weights of experts, the routing weights and the biases.
//
// Slots (a token and one of its choices) are sorted by expert; z is in that order already.
// For a slot with weight s and incoming gradient g of its token, with y = act(z):
//   1. d = w2^T g; dz = act'(z) (s d) and s y, in the tensors' type; <d, y>, of which every tile writes a part.
//   2. w13^T dz, in the tensors' type and at the slot's own place; a token's are then added in the order of its choices.
//   3. w2's gradient: the sum of g (s y)^T over an expert's slots; w13's: that of dz x^T; the biases': of s g and of dz.
// All sums are in fp32, in an order that does not depend on the number of threads. Threads take tiles from a counter.

#include <stdlib.h>

#include "activation_slope.h"
#include "parallel.h"
#include "python_call.h"
#include "tile_product.h"

// Mirrored by flashmoe_science.cpu.moe_backward. All tensors are contiguous but grad_output, whose rows are.
struct MoeBackwardProblem {
    int64_t element_type;
    int64_t tokens, hidden, intermediate, experts, top_k;
    int64_t activation;
    int64_t interleaved;      // w13's rows: gate 0, up 0, gate 1, ...
    int64_t ids64;            // ids are int64, not int32
    int64_t grad_output_row;  // bytes from one row to the next
};

// Addresses; those of gradients that are not needed are null, and so are biases that are not there.
struct MoeBackwardTensors {
    const char *grad_output, *hidden_states, *w13, *w2;
    const float* weights;
    const void* ids;
    const char *z, *w2_bias;
    char *grad_hidden_states, *grad_w13, *grad_w2;
    float* grad_weights;
    char *grad_w13_bias, *grad_w2_bias;
};

namespace {

constexpr int COMBINE_TOKENS = 8;
constexpr int CACHE_LINE = 64;

constexpr int64_t blocks_of(int64_t size, int64_t block) { return (size + block - 1) / block; }
constexpr int64_t to_lines(int64_t bytes) { return (bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE; }

struct Job {
    const MoeBackwardProblem* problem;
    const MoeBackwardTensors* tensors;
    int64_t w13_rows;
    int32_t* offset;      // [experts + 1]: an expert's slots in `slots`
    int64_t* row_blocks;  // [experts + 1]: blocks of TILE_ROWS slots of the experts before
    int32_t* slots;       // in sorted order
    char* between;        // [sorted slot][intermediate]: s y
    char* grad_z;         // [sorted slot][w13_rows]
    char* grad_slots;     // [slot][hidden]
    float* parts;         // [sorted slot][tiles of intermediate]: of <d, y>
    TileMemory* memory;   // [threads]
    int64_t threads;      // that have taken one
    int64_t tasks, next_task;
};

int64_t id_of(const Job& job, int64_t slot) {
    return job.problem->ids64 ? ((const int64_t*)job.tensors->ids)[slot] : ((const int32_t*)job.tensors->ids)[slot];
}

bool is_valid(const Job& job, int64_t id) { return id >= 0 && id < job.problem->experts; }

void sort_slots(Job& job) {
    const MoeBackwardProblem& p = *job.problem;
    const int64_t slots = p.tokens * p.top_k;
    memset(job.offset, 0, (p.experts + 1) * sizeof *job.offset);
    for (int64_t slot = 0; slot < slots; ++slot) {
        const int64_t id = id_of(job, slot);
        if (is_valid(job, id)) ++job.offset[id + 1];
    }
    job.row_blocks[0] = 0;
    for (int64_t e = 0; e < p.experts; ++e) {
        job.row_blocks[e + 1] = job.row_blocks[e] + blocks_of(job.offset[e + 1], TILE_ROWS);
        job.offset[e + 1] += job.offset[e];
    }
    for (int64_t slot = 0; slot < slots; ++slot) {
        const int64_t id = id_of(job, slot);
        if (is_valid(job, id)) job.slots[job.offset[id]++] = (int32_t)slot;
    }
    for (int64_t e = p.experts; e > 0; --e) job.offset[e] = job.offset[e - 1];
    job.offset[0] = 0;
}

// A block of an expert's slots.
struct Rows {
    int64_t expert;
    int64_t first;  // in sorted order
    int count;
};

Rows rows_of(const Job& job, int64_t block) {
    int64_t low = 0, high = job.problem->experts - 1;
    while (low < high) {  // the last expert that begins at the block or before: those without slots come before it
        const int64_t middle = (low + high + 1) / 2;
        if (job.row_blocks[middle] <= block) low = middle;
        else high = middle - 1;
    }
    const int64_t first = job.offset[low] + (block - job.row_blocks[low]) * TILE_ROWS;
    return {low, first, (int)smaller<int64_t>(TILE_ROWS, job.offset[low + 1] - first)};
}

const char* token_row(const Job& job, const char* tokens, int64_t row_bytes, int64_t sorted) {
    return tokens + job.slots[sorted] / job.problem->top_k * row_bytes;
}

// Gate and up of `columns` intermediate values, from a row of z or to one of its gradient.
template <class T>
void read_projections(const Job& job, const T* row, int64_t first, int columns, float* gate, float* up) {
    const MoeBackwardProblem& p = *job.problem;
    if (!is_gated(p.activation)) {
        for (int i = 0; i < columns; i += W) store(gate + i, load_first(row + first + i, W));
    } else if (p.interleaved) {
        float both[2 * TILE_COLUMNS];
        for (int i = 0; i < 2 * columns; i += W) store(both + i, load_first(row + 2 * first + i, W));
        for (int i = 0; i < columns; ++i) gate[i] = both[2 * i], up[i] = both[2 * i + 1];
    } else {
        for (int i = 0; i < columns; i += W) {
            store(gate + i, load_first(row + first + i, W));
            store(up + i, load_first(row + p.intermediate + first + i, W));
        }
    }
}

template <class T>
void write_projections(const Job& job, T* row, int64_t first, int columns, const float* gate, const float* up) {
    const MoeBackwardProblem& p = *job.problem;
    if (!is_gated(p.activation)) {
        for (int i = 0; i < columns; i += W) store_first(row + first + i, load(gate + i), W);
    } else if (p.interleaved) {
        float both[2 * TILE_COLUMNS];
        for (int i = 0; i < columns; ++i) both[2 * i] = gate[i], both[2 * i + 1] = up[i];
        for (int i = 0; i < 2 * columns; i += W) store_first(row + 2 * first + i, load(both + i), W);
    } else {
        for (int i = 0; i < columns; i += W) {
            store_first(row + first + i, load(gate + i), W);
            store_first(row + p.intermediate + first + i, load(up + i), W);
        }
    }
}

// Step 1 for a block of slots and a tile of intermediate values.
template <class Tile>
void through_activation(Job& job, int64_t task, TileMemory& memory) {
    typedef typename Tile::Element T;
    const MoeBackwardProblem& p = *job.problem;
    const MoeBackwardTensors& t = *job.tensors;
    const int64_t tiles = blocks_of(p.intermediate, TILE_COLUMNS);
    const Rows rows = rows_of(job, task / tiles);
    const int64_t tile = task % tiles, first = tile * TILE_COLUMNS;
    const int columns = (int)smaller<int64_t>(TILE_COLUMNS, p.intermediate - first);
    const bool gated = is_gated(p.activation);
    if (job.grad_z || job.parts) {
        const T* const w2 = (const T*)t.w2 + rows.expert * p.hidden * p.intermediate + first;
        multiply_tile<Tile, false>(
            memory, rows.count, columns, p.hidden,
            [&](int i) { return (const T*)token_row(job, t.grad_output, p.grad_output_row, rows.first + i); },
            [&](int64_t k) { return w2 + k * p.intermediate; });
    }
    for (int i = 0; i < rows.count; ++i) {
        const int64_t sorted = rows.first + i;
        const F score = set1(t.weights[job.slots[sorted]]);
        const float* const d = memory.c + (ptrdiff_t)i * TILE_COLUMNS;
        float gate[TILE_COLUMNS], up[TILE_COLUMNS];
        read_projections(job, (const T*)t.z + sorted * job.w13_rows, first, columns, gate, up);
        T* const between = (T*)job.between + sorted * p.intermediate + first;
        F part = set1(0.0f);
        for (int c = 0; c < columns; c += W) {
            const ValueAndSlope a = activate_with_slope(p.activation, load(gate + c));
            const ValueAndSlope u =
                gated ? factor_and_slope(p.activation, load(up + c)) : ValueAndSlope{set1(1.0f), set1(0.0f)};
            const F y = gated ? mul(a.value, u.value) : a.value;
            if (job.between) store_first(between + c, mul(score, y), W);
            if (job.parts) part = madd(load(d + c), y, part);
            if (job.grad_z) {
                const F grad = mul(score, load(d + c));
                store(gate + c, mul(gated ? mul(grad, u.value) : grad, a.slope));
                if (gated) store(up + c, mul(mul(grad, a.value), u.slope));
            }
        }
        if (job.grad_z)
            write_projections(job, (T*)job.grad_z + sorted * job.w13_rows, first, columns, gate, up);
        if (job.parts) {
            float lane[W], sum = 0.0f;
            store(lane, part);
            for (int l = 0; l < W; ++l) sum += lane[l];
            job.parts[sorted * tiles + tile] = sum;
        }
    }
}

// The gradients of the routing weights, for a block of slots.
template <class Tile>
void sum_parts(Job& job, int64_t task, TileMemory&) {
    typedef typename Tile::Element T;
    const MoeBackwardProblem& p = *job.problem;
    const MoeBackwardTensors& t = *job.tensors;
    const int64_t tiles = blocks_of(p.intermediate, TILE_COLUMNS);
    const Rows rows = rows_of(job, task);
    for (int64_t sorted = rows.first; sorted < rows.first + rows.count; ++sorted) {
        float sum = 0.0f;
        for (int64_t tile = 0; tile < tiles; ++tile) sum += job.parts[sorted * tiles + tile];
        if (t.w2_bias) {
            const T* const g = (const T*)token_row(job, t.grad_output, p.grad_output_row, sorted);
            const T* const bias = (const T*)t.w2_bias + rows.expert * p.hidden;
            F part = set1(0.0f);
            for (int64_t h = 0; h < p.hidden; h += W) part = madd(load_first(g + h, W), load_first(bias + h, W), part);
            float lane[W];
            store(lane, part);
            for (int l = 0; l < W; ++l) sum += lane[l];
        }
        t.grad_weights[job.slots[sorted]] = sum;
    }
}

// Step 2 for a block of slots and a tile of the hidden size.
template <class Tile>
void to_slots(Job& job, int64_t task, TileMemory& memory) {
    typedef typename Tile::Element T;
    const MoeBackwardProblem& p = *job.problem;
    const int64_t tiles = blocks_of(p.hidden, TILE_COLUMNS);
    const Rows rows = rows_of(job, task / tiles);
    const int64_t first = task % tiles * TILE_COLUMNS;
    const int columns = (int)smaller<int64_t>(TILE_COLUMNS, p.hidden - first);
    const T* const w13 = (const T*)job.tensors->w13 + rows.expert * job.w13_rows * p.hidden + first;
    multiply_tile<Tile, false>(
        memory, rows.count, columns, job.w13_rows,
        [&](int i) { return (const T*)job.grad_z + (rows.first + i) * job.w13_rows; },
        [&](int64_t k) { return w13 + k * p.hidden; });
    for (int i = 0; i < rows.count; ++i) {
        T* const to = (T*)job.grad_slots + job.slots[rows.first + i] * p.hidden + first;
        for (int c = 0; c < columns; c += W) store_first(to + c, load(memory.c + (ptrdiff_t)i * TILE_COLUMNS + c), W);
    }
}

template <class Tile>
void combine(Job& job, int64_t task, TileMemory&) {
    typedef typename Tile::Element T;
    const MoeBackwardProblem& p = *job.problem;
    const int64_t last = smaller<int64_t>(p.tokens, (task + 1) * COMBINE_TOKENS);
    for (int64_t token = task * COMBINE_TOKENS; token < last; ++token) {
        const int64_t slot = token * p.top_k;
        T* const to = (T*)job.tensors->grad_hidden_states + token * p.hidden;
        for (int64_t h = 0; h < p.hidden; h += W) {
            F sum = set1(0.0f);
            for (int64_t j = 0; j < p.top_k; ++j)
                if (is_valid(job, id_of(job, slot + j)))
                    sum = add(sum, load_first((const T*)job.grad_slots + (slot + j) * p.hidden + h, W));
            store_first(to + h, sum, W);
        }
    }
}

// Step 3: a tile of a weight's gradient, of `rows` rows and `row` columns, from a(sorted) and b(sorted), whose rows lie across.
template <class Tile, class A, class B>
void weight_tile(
    const Job& job, int64_t task, TileMemory& memory, int64_t rows, int64_t row, char* gradient, const A& a, const B& b) {
    typedef typename Tile::Element T;
    const int64_t across = blocks_of(row, TILE_COLUMNS), down = blocks_of(rows, TILE_ROWS);
    const int64_t expert = task / (across * down);
    const int64_t first_row = task / across % down * TILE_ROWS, first_column = task % across * TILE_COLUMNS;
    const int height = (int)smaller<int64_t>(TILE_ROWS, rows - first_row);
    const int width = (int)smaller<int64_t>(TILE_COLUMNS, row - first_column);
    const int64_t begin = job.offset[expert];
    multiply_tile<Tile, true>(
        memory, height, width, job.offset[expert + 1] - begin, [&](int64_t k) { return a(begin + k) + first_row; },
        [&](int64_t k) { return b(begin + k) + first_column; });
    for (int i = 0; i < height; ++i) {
        T* const to = (T*)gradient + (expert * rows + first_row + i) * row + first_column;
        for (int c = 0; c < width; c += W) store_first(to + c, load(memory.c + (ptrdiff_t)i * TILE_COLUMNS + c), W);
    }
}

template <class Tile>
void w2_tile(Job& job, int64_t task, TileMemory& memory) {
    typedef typename Tile::Element T;
    const MoeBackwardProblem& p = *job.problem;
    weight_tile<Tile>(
        job, task, memory, p.hidden, p.intermediate, job.tensors->grad_w2,
        [&](int64_t sorted) {
            return (const T*)token_row(job, job.tensors->grad_output, p.grad_output_row, sorted);
        },
        [&](int64_t sorted) { return (const T*)job.between + sorted * p.intermediate; });
}

template <class Tile>
void w13_tile(Job& job, int64_t task, TileMemory& memory) {
    typedef typename Tile::Element T;
    const MoeBackwardProblem& p = *job.problem;
    weight_tile<Tile>(
        job, task, memory, job.w13_rows, p.hidden, job.tensors->grad_w13,
        [&](int64_t sorted) { return (const T*)job.grad_z + sorted * job.w13_rows; },
        [&](int64_t sorted) {
            return (const T*)token_row(job, job.tensors->hidden_states, p.hidden * sizeof(T), sorted);
        });
}

// The sum of an expert's rows, each times its factor.
template <class T, class Row, class Factor>
void sum_rows(const Job& job, int64_t expert, int64_t columns, T* to, const Row& row, const Factor& factor) {
    for (int64_t c = 0; c < columns; c += W) {
        F sum = set1(0.0f);
        for (int64_t sorted = job.offset[expert]; sorted < job.offset[expert + 1]; ++sorted)
            sum = madd(factor(sorted), load_first(row(sorted) + c, W), sum);
        store_first(to + c, sum, W);
    }
}

template <class Tile>
void w2_bias_row(Job& job, int64_t expert, TileMemory&) {
    typedef typename Tile::Element T;
    const MoeBackwardProblem& p = *job.problem;
    const MoeBackwardTensors& t = *job.tensors;
    sum_rows(
        job, expert, p.hidden, (T*)t.grad_w2_bias + expert * p.hidden,
        [&](int64_t sorted) { return (const T*)token_row(job, t.grad_output, p.grad_output_row, sorted); },
        [&](int64_t sorted) { return set1(t.weights[job.slots[sorted]]); });
}

template <class Tile>
void w13_bias_row(Job& job, int64_t expert, TileMemory&) {
    typedef typename Tile::Element T;
    sum_rows(
        job, expert, job.w13_rows, (T*)job.tensors->grad_w13_bias + expert * job.w13_rows,
        [&](int64_t sorted) { return (const T*)job.grad_z + sorted * job.w13_rows; },
        [](int64_t) { return set1(1.0f); });
}

template <void (*do_task)(Job&, int64_t, TileMemory&)>
void work(void* data) {
    Job& job = *(Job*)data;
    TileMemory& memory = job.memory[__atomic_fetch_add(&job.threads, 1, __ATOMIC_RELAXED)];
    [[maybe_unused]] const AmxSession session;
    for (;;) {
        const int64_t task = __atomic_fetch_add(&job.next_task, 1, __ATOMIC_RELAXED);
        if (task >= job.tasks) return;
        do_task(job, task, memory);
    }
}

template <void (*do_task)(Job&, int64_t, TileMemory&)>
void run(Job& job, int64_t tasks, int threads) {
    if (tasks == 0) return;
    job.tasks = tasks;
    job.next_task = job.threads = 0;
    run_on_threads(work<do_task>, &job, (int)smaller<int64_t>(threads, tasks));
}

template <class Tile>
void run_all(Job& job, int threads) {
    const MoeBackwardProblem& p = *job.problem;
    const MoeBackwardTensors& t = *job.tensors;
    const int64_t blocks = job.row_blocks[p.experts];
    const int64_t of_hidden = blocks_of(p.hidden, TILE_COLUMNS), of_between = blocks_of(p.intermediate, TILE_COLUMNS);
    if (job.grad_z || job.parts || job.between) run<through_activation<Tile>>(job, blocks * of_between, threads);
    if (t.grad_hidden_states) {
        run<to_slots<Tile>>(job, blocks * of_hidden, threads);
        run<combine<Tile>>(job, blocks_of(p.tokens, COMBINE_TOKENS), threads);
    }
    if (job.parts) {
        memset(t.grad_weights, 0, p.tokens * p.top_k * sizeof(float));
        run<sum_parts<Tile>>(job, blocks, threads);
    }
    if (t.grad_w2) run<w2_tile<Tile>>(job, p.experts * blocks_of(p.hidden, TILE_ROWS) * of_between, threads);
    if (t.grad_w13) run<w13_tile<Tile>>(job, p.experts * blocks_of(job.w13_rows, TILE_ROWS) * of_hidden, threads);
    if (t.grad_w2_bias) run<w2_bias_row<Tile>>(job, p.experts, threads);
    if (t.grad_w13_bias) run<w13_bias_row<Tile>>(job, p.experts, threads);
}

}  // namespace

// After OUT_OF_MEMORY and NULL_TENSOR (a tensor that is not empty has no memory) nothing was written.
EXPORTED int flashmoe_moe_backward(const MoeBackwardProblem* problem, const MoeBackwardTensors* tensors, int threads) {
    const MoeBackwardProblem& p = *problem;
    const MoeBackwardTensors& t = *tensors;
    if (!t.w13 || !t.w2) return NULL_TENSOR;
    const int64_t slots = p.tokens * p.top_k;
    if (slots > 0 && (!t.grad_output || !t.hidden_states || !t.weights || !t.ids || !t.z)) return NULL_TENSOR;
    const int64_t size = p.element_type == FLOAT32 ? 4 : 2;
    const int64_t w13_rows = p.intermediate * (is_gated(p.activation) ? 2 : 1);
    if (threads < 1) threads = 1;
    const double products = (double)slots * p.hidden * (p.intermediate + w13_rows);
    if (products < MIN_PARALLEL_WORK) threads = 1;

    const int64_t offset_bytes = to_lines((p.experts + 1) * 4), block_bytes = to_lines((p.experts + 1) * 8);
    const int64_t slot_bytes = to_lines(slots * 4), memory_bytes = to_lines(threads * sizeof(TileMemory));
    const int64_t between_bytes = t.grad_w2 ? to_lines(slots * p.intermediate * size) : 0;
    const bool through_z = t.grad_hidden_states || t.grad_w13 || t.grad_w13_bias;
    const int64_t grad_z_bytes = through_z ? to_lines(slots * w13_rows * size) : 0;
    const int64_t grad_slots_bytes = t.grad_hidden_states ? to_lines(slots * p.hidden * size) : 0;
    const int64_t parts_bytes = t.grad_weights ? to_lines(slots * blocks_of(p.intermediate, TILE_COLUMNS) * 4) : 0;
    void* memory = nullptr;
    const int64_t bytes = offset_bytes + block_bytes + slot_bytes + memory_bytes + between_bytes + grad_z_bytes +
                          grad_slots_bytes + parts_bytes;
    if (posix_memalign(&memory, CACHE_LINE, bytes) != 0) return OUT_OF_MEMORY;
    char* at = (char*)memory;
    const auto take = [&at](int64_t bytes) {
        char* const taken = at;
        at += bytes;
        return bytes > 0 ? taken : nullptr;
    };
    Job job = {};
    job.problem = problem;
    job.tensors = tensors;
    job.w13_rows = w13_rows;
    job.memory = (TileMemory*)take(memory_bytes);
    job.offset = (int32_t*)take(offset_bytes);
    job.row_blocks = (int64_t*)take(block_bytes);
    job.slots = (int32_t*)take(slot_bytes);
    job.between = take(between_bytes);
    job.grad_z = take(grad_z_bytes);
    job.grad_slots = take(grad_slots_bytes);
    job.parts = (float*)take(parts_bytes);
    sort_slots(job);
    for_element(p.element_type, run_all<WidenedTile<float>>, run_all<BFloat16Tile>, run_all<WidenedTile<Half>>)(job, threads);
    free(memory);
    return SUCCESS;
}

PYTHON_METHOD(flashmoe_moe_backward_method, "moe_backward", PythonCall<flashmoe_moe_backward>::call)

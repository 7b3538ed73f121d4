// Experts' products of bfloat16 on the matrix unit (amx.h), for experts with more than a few tokens: what moe_forward.cpp does
// with dot products.
//
// Rows of weights are the first operand as they lie in memory. Tokens are the second, as columns: [depth / 2][tokens] pairs of
// neighbouring numbers, in panels of up to PANEL_TOKENS, which a thread packs when it meets a group's first task.
//
// Weights of 8 or 4 bits are exact as bfloat16. A task's rows are widened once, as numbers without their scales, and a group's
// products are multiplied by its scales in fp32, as quantized.h does.
#pragma once

#include "activation.h"
#include "amx.h"
#include "layout.h"
#include "moe_job.h"
#include "quantized.h"
#include "scratch.h"

#if HAS_AMX

// Tokens of a group that goes to the matrix unit; fewer take dot products, which read weights once for each four
// tokens and were faster with 16 threads where caches hold the weights (docs/kernels/moe-cpu.md).
#ifndef MOE_AMX_LEAST_TOKENS
#define MOE_AMX_LEAST_TOKENS 5
#endif
// How memory of the rows that a thread multiplies next is asked for, as a block of rows is too many streams for the processor to
// follow. 0: not at all; 1: in the order in which the rows are multiplied; 2: in the order in which they lie, where that is one run.
#ifndef MOE_AMX_FETCHES
#define MOE_AMX_FETCHES 2
#endif

namespace {

constexpr int PANEL_TOKENS = 2 * AMX_ROWS;
static_assert(TASK_ROWS == 2 * AMX_ROWS && TASK_TOKENS % PANEL_TOKENS == 0 && COLUMN_STEP == AMX_ROWS && W == AMX_ROWS, "");

// Rows of pairs in a panel, whole registers.
constexpr int64_t panel_pairs(int64_t depth) { return (depth / 2 + AMX_ROWS - 1) / AMX_ROWS * AMX_ROWS; }
// Columns of the panel that begins with so many tokens left.
constexpr int panel_columns(int64_t tokens) { return tokens > AMX_ROWS ? PANEL_TOKENS : AMX_ROWS; }

// What a thread has while it takes tasks.
struct AmxWorker {
    AmxSession session;
    float* tokens;          // the group's panels
    BFloat16* numbers[2];   // a task's rows of quantised weights, of the depth that is larger
    int64_t packed = -1;    // which group: its first slot in sorted order
    explicit AmxWorker(const Job& job) : tokens(job.scratch_floats ? reserve_scratch(job.scratch_floats) : nullptr) {
        if (!tokens) return;
        numbers[0] = (BFloat16*)(tokens + job.panel_floats);
        numbers[1] = numbers[0] + TASK_ROWS * larger(job.problem->hidden, job.problem->intermediate);
    }
    // Without memory a thread leaves the tasks to others. The caller of them all has it.
    bool can_work(const Job& job) const { return tokens || !job.scratch_floats; }
};

bool takes_amx(const Job& job, const Part& part) { return job.columns && part.count >= MOE_AMX_LEAST_TOKENS; }

// The panel that begins with this column of `between`.
float* between_of(const Job& job, int64_t column) { return (float*)(job.between + column * job.between_row); }

int64_t panel_floats_of(const MoeProblem& p, int64_t slots) {
    const int64_t tokens = smaller<int64_t>(TASK_TOKENS, (slots + PANEL_TOKENS - 1) / PANEL_TOKENS * PANEL_TOKENS);
    return tokens * panel_pairs(p.hidden);
}

// The group's tokens as panels.
void pack_group(const Job& job, AmxWorker& worker, const Part& part) {
    if (worker.packed == part.first) return;
    worker.packed = part.first;
    const MoeProblem& p = *job.problem;
    const int64_t row_bytes = p.hidden * sizeof(BFloat16), pairs = panel_pairs(p.hidden);
    const char* const rows = job.hidden_states + job.first_token * row_bytes;
    for (int64_t first = 0; first < part.count; first += PANEL_TOKENS) {
        const int count = (int)smaller<int64_t>(PANEL_TOKENS, part.count - first), columns = panel_columns(count);
        float* const to = worker.tokens + first * pairs;
        const char* token[PANEL_TOKENS];
        for (int i = 0; i < count; ++i) token[i] = rows + job.slots[part.first + first + i] / p.top_k * row_bytes;
        load_query_pairs(token, count, (int)p.hidden, 1.0f, to, columns, columns / W);
        memset(to + p.hidden / 2 * columns, 0, (pairs - p.hidden / 2) * columns * sizeof(float));
    }
}

// Rows of weights, `row` bytes apart.
struct BlockOfWeights {
    const char* at;
    ptrdiff_t row;
    int rows;          // 16 or 32
    const char* next;  // null, or what to ask memory for meanwhile: as many rows from here on, as far apart
    bool in_one_run;   // whether rows lie one behind the other
    const BFloat16* scales;  // null, or of the first row's groups
    ptrdiff_t row_scales;    // from row to row of these
    int group;               // numbers of the depth that share one
};

#if WEIGHT_BITS
// Rows first, first + step, ... of the matrix as bfloat16.
void widen_rows_of(const Matrix& matrix, int64_t first, int64_t step, int64_t rows, int depth, BFloat16* to) {
    for (int64_t r = 0; r < rows; ++r) {
        const char* const row = matrix.data + (first + r * step) * matrix.row_bytes;
        for (int d = 0; d < depth; d += 2 * W, to += 2 * W) WeightsOf::store_bfloat16(row, d, to);
    }
}
#endif

// These rows for the first product with a task's tokens; memory is asked for row `next` and those after it meanwhile.
BlockOfWeights block_of(
    const Matrix& matrix, int64_t first, int64_t step, int64_t rows, [[maybe_unused]] int64_t next,
    [[maybe_unused]] int64_t depth, [[maybe_unused]] BFloat16* numbers) {
#if WEIGHT_BITS
    widen_rows_of(matrix, first, step, rows, (int)depth, numbers);
    return {
        (const char*)numbers, depth * (ptrdiff_t)sizeof(BFloat16), (int)rows, nullptr, true,
        (const BFloat16*)matrix.scales + first * matrix.groups, step * matrix.groups, (int)(depth / matrix.groups)};
#else
    const char* const after = MOE_AMX_FETCHES ? matrix.data + next * matrix.row_bytes : nullptr;
    return {matrix.data + first * matrix.row_bytes, step * matrix.row_bytes, (int)rows, after, step == 1, nullptr, 0, 0};
#endif
}

// multiply_panel of quantised weights, whose groups are multiples of 32.
void multiply_groups(const BlockOfWeights& weights, const float* panel, int columns, int depth, float* out) {
    constexpr int STEP = 2 * AMX_ROWS;
    const bool second_rows = weights.rows > AMX_ROWS, second_columns = columns > AMX_ROWS;
    alignas(64) float sums[TASK_ROWS * PANEL_TOKENS];
    for (int begin = 0, g = 0; begin < depth; begin += weights.group, ++g) {
        amx_publish(panel);
        amx_clear_sums();
        for (int d = begin; d < begin + weights.group; d += STEP)
            amx_add_products(
                weights.at + d * sizeof(BFloat16), weights.row, AMX_ROWS * weights.row, panel + d / 2 * columns,
                columns * sizeof(float), second_rows, second_columns);
        amx_store_sums(sums, PANEL_TOKENS, second_rows, second_columns);
        for (int r = 0; r < weights.rows; ++r) {
            const F scale = set1(widen(weights.scales[r * weights.row_scales + g]));
            for (int c = r * PANEL_TOKENS; c < r * PANEL_TOKENS + columns; c += W)
                store(out + c, begin == 0 ? mul(load(sums + c), scale) : madd(load(sums + c), scale, load(out + c)));
        }
    }
}

// out[row][token] = sum over the depth, a multiple of 16; PANEL_TOKENS floats from one row to the next.
void multiply_panel(const BlockOfWeights& weights, const float* panel, int columns, int depth, float* out) {
    if (weights.scales) return multiply_groups(weights, panel, columns, depth, out);
    constexpr int STEP = 2 * AMX_ROWS, BYTES = STEP * sizeof(BFloat16);
    const bool second_rows = weights.rows > AMX_ROWS, second_columns = columns > AMX_ROWS;
    const ptrdiff_t panel_row = columns * sizeof(float);
    const char* at = weights.at;
    const char* next = weights.next;
    // So many lines are asked for in a step, so far apart.
    const bool in_order = MOE_AMX_FETCHES == 2 && weights.in_one_run;
    const ptrdiff_t next_line = in_order ? BYTES : weights.row, next_step = in_order ? weights.rows * BYTES : BYTES;
    amx_publish(panel);
    amx_clear_sums();
    for (int left = depth; left >= STEP; left -= STEP, at += BYTES, panel += AMX_ROWS * columns) {
        amx_add_products(at, weights.row, AMX_ROWS * weights.row, panel, panel_row, second_rows, second_columns);
        if (!next) continue;
        for (int r = 0; r < weights.rows; r += AMX_ROWS)
#pragma GCC unroll 16
            for (int i = 0; i < AMX_ROWS; ++i) __builtin_prefetch(next + (r + i) * next_line, 0, 2);
        next += next_step;
    }
    if (depth % STEP) {
        // A register reads whole lines of 64 bytes; what lies behind a row's end is another's, or nobody's.
        alignas(64) char last[TASK_ROWS][BYTES] = {};
        for (int r = 0; r < weights.rows; ++r) memcpy(last[r], at + r * weights.row, BYTES / 2);
        amx_publish(last);
        amx_add_products(last[0], BYTES, AMX_ROWS * BYTES, panel, panel_row, second_rows, second_columns);
    }
    amx_store_sums(out, PANEL_TOKENS, second_rows, second_columns);
}

// Bias of rows first, first + step, ... to sums of all columns; no bias where `biases` is null.
void add_row_bias(const char* biases, int64_t first, int64_t step, int64_t rows, int columns, float* sums) {
    if (!biases) return;
    for (int64_t r = 0; r < rows; ++r) {
        const F bias = set1(widen(((const BFloat16*)biases)[first + r * step]));
        for (int c = 0; c < columns; c += W) store(sums + r * PANEL_TOKENS + c, add(load(sums + r * PANEL_TOKENS + c), bias));
    }
}

// 16 columns of up to 16 rows of pairs, pair(row), become rows of `rows` pairs at to(column), of the first `count` columns.
template <class Pair, class To>
INLINE void store_columns(int rows, int count, const Pair& pair, const To& to) {
    F x[W];
#pragma GCC unroll 16
    for (int r = 0; r < W; ++r) x[r] = r < rows ? pair(r) : set1(0.0f);
    transpose(x);
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i)
        if (i < count) store_first((float*)to(i), x[i], rows);
}

// Two neighbouring rows of sums, 16 columns of them, as pairs.
INLINE F pairs_of_rows(const float* sums, int pair) {
    return pack_pairs(load(sums + 2 * pair * PANEL_TOKENS), load(sums + (2 * pair + 1) * PANEL_TOKENS));
}

// Sums of the first product, of up to 32 tokens, to z, from row `z_row` on.
void keep_projected_columns(const Job& job, const Part& part, int64_t z_row, const float* gate, const float* up, int count) {
    const MoeProblem& p = *job.problem;
    const bool gated = is_gated(p.activation);
    const int64_t columns = p.intermediate * (gated ? 2 : 1);
    const int rows = (int)part.rows;
    for (int c = 0; c < count; c += W) {
        BFloat16* const z = (BFloat16*)job.z + (z_row + c) * columns;
        const auto to = [&](int64_t column) { return [=](int i) { return z + i * columns + column; }; };
        if (gated && p.interleaved) {
            for (int r = 0; r < rows; r += W)
                store_columns(
                    W, count - c,
                    [&](int i) {
                        return pack_pairs(load(gate + (r + i) * PANEL_TOKENS + c), load(up + (r + i) * PANEL_TOKENS + c));
                    },
                    to(2 * (part.row + r)));
            continue;
        }
        store_columns(rows / 2, count - c, [&](int i) { return pairs_of_rows(gate + c, i); }, to(part.row));
        if (gated)
            store_columns(
                rows / 2, count - c, [&](int i) { return pairs_of_rows(up + c, i); }, to(p.intermediate + part.row));
    }
}

// Activated values of a panel, as the second product reads them: rows / 2 rows of pairs.
void activate_panel(int64_t activation, const float* gate, const float* up, int rows, int columns, float* to) {
    const bool gated = is_gated(activation);
    for (int r = 0; r < rows; r += 2)
        for (int c = 0; c < columns; c += W) {
            F x[2];
#pragma GCC unroll 2
            for (int i = 0; i < 2; ++i) {
                const ptrdiff_t at = (r + i) * PANEL_TOKENS + c;
                x[i] = activate(activation, load(gate + at));
                if (gated) x[i] = mul(x[i], factor_of(activation, load(up + at)));
            }
            store(to + r / 2 * columns + c, pack_pairs(x[0], x[1]));
        }
}

// Rows gate, gate + step, ... of w13, and as many from `up` on where the activation has two; then row `next`.
void project_up_on_amx(
    const Job& job, AmxWorker& worker, const Part& part, int64_t gate, int64_t up, int64_t step, int64_t next) {
    const MoeProblem& p = *job.problem;
    const bool gated = is_gated(p.activation);
    const int rows = (int)part.rows;
    BlockOfWeights of_gate = block_of(job.w13, gate, step, rows, gated ? up : next, p.hidden, worker.numbers[0]), of_up;
    if (gated) of_up = block_of(job.w13, up, step, rows, next, p.hidden, worker.numbers[1]);
    pack_group(job, worker, part);
    for (int64_t first = 0; first < part.count; first += PANEL_TOKENS) {
        const int count = (int)smaller<int64_t>(PANEL_TOKENS, part.count - first), columns = panel_columns(count);
        alignas(64) float projected[2][TASK_ROWS * PANEL_TOKENS];
        const float* const panel = worker.tokens + first * panel_pairs(p.hidden);
        multiply_panel(of_gate, panel, columns, (int)p.hidden, projected[0]);
        if (gated) multiply_panel(of_up, panel, columns, (int)p.hidden, projected[1]);
        of_gate.next = of_up.next = nullptr;
        add_row_bias(job.w13_bias, gate, step, rows, columns, projected[0]);
        if (gated) add_row_bias(job.w13_bias, up, step, rows, columns, projected[1]);
        if (job.z) keep_projected_columns(job, part, part.z_row + first, projected[0], projected[1], count);
        if (!job.out) continue;
        float* const to = between_of(job, part.between + first) + part.row / 2 * columns;
        activate_panel(p.activation, projected[0], projected[1], rows, columns, to);
        // The last block's rows may end in the middle of a register.
        memset(to + rows / 2 * columns, 0, (TASK_ROWS - rows) / 2 * columns * sizeof(float));
    }
}

// Row `row` of w2 and those after it; then row `next`.
void project_down_on_amx(const Job& job, AmxWorker& worker, const Part& part, int64_t row, int64_t next) {
    const MoeProblem& p = *job.problem;
    const int rows = (int)part.rows;
    BlockOfWeights block = block_of(job.w2, row, 1, rows, next, p.intermediate, worker.numbers[0]);
    for (int64_t first = 0; first < part.count; first += PANEL_TOKENS) {
        const int count = (int)smaller<int64_t>(PANEL_TOKENS, part.count - first), columns = panel_columns(count);
        alignas(64) float projected[TASK_ROWS * PANEL_TOKENS];
        const float* const panel = between_of(job, part.between + first);
        multiply_panel(block, panel, columns, (int)p.intermediate, projected);
        block.next = nullptr;
        add_row_bias(job.w2_bias, row, 1, rows, columns, projected);
        const int32_t* const slot = job.slots + part.first + first;
        for (int c = 0; c < count; c += W)
            store_columns(
                rows / 2, count - c, [&](int i) { return pairs_of_rows(projected + c, i); },
                [&](int i) { return (BFloat16*)job.down + slot[c + i] * p.hidden + part.row; });
    }
}

}  // namespace

#endif

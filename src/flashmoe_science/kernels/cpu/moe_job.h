// A call of moe_forward.cpp, its slots sorted by expert, and the tasks of its products.
#pragma once

#include <stdint.h>
#include <string.h>

#include "numbers.h"
#include "python_call.h"

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

// Intermediate values, or entries of the result, that a task computes of a token; a multiple of DOT_ROWS.
constexpr int TASK_ROWS = 32;
// Tokens that meet a block of weight rows before the next: their rows and the block's stay in the second-level cache.
constexpr int TILE_TOKENS = 64;
// Tokens of one expert in a task.
constexpr int TASK_TOKENS = 256;
constexpr int COMBINE_TOKENS = 8;
// A thread takes the tasks that are left over this number and the threads'.
constexpr int SHARES = 4;
// Up to so many tokens are prepared for products in integers, where there are such: others share the widening of weights.
constexpr int MOST_PREPARED_TOKENS = 16;
constexpr int CACHE_LINE = 64;
// A chunk's intermediate values and results should stay in a large cache,
constexpr int64_t CHUNK_BYTES = 32 << 20;
// but every expert's weights are read once a chunk: not for fewer tokens than this, on average.
constexpr int64_t CHUNK_TOKENS_PER_EXPERT = 64;

// Weights of all experts, and their scales where they are quantised: of the tokens' type, a row's beside each other.
struct Matrix {
    const char *data, *scales;
    int64_t row_bytes, groups;
};

struct Job {
    const MoeProblem* problem;
    const char* hidden_states;
    Matrix w13, w2;
    const char *w13_bias, *w2_bias;  // null, or [expert][row], of the tokens' type
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
    char* between;           // [Part::between ...][intermediate], by rows or as moe_amx.h keeps a group's
    int64_t between_row;     // bytes from one row to the next
    bool columns;            // groups in `between` begin with whole registers, for moe_amx.h
    int64_t scratch_floats;  // of each thread, for moe_amx.h
    int64_t panel_floats;    // of these, for its tokens
    char* prepared_tokens;   // null, or rows of the chunk's tokens as IntegerRows reads them
    char* prepared_between;  // the same of `between`
    char* down;              // [slot][hidden]
    int64_t blocks;          // blocks of TASK_ROWS rows
    int64_t tasks;
    int64_t next_task;
    int64_t share;  // a thread takes one of so many parts of the tasks that are left
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

// An expert's first slot as a column for moe_amx.h is a multiple of this.
constexpr int COLUMN_STEP = 16;

// Columns for so many slots of so many experts.
int64_t columns_of(int64_t slots, int64_t experts) {
    return (slots + COLUMN_STEP - 1) / COLUMN_STEP * COLUMN_STEP + experts * COLUMN_STEP;
}

// One task: which expert, which of its slots, which rows.
struct Part {
    int64_t expert;
    int64_t first, count;  // in sorted order
    int64_t row, rows;
    int64_t z_row;         // of the first
    int64_t between;       // the first's row in Job::between, or its column
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
    part.between = job.columns ? columns_of(job.offset[low], low) + part.first - job.offset[low] : part.first;
    part.z_row = job.z ? job.z_row[low] + part.first - job.offset[low] : 0;
    return part;
}

}  // namespace

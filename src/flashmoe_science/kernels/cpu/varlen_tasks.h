// How a call is divided: into tasks that depend on lengths and options alone, so that bits do not depend on the number of threads.
#pragma once

#include <stdlib.h>

#include "few.h"
#include "varlen_problem.h"

namespace {

// No part of a row space is shorter, nor of as many as a task has: what it costs to add one is then far below what it reads.
constexpr int VARLEN_MIN_PART_KEYS = 512;
// Tasks of a call that has work for so many, about: twice the cores of a large processor.
constexpr int64_t VARLEN_WANTED_TASKS = 128;

Sequence sequence_of(const VarlenCall& call, int64_t index) {
    const int64_t first_row = call.cu_seqlens_q[index];
    const int64_t first_key = call.cu_seqlens_k ? call.cu_seqlens_k[index] : 0;
    const int64_t keys = call.seqused_k ? call.seqused_k[index] : call.cu_seqlens_k[index + 1] - first_key;
    return {
        first_row, call.cu_seqlens_q[index + 1] - first_row, keys, first_key,
        call.block_table ? call.block_table + index * call.table_row : nullptr, index};
}

int fault(VarlenCall& call, int kind, int64_t index, int64_t number) {
    call.fault_index = index;
    call.fault_number = number;
    return kind;
}

// SUCCESS, or what lies outside its tensor.
int check_lengths(const VarlenProblem& p, VarlenCall& call) {
    if (call.cu_seqlens_q[0] != 0) return fault(call, QUERY_FAULT, 0, call.cu_seqlens_q[0]);
    for (int64_t b = 0; b < call.batch; ++b) {
        const int64_t end = call.cu_seqlens_q[b + 1];
        if (end < call.cu_seqlens_q[b] || end > call.tokens) return fault(call, QUERY_FAULT, b + 1, end);
        int64_t room = call.table_pages * p.page_size;
        if (call.cu_seqlens_k) {
            const int64_t first = call.cu_seqlens_k[b], last = call.cu_seqlens_k[b + 1];
            if (first < 0 || first > call.keys) return fault(call, KEY_FAULT, b, first);
            if (last < first || last > call.keys) return fault(call, KEY_FAULT, b + 1, last);
            room = last - first;
        }
        if (call.seqused_k && (call.seqused_k[b] < 0 || call.seqused_k[b] > room))
            return fault(call, USED_FAULT, b, call.seqused_k[b]);
        if (!call.block_table) continue;
        const Sequence sequence = sequence_of(call, b);
        const Span seen = sequence.rows > 0 ? visible_to_rows(p, sequence, 0, sequence.rows) : Span{0, 0};
        for (int64_t page = seen.first / p.page_size; page * p.page_size < seen.last; ++page)
            if (sequence.pages[page] < 0 || sequence.pages[page] >= call.keys)
                return fault(call, PAGE_FAULT, b, sequence.pages[page]);
    }
    return SUCCESS;
}

// Key/value heads of a task with few rows, at most; as many as have rows that are so long together. That is a page of memory: of
// half a page, the other half is read by another task, and both wait for the page.
constexpr int MAX_FEW_HEADS = 16;
constexpr int64_t FEW_HEADS_BYTES = MEMORY_PAGE;

// Floats that sums of parts may take: 256 MiB. With split_keys there can be any number of parts.
constexpr int64_t MOST_PART_SUMS = 1 << 26;

struct Division {
    int64_t part_keys;    // of sequences with few rows, at least
    int64_t task_rows;    // of the others
    double work;          // multiply-adds
    bool in_turn;         // few rows too add their parts one after another, in one task: the same bits, and no sums of parts
};

// Rows of one row space: few of them are one task, whose keys may be cut.
int64_t space_rows(const VarlenProblem& p, const Sequence& sequence) {
    return folded_heads(p, sequence) * sequence.rows;
}
bool has_few_rows(const VarlenProblem& p, const Sequence& sequence) { return space_rows(p, sequence) <= FOLD_QUERIES; }

// No more rows share a key/value head than varlen_few.h takes. With split_keys a row's bits may not depend on how many rows come
// with it: then all take the tiles.
bool takes_few(const VarlenProblem& p, const Sequence& sequence) {
    return p.split_keys == 0 && space_rows(p, sequence) <= MAX_FEW_ROWS;
}

// Row spaces of a task of this sequence.
int64_t spaces_of_task(const VarlenProblem& p, const Sequence& sequence) {
    if (!takes_few(p, sequence)) return 1;
    const int64_t spaces = p.heads / folded_heads(p, sequence);
    const int64_t bytes = larger(p.head_dim, p.value_dim) * (p.element_type == FLOAT32 ? 4 : 2);
    int64_t most = smaller<int64_t>(spaces, smaller<int64_t>(MAX_FEW_HEADS, FEW_HEADS_BYTES / bytes));
    while (most > 1 && spaces % most != 0) --most;
    return larger<int64_t>(1, most);
}

Division divide(const VarlenProblem& p, const VarlenCall& call) {
    int64_t few_keys = 0, tiles = 0;
    double work = 0;
    for (int64_t b = 0; b < call.batch; ++b) {
        const Sequence sequence = sequence_of(call, b);
        if (sequence.rows == 0) continue;
        const Span seen = visible_to_rows(p, sequence, 0, sequence.rows);
        const int64_t spaces = p.heads / folded_heads(p, sequence);
        work += (double)sequence.rows * p.heads * (seen.last - seen.first) * (p.head_dim + p.value_dim);
        if (has_few_rows(p, sequence))
            few_keys += spaces / spaces_of_task(p, sequence) * (seen.last - seen.first);
        else
            tiles += spaces * ((space_rows(p, sequence) + TILE_QUERIES - 1) / TILE_QUERIES);
    }
    const int64_t share = (few_keys / VARLEN_WANTED_TASKS + BLOCK_KEYS) / BLOCK_KEYS * BLOCK_KEYS;
    const int64_t task_tiles =
        larger<int64_t>(1, smaller<int64_t>(tiles / VARLEN_WANTED_TASKS, MAX_TASK_QUERIES / TILE_QUERIES));
    return {
        p.split_keys > 0 ? p.split_keys : share, task_tiles * TILE_QUERIES, work,
        false};
}

// All tasks of a call, and what their sums need; counts alone where `tasks` is null.
struct Plan {
    int64_t tasks, sums, spaces;
};

Plan make_tasks(const VarlenProblem& p, const VarlenCall& call, const Division& division, Task* tasks) {
    Plan plan = {0, 0, 0};
    const auto add = [&](const Task& task) {
        if (tasks) tasks[plan.tasks] = task;
        ++plan.tasks;
    };
    // The longest first: many rows before few, and late rows of a sequence, which see more keys where it is causal.
    for (int64_t b = 0; b < call.batch; ++b) {
        const Sequence sequence = sequence_of(call, b);
        if (sequence.rows == 0 || has_few_rows(p, sequence)) continue;
        const int64_t rows = space_rows(p, sequence);
        for (int64_t first = (rows - 1) / division.task_rows * division.task_rows; first >= 0; first -= division.task_rows)
            for (int64_t head = 0; head < p.heads; head += folded_heads(p, sequence))
                add({b, head, first, smaller(rows, first + division.task_rows), 0, sequence.keys, 0, 1, 0, 0, 1});
    }
    for (int64_t b = 0; b < call.batch; ++b) {
        const Sequence sequence = sequence_of(call, b);
        if (sequence.rows == 0 || !has_few_rows(p, sequence)) continue;
        const Span seen = visible_to_rows(p, sequence, 0, sequence.rows);
        const int64_t rows = space_rows(p, sequence), fold = folded_heads(p, sequence);
        const int64_t spaces = spaces_of_task(p, sequence);
        // Cuts stand at multiples of the part's length, whatever a window hides before them.
        const int64_t wanted =
            p.split_keys > 0 ? p.split_keys
                             : larger<int64_t>(division.part_keys, up_to_multiple(VARLEN_MIN_PART_KEYS / spaces, BLOCK_KEYS));
        const int64_t start = seen.first / wanted * wanted;
        const int64_t part_keys = division.in_turn ? larger<int64_t>(1, seen.last - start) : wanted;
        const int64_t parts = larger<int64_t>(1, (seen.last - start + part_keys - 1) / part_keys);
        const int64_t floats = takes_few(p, sequence) ? (int64_t)few_part_floats(p.value_dim, rows)
                                                      : up_to_multiple(rows, TILE_QUERIES) * (p.value_dim + 2);
        for (int64_t part = 0; part < parts; ++part)
            for (int64_t head = 0; head < p.heads; head += spaces * fold) {
                const int64_t first = start + part * part_keys, space = head / fold;
                add({b, head, 0, rows, first, first + part_keys, part, parts,
                     plan.sums + space * parts * floats, plan.spaces + space, spaces});
            }
        if (parts == 1) continue;
        plan.sums += up_to_multiple(p.heads / fold * parts * floats, W);
        plan.spaces += p.heads / fold;
    }
    return plan;
}

}  // namespace

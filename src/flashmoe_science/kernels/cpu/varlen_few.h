// A few query rows that share a key/value head: decoding, with grouped heads or a few speculative tokens.
//
// In a tile they would fill a few lanes of a vector. Here lanes lie along the head dimension for the products and along keys for the
// softmax. A task has several key/value heads, so that memory can be read in the order in which it lies: rows of one head alone
// are pieces far apart in most caches, which no processor reads at its full rate.
#pragma once

#include "few.h"
#include "varlen_tasks.h"
#include "varlen_tile.h"

namespace {

struct FewWorkspace {
    FewHead head[MAX_FEW_HEADS];
    FewRows key, value;  // of this block
    float* sums;         // of a task that has all keys
    int64_t asked_to;    // the first key that this thread does not read next
};

size_t few_floats(int64_t head_dim, int64_t value_dim) {
    return MAX_FEW_HEADS * (few_head_floats(head_dim, value_dim) + few_part_floats(value_dim, MAX_FEW_ROWS));
}

void arrange_few(FewWorkspace& w, float* at, int64_t head_dim, int64_t value_dim) {
    for (FewHead& head : w.head) {
        arrange_few_head(head, at, head_dim, value_dim);
        at += few_head_floats(head_dim, value_dim);
    }
    w.sums = at;
}

// Keys [first, last) of a sequence for `heads` heads from `head` on, and those up to `end` that are asked for meanwhile. Strides
// are of (page, token, head).
void find_rows(
    const VarlenProblem& p, const Sequence& sequence, const char* base, const int64_t stride[3], int64_t bytes, int64_t head,
    int heads, int64_t first, int64_t last, int64_t end, FewRows& rows) {
    rows.base = base + head * stride[2];
    rows.head_row = stride[2];
    rows.heads = heads;
    divide_into_windows(rows, bytes, first, last);
    ptrdiff_t* offset = rows.offset;
    ptrdiff_t* const behind = offset + rows.keys + rows.ahead();
    int64_t page = sequence.pages ? first / p.page_size : 0;
    int64_t row = sequence.pages ? first % p.page_size : sequence.first_key + first;
    for (last = smaller(last + rows.ahead(), end); first < last; row = 0, ++page) {
        const int64_t left = sequence.pages ? smaller(last - first, p.page_size - row) : last - first;
        const ptrdiff_t start = sequence.pages ? sequence.pages[page] * stride[0] : 0;
        for (int64_t i = row; i < row + left; ++i) *offset++ = start + i * stride[1];
        first += left;
    }
    for (; offset < behind; ++offset) *offset = offset[-1];
    choose_asked(rows);
}

// Keys of a block that a row sees: [low, high), and of those from `tree` on what its tree shows.
struct SeenKeys {
    int low, tree, high;
};

SeenKeys seen_in_block(const VarlenTile& tile, int r, int64_t first, int keys) {
    const int low = (int)larger<int64_t>(0, smaller<int64_t>(keys, tile.seen[r].first - first));
    const int high = (int)larger<int64_t>(low, smaller<int64_t>(keys, tile.seen[r].last - first));
    return {low, (int)larger<int64_t>(low, smaller<int64_t>(high, tile.tree[r].first - first)), high};
}

// Products of row r become weights, as store_few_weights leaves them; what was summed before is to be multiplied by rescale[r].
template <bool PAIRS>
void weigh_few(const VarlenJob& job, FewHead& head, const VarlenTile& tile, int r, int64_t first, int keys) {
    float* const s = head.scores + r * BLOCK_KEYS;
    const SeenKeys seen = seen_in_block(tile, r, first, keys);
    const auto hide = [&] {
        for (int k = 0; k < seen.low; ++k) s[k] = -__builtin_inff();
        for (int k = seen.high; k < up_to_multiple(keys, W); ++k) s[k] = -__builtin_inff();
        for (int k = seen.tree; k < seen.high; ++k)
            if (tile.tree[r].hides(first + k)) s[k] = -__builtin_inff();
    };
    hide();
    if (job.cap_factor != 0.0f) {
        for (int k = 0; k < keys; k += W) store(s + k, tanh_of(mul(load(s + k), set1(job.cap_factor))));
        hide();
    }
    if (tile.slope[r] != 0.0f)
        for (int k = seen.low; k < seen.high; ++k) {
            const float ahead = (float)(tile.position[r] - first) - (float)k;
            s[k] -= tile.slope[r] * (ahead < 0 ? -ahead : ahead);
        }
    weigh_few_row<PAIRS>(head, r, keys, job.scale);
}

// Visible products alone, row by row: a weight of zero does not hide a NaN.
template <class T, bool PAIRS>
void add_seen_few(const FewHead& head, int h, const VarlenTile& tile, const FewRows& value, int64_t first, int value_dim) {
    for (int r = 0; r < tile.rows; ++r) {
        const SeenKeys seen = seen_in_block(tile, r, first, value.keys);
        const auto add_keys = [&](const FewSpan& span) {
            add_values_of_span<T, 1, PAIRS>(head, r, value.of_head(h), value, span, value_dim);
        };
        add_keys({seen.low, seen.tree, true, false});
        for (int k = seen.tree; k < seen.high; ++k)
            if (!tile.tree[r].hides(first + k)) add_keys({k, k + 1, false, false});
        add_keys({seen.high, seen.high, false, true});
    }
}

// The rows of the task's heads, at most R of each, against keys [keys.first, keys.last).
template <class T, int R>
void attend_few(
    const VarlenJob& job, FewWorkspace& w, const Sequence& sequence, const Task& task, const VarlenTile* tile, Span keys) {
    const int64_t end = smaller(tile->keys.last, w.asked_to);
    constexpr bool PAIRS = FEW_PAIRS<T, R>;
    const VarlenProblem& p = *job.problem;
    const int head_dim = (int)p.head_dim, value_dim = (int)p.value_dim, heads = (int)task.spaces;
    const int64_t kv_head = task.head / (p.heads / p.kv_heads);
    for (int h = 0; h < heads; ++h) start_few<T, R>(w.head[h], tile[h].query_row, tile[h].rows, head_dim, value_dim);
    for (int64_t first = keys.first; first < keys.last;) {
        const int64_t last = smaller((first / BLOCK_KEYS + 1) * BLOCK_KEYS, keys.last);
        const int count = (int)(last - first);
        const auto find = [&](const char* base, const int64_t stride[3], int dimension, FewRows& rows) {
            find_rows(p, sequence, base, stride, dimension * sizeof(T), kv_head, heads, first, last, end, rows);
        };
        find(job.call->key, p.key_stride, head_dim, w.key);
        find(job.call->value, p.value_stride, value_dim, w.value);
        score_few<T, R>(w.head, w.key, head_dim);
        const bool mask = first < tile->common.first || last > tile->common.last;
        for (int h = 0; h < heads; ++h) {
            FewHead& head = w.head[h];
            for (int r = 0; r < tile[h].rows; ++r) weigh_few<PAIRS>(job, head, tile[h], r, first, count);
            head.strange = false;
            for (int k = 0; mask && k < count; ++k)
                head.strange |= has_nonfinite<T>(w.value.of_head(h) + w.value.offset[k], 0, 1, value_dim);
            if (head.strange) add_seen_few<T, PAIRS>(head, h, tile[h], w.value, first, value_dim);
        }
        add_values_few<T, R, PAIRS>(w.head, w.value, value_dim);
        first = last;
    }
}

// The sums of a part of the keys, of one head.
float* few_part(const VarlenJob& job, const Task& task, int head, int64_t part) {
    return job.part_sums + task.sums +
           (head * task.parts + part) * few_part_floats(job.problem->value_dim, task.last_row);
}

// Rows of the result from what store_few_part leaves.
template <class T, bool PAIRS>
void finish_few(const VarlenJob& job, const VarlenTile& tile, const float* sums) {
    const int out_row = few_dimension(job.problem->value_dim);
    for (int r = 0; r < tile.rows; ++r) {
        const float by =
            finish_row<T>(job, tile, r, sums[tile.rows * out_row + r], sums[tile.rows * (out_row + 1) + r]);
        write_few_row<T, PAIRS, DIVIDES<T>>(sums + r * out_row, by, (int)job.problem->value_dim, (T*)tile.out_row[r]);
    }
}

template <class T>
void run_few(const VarlenJob& job, FewWorkspace& w, const Task& task, VarlenTile* tile) {
    const VarlenProblem& p = *job.problem;
    const Sequence sequence = sequence_of(*job.call, task.sequence);
    const int rows = (int)task.last_row, heads = (int)task.spaces, out_row = few_dimension(p.value_dim);
    for (int h = 0; h < heads; ++h) {
        tile[h].rows = rows;
        describe_tile(job, sequence, task.head + h * folded_heads(p, sequence), 0, tile[h]);
    }
    const Span keys = {larger(tile->keys.first, task.first_key), smaller(tile->keys.last, task.last_key)};
    with_few_rows(rows, [&](auto most) { attend_few<T, most.rows>(job, w, sequence, task, tile, keys); });
    const auto sums_of = [&](int h, int64_t part) {
        return task.parts > 1 ? few_part(job, task, h, part) : w.sums + h * few_part_floats(p.value_dim, rows);
    };
    for (int h = 0; h < heads; ++h) store_few_part(w.head[h], rows, out_row, sums_of(h, task.part));
    if (task.parts > 1) {
        if (__atomic_add_fetch(job.parts_done + task.space, 1, __ATOMIC_ACQ_REL) != task.parts) return;
        for (int h = 0; h < heads; ++h)
            for (int64_t part = 1; part < task.parts; ++part)
                add_few_part(sums_of(h, 0), sums_of(h, part), rows, out_row, job.scale);
    }
    for (int h = 0; h < heads; ++h)
        rows == 1 ? finish_few<T, FEW_PAIRS<T, 1>>(job, tile[h], sums_of(h, 0))
                  : finish_few<T, FEW_PAIRS<T, 2>>(job, tile[h], sums_of(h, 0));
}

}  // namespace

// A few query rows that share a key/value head: decoding, with grouped heads or a few speculative tokens.
//
// In a tile they would fill a few lanes of a vector. Here lanes lie along the head dimension for the products and along keys for the
// softmax. A task has several key/value heads, so that memory can be read in the order in which it lies: rows of one head alone
// are pieces far apart in most caches, which no processor reads at its full rate. While a block's keys are multiplied its values
// are asked for, and while those are, the keys of the next block.
#pragma once

#include "varlen_few_products.h"
#include "varlen_tasks.h"
#include "varlen_tile.h"

namespace {

constexpr int MAX_FEW_VALUE_DIM = 512;
// What a block's later products leave as it is.
constexpr float ONES[8] = {1, 1, 1, 1, 1, 1, 1, 1};

// Keys that a head is multiplied with before the next head is.
constexpr int FEW_KEYS_AT_ONCE = 16;

// One key/value head of a task: its rows' queries, and what is summed.
struct FewHead {
    float *query, *out;   // [rows][dimension, up to a multiple of 2 * W]
    float* scores;        // [rows][BLOCK_KEYS]
    float maximum[MAX_FEW_ROWS], rescale[MAX_FEW_ROWS];
    float sum[MAX_FEW_ROWS][W];  // lanes have each their own part of it
    bool strange;         // this block has hidden keys, and values that are not all finite
};

struct FewWorkspace {
    FewHead head[MAX_FEW_HEADS];
    FewRows key[2], value;  // of this block and of the next
    float* sums;            // of a task that has all keys
};

size_t few_floats(int64_t head_dim, int64_t value_dim) {
    return MAX_FEW_HEADS * MAX_FEW_ROWS * (size_t)(few_dimension(head_dim) + 2 * few_dimension(value_dim) + BLOCK_KEYS + 2);
}

void arrange_few(FewWorkspace& w, float* at, int64_t head_dim, int64_t value_dim) {
    for (FewHead& head : w.head) {
        head.query = at;
        head.out = head.query + MAX_FEW_ROWS * few_dimension(head_dim);
        head.scores = head.out + MAX_FEW_ROWS * few_dimension(value_dim);
        at = head.scores + MAX_FEW_ROWS * BLOCK_KEYS;
    }
    w.sums = at;
}

// Keys [first, last) of a sequence for `heads` heads from `head` on. Strides are of (page, token, head).
void find_rows(
    const VarlenProblem& p, const Sequence& sequence, const char* base, const int64_t stride[3], int64_t bytes, int64_t head,
    int heads, int64_t first, int64_t last, FewRows& rows) {
    rows.base = base + head * stride[2];
    rows.head_row = stride[2];
    rows.heads = heads;
    rows.keys = (int)(last - first);
    rows.bytes = (int)bytes;
    rows.key_row = stride[1];
    ptrdiff_t* offset = rows.offset;
    int64_t page = sequence.pages ? first / p.page_size : 0;
    int64_t row = sequence.pages ? first % p.page_size : sequence.first_key + first;
    while (first < last) {
        const int64_t left = sequence.pages ? smaller(last - first, p.page_size - row) : last - first;
        const ptrdiff_t start = sequence.pages ? sequence.pages[page] * stride[0] : 0;
        for (int64_t i = row; i < row + left; ++i) *offset++ = start + i * stride[1];
        first += left;
        row = 0;
        ++page;
    }
}

float sum_of_lanes(const float lane[W]) {
    float sum = 0.0f;
    for (int i = 0; i < W; ++i) sum += lane[i];
    return sum;
}

// Products of row r become weights, as store_few_weights leaves them; what was summed before is to be multiplied by rescale[r].
template <bool PAIRS>
void weigh_few(const VarlenJob& job, FewHead& head, const VarlenTile& tile, int r, int64_t first, int keys) {
    float* const s = head.scores + r * BLOCK_KEYS;
    const int low = (int)larger<int64_t>(0, smaller<int64_t>(keys, tile.seen[r].first - first));
    const int high = (int)larger<int64_t>(low, smaller<int64_t>(keys, tile.seen[r].last - first));
    const auto hide = [&] {
        for (int k = 0; k < low; ++k) s[k] = -__builtin_inff();
        for (int k = high; k < up_to_multiple(keys, W); ++k) s[k] = -__builtin_inff();
        for (int k = (int)larger<int64_t>(low, smaller<int64_t>(high, tile.tree[r].first - first)); k < high; ++k)
            if (tile.tree[r].hides(first + k)) s[k] = -__builtin_inff();
    };
    hide();
    if (job.cap_factor != 0.0f) {
        for (int k = 0; k < keys; k += W) store(s + k, tanh_of(mul(load(s + k), set1(job.cap_factor))));
        hide();
    }
    if (tile.slope[r] != 0.0f)
        for (int k = low; k < high; ++k) {
            const float ahead = (float)(tile.position[r] - first) - (float)k;
            s[k] -= tile.slope[r] * (ahead < 0 ? -ahead : ahead);
        }
    F highest = set1(head.maximum[r]);
    for (int k = 0; k < keys; k += W) highest = max(load(s + k), highest);
    const float most = highest_lane(highest);
    // As in raise_maxima: where there is nothing but minus infinity weights are 0, and where it did not move the factor is 1.
    const float base = most == -__builtin_inff() ? 0.0f : most;
    if (most == head.maximum[r]) {
        head.rescale[r] = 1.0f;
    } else {
        const F t = set1((head.maximum[r] - base) * job.scale);
        F factor;
        exp2_to_zero<6, 1>(&t, &factor);
        float lane[W];
        store(lane, factor);
        head.rescale[r] = lane[0];
        head.maximum[r] = most;
    }
    F total = set1(0.0f);
    for (int k = 0; k < keys; k += W) {
        const F t = mul(sub(load(s + k), set1(base)), set1(job.scale));
        F weight;
        exp2_to_zero<6, 1>(&t, &weight);
        total = add(total, store_few_weights<PAIRS>(s, k, weight));
    }
    store(head.sum[r], madd(load(head.sum[r]), set1(head.rescale[r]), total));
}

template <class T, int R>
void start_few(const VarlenProblem& p, FewHead& head, const VarlenTile& tile) {
    const int query_row = few_dimension(p.head_dim), out_row = few_dimension(p.value_dim);
    memset(head.query, 0, R * query_row * sizeof(float));
    memset(head.out, 0, R * out_row * sizeof(float));
    for (int r = 0; r < R; ++r) {
        head.maximum[r] = -__builtin_inff();
        head.rescale[r] = 1.0f;
        memset(head.sum[r], 0, sizeof head.sum[r]);
        if (r < tile.rows) load_few_query<T>(tile.query_row[r], (int)p.head_dim, head.query + r * query_row);
    }
}

// Visible products alone, row by row: a weight of zero does not hide a NaN.
template <class T, bool PAIRS>
void add_seen_few(
    const FewHead& head, const VarlenTile& tile, const FewRows& value, const char* base, int64_t first, int value_dim) {
    const int out_row = few_dimension(value_dim);
    FewFetch nothing(nullptr);
    for (int r = 0; r < tile.rows; ++r) {
        const int low = (int)larger<int64_t>(0, tile.seen[r].first - first);
        const int high = (int)smaller<int64_t>(value.keys, tile.seen[r].last - first);
        const int tree = (int)larger<int64_t>(low, smaller<int64_t>(high, tile.tree[r].first - first));
        const auto add_keys = [&](int from, int to, const float* rescale) {
            add_values_few<T, 1, PAIRS>(
                few_weights<PAIRS>(head.scores + r * BLOCK_KEYS, from), base, value.offset + from, to - from, value_dim,
                rescale, head.out + r * out_row, out_row, nothing);
        };
        add_keys(low, tree, head.rescale + r);
        for (int k = tree; k < high; ++k)
            if (!tile.tree[r].hides(first + k)) add_keys(k, k + 1, ONES);
    }
}

// Where the first block of keys lies of the task that is likely this thread's next one; false if it has no few rows.
bool find_next_task(const VarlenJob& job, FewRows& rows) {
    const VarlenProblem& p = *job.problem;
    const int64_t index = __atomic_load_n(&job.next_task, __ATOMIC_RELAXED);
    if (index >= job.task_count) return false;
    const Task& task = job.tasks[index];
    const Sequence sequence = sequence_of(*job.call, task.sequence);
    if (!takes_few(p, sequence)) return false;
    const Span seen = visible_to_rows(p, sequence, 0, sequence.rows);
    const int64_t first = larger(seen.first, task.first_key);
    const int64_t last = smaller((first / BLOCK_KEYS + 1) * BLOCK_KEYS, smaller(seen.last, task.last_key));
    if (first >= last) return false;
    const int64_t bytes = p.head_dim * (p.element_type == FLOAT32 ? 4 : 2);
    find_rows(
        p, sequence, job.call->key, p.key_stride, bytes, task.head / (p.heads / p.kv_heads), (int)task.spaces, first, last,
        rows);
    return true;
}

// The rows of the task's heads, at most R of each, against keys [keys.first, keys.last).
template <class T, int R>
void attend_few(
    const VarlenJob& job, FewWorkspace& w, const Sequence& sequence, const Task& task, const VarlenTile* tile, Span keys) {
    constexpr bool PAIRS = FEW_PAIRS<T, R>;
    const VarlenProblem& p = *job.problem;
    const int head_dim = (int)p.head_dim, value_dim = (int)p.value_dim, heads = (int)task.spaces;
    const int query_row = few_dimension(head_dim), out_row = few_dimension(value_dim);
    const int64_t kv_head = task.head / (p.heads / p.kv_heads);
    const auto find_keys = [&](int64_t first, FewRows& rows) {
        const int64_t last = smaller((first / BLOCK_KEYS + 1) * BLOCK_KEYS, keys.last);
        find_rows(p, sequence, job.call->key, p.key_stride, head_dim * sizeof(T), kv_head, heads, first, last, rows);
    };
    for (int h = 0; h < heads; ++h) start_few<T, R>(p, w.head[h], tile[h]);
    FewRows &value = w.value, *key = &w.key[0], *next = &w.key[1];
    if (keys.first < keys.last) {
        find_keys(keys.first, *key);
        FewFetch all(key);
        for (int line = 0; line < key->keys * heads * up_to_multiple(key->bytes, CACHE_LINE) / CACHE_LINE; ++line) all.line();
    }
    for (int64_t first = keys.first; first < keys.last;) {
        const int count = key->keys;
        const int64_t last = first + count;
        find_rows(
            p, sequence, job.call->value, p.value_stride, value_dim * sizeof(T), kv_head, heads, first, last, value);
        FewFetch fetch_value(&value);
        for (int k = 0; k < count; k += FEW_KEYS_AT_ONCE)
            for (int h = 0; h < heads; ++h)
                score_few<T, R>(
                    w.head[h].query, query_row, key->base + h * key->head_row, key->offset + k,
                    smaller(FEW_KEYS_AT_ONCE, count - k), head_dim, w.head[h].scores + k, fetch_value);
        const bool mask = first < tile->common.first || last > tile->common.last;
        for (int h = 0; h < heads; ++h) {
            FewHead& head = w.head[h];
            for (int r = 0; r < tile[h].rows; ++r) weigh_few<PAIRS>(job, head, tile[h], r, first, count);
            head.strange = false;
            const char* const base = value.base + h * value.head_row;
            for (int k = 0; mask && k < count; ++k) head.strange |= has_nonfinite<T>(base + value.offset[k], 0, 1, value_dim);
            if (head.strange) add_seen_few<T, PAIRS>(head, tile[h], value, base, first, value_dim);
        }
        bool more = last < keys.last;
        if (more)
            find_keys(last, *next);
        else
            more = find_next_task(job, *next);
        FewFetch fetch_key(more ? next : nullptr);
        for (int k = 0; k < count; k += FEW_KEYS_AT_ONCE)
            for (int h = 0; h < heads; ++h) {
                FewHead& head = w.head[h];
                if (head.strange) continue;
                add_values_few<T, R, PAIRS>(
                    few_weights<PAIRS>(head.scores, k), value.base + h * value.head_row, value.offset + k, smaller(FEW_KEYS_AT_ONCE, count - k),
                    value_dim, k == 0 ? head.rescale : ONES, head.out, out_row,
                    fetch_key);
            }
        FewRows* const used = key;
        key = next;
        next = used;
        first = last;
    }
}

// Sums of a part of the keys for one head as other threads see them: [rows][out_row], then maxima, then sums.
float* few_part(const VarlenJob& job, const Task& task, int head, int64_t part) {
    return job.part_sums + task.sums + (head * task.parts + part) * few_part_floats(*job.problem, task.last_row);
}

void store_few_part(const FewHead& head, int rows, int out_row, float* to) {
    memcpy(to, head.out, (size_t)rows * out_row * sizeof(float));
    memcpy(to + rows * out_row, head.maximum, rows * sizeof(float));
    for (int r = 0; r < rows; ++r) to[rows * out_row + rows + r] = sum_of_lanes(head.sum[r]);
}

// A part's sums added to those of the parts before it: see add_part.
void add_few_part(const VarlenJob& job, float* total, const float* part, int rows, int out_row) {
    for (int r = 0; r < rows; ++r) {
        float* const maximum = total + rows * out_row + r;
        const float before = *maximum, here = part[rows * out_row + r];
        const float highest = here > before ? here : before;
        const float base = highest == -__builtin_inff() ? 0.0f : highest;
        const F t[2] = {set1((before - base) * job.scale), set1((here - base) * job.scale)};
        F factor[2];
        exp2_to_zero<6, 2>(t, factor);
        if (before == highest) factor[0] = set1(1.0f);
        if (here == highest) factor[1] = set1(1.0f);
        const auto add_to = [&](float* to, const float* x) {
            store(to, madd(load(x), factor[1], mul(load(to), factor[0])));
        };
        for (int d = 0; d < out_row; d += W) add_to(total + r * out_row + d, part + r * out_row + d);
        float old[W], more[W];
        store(old, mul(set1(maximum[rows]), factor[0]));
        store(more, madd(set1(part[rows * out_row + rows + r]), factor[1], load(old)));
        maximum[rows] = more[0];
        *maximum = highest;
    }
}

// Rows of the result from what store_few_part leaves.
template <class T, bool PAIRS>
void finish_few(const VarlenJob& job, const VarlenTile& tile, const float* sums) {
    const int value_dim = (int)job.problem->value_dim, out_row = few_dimension(value_dim);
    for (int r = 0; r < tile.rows; ++r) {
        const float by = finish_row<T>(
            job, tile, r, sums[tile.rows * out_row + r], sums[tile.rows * (out_row + 1) + r]);
        float row[MAX_FEW_VALUE_DIM];
        for (int d = 0; d < value_dim; ++d) row[d] = sums[r * out_row + few_position<T, PAIRS>(d)];
        for (int d = 0; d < value_dim; d += W) {
            const F x = load_first(row + d, value_dim - d);
            store_first((T*)tile.out_row[r] + d, DIVIDES<T> ? div(x, set1(by)) : mul(x, set1(by)), value_dim - d);
        }
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
    if (rows == 1)
        attend_few<T, 1>(job, w, sequence, task, tile, keys);
    else if (rows == 2)
        attend_few<T, 2>(job, w, sequence, task, tile, keys);
    else if (rows <= 4)
        attend_few<T, 4>(job, w, sequence, task, tile, keys);
    else
        attend_few<T, MAX_FEW_ROWS>(job, w, sequence, task, tile, keys);
    const auto sums_of = [&](int h, int64_t part) {
        return task.parts > 1 ? few_part(job, task, h, part) : w.sums + h * few_part_floats(p, rows);
    };
    for (int h = 0; h < heads; ++h) store_few_part(w.head[h], rows, out_row, sums_of(h, task.part));
    if (task.parts > 1) {
        if (__atomic_add_fetch(job.parts_done + task.space, 1, __ATOMIC_ACQ_REL) != task.parts) return;
        for (int h = 0; h < heads; ++h)
            for (int64_t part = 1; part < task.parts; ++part)
                add_few_part(job, sums_of(h, 0), sums_of(h, part), rows, out_row);
    }
    for (int h = 0; h < heads; ++h)
        rows == 1 ? finish_few<T, FEW_PAIRS<T, 1>>(job, tile[h], sums_of(h, 0))
                  : finish_few<T, FEW_PAIRS<T, 2>>(job, tile[h], sums_of(h, 0));
}

}  // namespace

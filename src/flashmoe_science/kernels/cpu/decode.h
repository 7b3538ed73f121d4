// A few query rows for a key/value head, without a mask: decoding, also with grouped heads. In a tile they would fill a few lanes;
// here lanes lie along the head dimension for the products and along keys for the softmax, see few_products.h.
#pragma once

#include <math.h>

#include "few.h"
#include "split.h"

namespace {

struct DecodeWorkspace {
    FewHead head;
    FewRows key, value;  // of this block
    float* sums;         // of a row space whose keys are not split
};

size_t decode_floats(const Job& job) {
    return few_head_floats(job.problem->head_dim, job.problem->head_dim) + few_part_floats(job.problem->head_dim, job.rows);
}

void arrange_decode(const Job& job, DecodeWorkspace& w, float* at) {
    arrange_few_head(w.head, at, job.problem->head_dim, job.problem->head_dim);
    w.sums = at + few_head_floats(job.problem->head_dim, job.problem->head_dim);
}

bool takes_few(const Job& job) { return !job.causal && job.rows <= MAX_FEW_ROWS; }

// How the rows of the row space lie: its first head's, then the next one's.
template <class Visit>
void for_rows_of_space(const Job& job, int64_t space, Visit visit) {
    const AttentionProblem& p = *job.problem;
    const int64_t spaces = p.heads / job.fold;
    for (int64_t row = 0; row < job.rows; ++row)
        visit((int)row, space / spaces, space % spaces * job.fold + row / p.seqlen_q, row % p.seqlen_q);
}

// The queries' addresses; copies with another sign, or of zeros, where that is what the scale is.
template <class T>
void find_queries(const Job& job, const FewHead& head, int64_t space, const char* query[MAX_FEW_ROWS]) {
    const AttentionProblem& p = *job.problem;
    for_rows_of_space(job, space, [&](int row, int64_t batch, int64_t of_head, int64_t position) {
        query[row] = job.query + batch * p.query_stride[0] + of_head * p.query_stride[1] + position * p.query_stride[2];
        if (job.query_factor == 1.0f) return;
        T* const copy = (T*)(head.block + row * few_dimension(p.head_dim));
        for (int d = 0; d < (int)p.head_dim; ++d) narrow(copy + d, widen(((const T*)query[row])[d]) * job.query_factor);
        query[row] = (const char*)copy;
    });
}

// Rows [first, last) of a head, and those up to `end` that are asked for meanwhile. Most are as those of the block before, but
// for where they begin.
void find_rows(const char* base, ptrdiff_t row, int64_t bytes, int64_t first, int64_t last, int64_t end, FewRows& rows) {
    const int keys_before = rows.keys, in_window_before = rows.in_window;
    rows.base = base + (NO_LOADS ? 0 : first * row);
    rows.head_row = 0;
    rows.heads = 1;
    divide_into_windows(rows, bytes, first, last);
    const int most = rows.keys + rows.ahead(), there = (int)smaller<int64_t>(most, end - first);
    if (rows.keys == keys_before && rows.in_window == in_window_before && there == most) return;
    for (int i = 0; i < there; ++i) rows.offset[i] = i * row;
    for (int i = there; i < most; ++i) rows.offset[i] = rows.offset[there - 1];
    choose_asked(rows);
}

// The rows of a row space, at most R, against keys [first_key, last_key).
template <class T, int R>
void attend_few(const Job& job, DecodeWorkspace& w, int64_t space, int64_t first_key, int64_t last_key) {
    constexpr bool PAIRS = FEW_PAIRS<T, R>;
    const AttentionProblem& p = *job.problem;
    const int head_dim = (int)p.head_dim;
    const int64_t spaces = p.heads / job.fold, batch = space / spaces;
    const int64_t kv_head = space % spaces * job.fold / (p.heads / p.kv_heads);
    const char* const key = job.key + batch * p.key_stride[0] + kv_head * p.key_stride[1];
    const char* const value = job.value + batch * p.value_stride[0] + kv_head * p.value_stride[1];
    FewHead& head = w.head;
    const char* query[MAX_FEW_ROWS];
    find_queries<T>(job, head, space, query);
    start_few<T, R>(head, query, (int)job.rows, head_dim, head_dim);
    w.key.keys = w.value.keys = 0;
    for (int64_t first = first_key; first < last_key; first += BLOCK_KEYS) {
        const int64_t last = smaller(first + BLOCK_KEYS, last_key);
        find_rows(key, p.key_stride[2], head_dim * sizeof(T), first, last, last_key, w.key);
        score_few<T, R>(&head, w.key, head_dim);
        for (int r = 0; r < (int)job.rows; ++r) {
            for (int k = w.key.keys; k < up_to_multiple(w.key.keys, W); ++k)
                head.scores[r * BLOCK_KEYS + k] = -__builtin_inff();
            weigh_few_row<PAIRS>(head, r, w.key.keys, job.scale);
        }
        find_rows(value, p.value_stride[2], head_dim * sizeof(T), first, last, last_key, w.value);
        add_values_few<T, R, PAIRS>(&head, w.value, head_dim);
    }
}

// The result's rows from what store_few_part leaves.
template <class T, bool PAIRS>
void finish_few(const Job& job, const float* sums, int64_t space) {
    // The division's rounding is below that of a 16-bit result by a product too.
    constexpr bool DIVIDE = sizeof(T) == sizeof(float);
    const AttentionProblem& p = *job.problem;
    const int row_floats = few_dimension(p.head_dim);
    const float* const maximum = sums + job.rows * row_floats;
    for_rows_of_space(job, space, [&](int row, int64_t batch, int64_t head, int64_t position) {
        const float sum = maximum[job.rows + row];
        // Without keys zero.
        const float by = p.seqlen_k == 0 ? (DIVIDE ? 1.0f : 0.0f) : DIVIDE ? sum : 1.0f / sum;
        char* const out = job.out + batch * p.out_stride[0] + head * p.out_stride[1] + position * p.out_stride[2];
        write_few_row<T, PAIRS, DIVIDE>(sums + row * row_floats, by, (int)p.head_dim, (T*)out);
        if (job.lse != nullptr)
            job.lse[(batch * p.heads + head) * p.seqlen_q + position] =
                p.seqlen_k == 0 ? -__builtin_inff()
                                : (float)(maximum[row] * ((double)job.scale / LOG2_E) + log((double)sum));
    });
}

// A part of a row space's keys, and the result of the space where it is the last part that is finished.
template <class T>
void run_few(const Job& job, DecodeWorkspace& w, int64_t space, int64_t part, int64_t first_key, int64_t last_key) {
    const int rows = (int)job.rows, row = few_dimension(job.problem->head_dim);
    with_few_rows(rows, [&](auto most) { attend_few<T, most.rows>(job, w, space, first_key, last_key); });
    const size_t floats = few_part_floats(job.problem->head_dim, rows);
    float* const sums = job.parts > 1 ? job.part_sums + space * job.parts * floats : w.sums;
    store_few_part(w.head, rows, row, sums + part * floats);
    if (job.parts > 1) {
        if (!is_last_part(job, space)) return;
        for (int64_t other = 1; other < job.parts; ++other)
            add_few_part(sums, sums + other * floats, rows, row, job.scale);
    }
    rows == 1 ? finish_few<T, FEW_PAIRS<T, 1>>(job, sums, space) : finish_few<T, FEW_PAIRS<T, 2>>(job, sums, space);
}

}  // namespace

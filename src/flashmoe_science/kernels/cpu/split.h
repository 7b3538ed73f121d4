// Keys split over threads, where there are few rows: each part of the keys has sums of its own, and whoever finishes the last
// part of a row space combines them, in their order.
//
// How many parts there are depends on the shape alone, so the bits do not depend on the number of threads.
#pragma once

#include "exp2.h"
#include "few.h"

namespace {

// No part is shorter: what it costs to combine one is then far below what it reads.
constexpr int MIN_PART_KEYS = 512;
// Row spaces times parts, about: twice the cores of a large processor.
constexpr int64_t WANTED_PARTS = 128;

// How many keys a part of this job has: a multiple of BLOCK_KEYS; all of them where keys are not split.
int64_t keys_of_part(const Job& job) {
    const int64_t keys = job.problem->seqlen_k;
    const int64_t wanted = (WANTED_PARTS + job.row_spaces - 1) / job.row_spaces;
    const int64_t parts = smaller(keys / MIN_PART_KEYS, job.rows > FOLD_QUERIES ? 1 : wanted);
    if (parts < 2) return larger<int64_t>(keys, 1);
    return ((keys + parts - 1) / parts + BLOCK_KEYS - 1) / BLOCK_KEYS * BLOCK_KEYS;
}

// Floats that the sums of one part take.
size_t part_floats(const Job& job) {
    if (job.few) return few_part_floats(job.problem->head_dim, job.rows);
    return (size_t)job.task_tiles * job.tile_queries * (job.problem->head_dim + 2);
}

// The sums of this part take the place of the workspace's.
void use_part(const Job& job, Workspace& w, int64_t space, int64_t part) {
    const size_t ld = job.tile_queries;
    float* at = job.part_sums + (space * job.parts + part) * part_floats(job);
    for (int t = 0; t < job.task_tiles; ++t) {
        w.tile[t].out = at;
        w.tile[t].maximum = at + ld * job.problem->head_dim;
        w.tile[t].sum = w.tile[t].maximum + ld;
        at = w.tile[t].sum + ld;
    }
}

// Whether all other parts of this row space are finished. True once for each space.
bool is_last_part(const Job& job, int64_t space) {
    return __atomic_add_fetch(job.parts_done + space, 1, __ATOMIC_ACQ_REL) == job.parts;
}

// The first part's maxima, sums and outputs of a tile become those of all parts, for the queries in the vector `column`.
void combine_column(const Job& job, const Tile& first, int column) {
    const size_t stride = part_floats(job);
    const int at = column * W, ld = job.tile_queries, head_dim = (int)job.problem->head_dim;
    F highest = load(first.maximum + at);
    for (int64_t p = 1; p < job.parts; ++p) highest = max(load(first.maximum + p * stride + at), highest);
    // As in raise_maxima: where there is nothing but minus infinity weights are 0.
    const F base = select_equal(highest, set1(-__builtin_inff()), set1(0.0f), highest);
    for (int64_t p = 0; p < job.parts; ++p) {
        const float* const from = first.out + p * stride;
        const F maximum = load(first.maximum + p * stride + at);
        const F t = mul(sub(maximum, base), set1(job.scale));
        F factor;
        exp2_to_zero<6, 1>(&t, &factor);
        factor = select_equal(maximum, highest, set1(1.0f), factor);
        const auto add_part = [&](float* to, const float* x) __attribute__((always_inline)) {
            store(to, p == 0 ? mul(load(x), factor) : madd(load(x), factor, load(to)));
        };
        add_part(first.sum + at, first.sum + p * stride + at);
        for (int d = 0; d < head_dim; ++d) add_part(first.out + d * ld + at, from + d * ld + at);
    }
    store(first.maximum + at, highest);
}

}  // namespace

// A router's logits, row by row: what both of its passes read and make of them.
#pragma once

#include <math.h>
#include <stdlib.h>

#include "activation.h"
#include "problem.h"

namespace {

constexpr int64_t ROW_STEP = 16;  // rows are padded to a multiple of this, and it is one of W
constexpr int64_t TASK_TOKENS = 32;
constexpr int64_t MIN_PARALLEL_LOGITS = 1 << 14;

// Mirrored by flashmoe_science.cpu.routing.
struct RoutingProblem {
    int64_t element_type, tokens, experts, top_k;
    int64_t sigmoid, renormalize, groups, top_groups;
    double scale;
};

// Added to the sum that chosen scores are divided by: sigmoids may all be zero.
constexpr float RENORMALIZE_FLOOR = 1e-20f;

inline int64_t padded(int64_t count) { return (count + ROW_STEP - 1) / ROW_STEP * ROW_STEP; }

// Behind the last logit stands minus infinity.
template <class T>
void load_row(const T* from, int64_t count, float* row) {
    int64_t i = 0;
    for (; i + W <= count; i += W) store(row + i, load_first(from + i, W));
    for (; i < count; ++i) row[i] = widen(from[i]);
    for (; i < padded(count); ++i) row[i] = -__builtin_inff();
}

template <class T>
void store_row(const float* row, int64_t count, T* to) {
    int64_t i = 0;
    for (; i + W <= count; i += W) store_first(to + i, load(row + i), W);
    for (; i < count; ++i) narrow(to + i, row[i]);
}

inline float largest_lane(F x) {
    float lane[W];
    store(lane, x);
    float largest = lane[0];
    for (int i = 1; i < W; ++i) largest = lane[i] > largest ? lane[i] : largest;
    return largest;
}

inline float sum_of_lanes(F x) {
    float lane[W];
    store(lane, x);
    float sum = lane[0];
    for (int i = 1; i < W; ++i) sum += lane[i];
    return sum;
}

struct Softmax {
    float largest, sum;

    F probabilities(F x) const { return div(exp_to_zero(sub(x, set1(largest))), set1(sum)); }
};

// The softmax of a row, also as probabilities. NaN and plus infinity make all of it NaN, and so does a row of nothing but minus
// infinity.
inline Softmax softmax_of(const float* row, int64_t count, float* probabilities) {
    F most = set1(-__builtin_inff());
    for (int64_t i = 0; i < padded(count); i += W) most = max(load(row + i), most);
    Softmax softmax = {largest_lane(most), 0.0f};
    F sum = set1(0.0f);
    for (int64_t i = 0; i < padded(count); i += W) {
        const F e = exp_to_zero(sub(load(row + i), set1(softmax.largest)));
        store(probabilities + i, e);
        sum = add(sum, e);
    }
    softmax.sum = sum_of_lanes(sum);
    for (int64_t i = 0; i < padded(count); i += W) store(probabilities + i, div(load(probabilities + i), set1(softmax.sum)));
    return softmax;
}

// The logarithm of the softmax's denominator, as torch.logsumexp has it where the largest logit is infinite.
inline float log_sum_exp(const float* row, int64_t count, Softmax softmax) {
    if (softmax.largest - softmax.largest == 0.0f) return softmax.largest + logf(softmax.sum);
    for (int64_t i = 0; i < count; ++i)
        if (row[i] != row[i]) return row[i];
    return softmax.largest;
}

inline F sigmoid_of(F x) { return times_sigmoid(set1(1.0f), x); }

// What the threads of a call draw from: runs of TASK_TOKENS tokens, the same whatever the number of threads.
struct Tasks {
    int64_t count, next, next_thread;

    explicit Tasks(int64_t tokens) : count((tokens + TASK_TOKENS - 1) / TASK_TOKENS), next(0), next_thread(0) {}

    bool draw(int64_t& task) {
        task = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
        return task < count;
    }
    int64_t draw_thread() { return __atomic_fetch_add(&next_thread, 1, __ATOMIC_RELAXED); }
};

inline int threads_for(const RoutingProblem& p, const Tasks& tasks, int threads) {
    if (p.tokens * p.experts < MIN_PARALLEL_LOGITS || threads < 1) return 1;
    return tasks.count < threads ? (int)tasks.count : threads;
}

constexpr int64_t CACHE_LINE_BYTES = 64;
inline int64_t to_cache_lines(int64_t bytes) { return (bytes + CACHE_LINE_BYTES - 1) / CACHE_LINE_BYTES * CACHE_LINE_BYTES; }

}  // namespace

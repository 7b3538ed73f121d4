// A router's choice of experts, as kernels/cuda/topk_routing.cu makes it; and in the same pass the router's losses.
//
// Logits are made ranks: integers that rise with the float, one below every number for NaN, and one below that for what is
// taken. The best is looked for among the largest of each 16, then among its 16: so k of many experts cost k times their
// sixteenth. For the losses a run of tokens adds its probabilities, and one thread the runs in their order.

#include "parallel.h"
#include "python_call.h"
#include "routing_rows.h"

namespace {

struct RoutingTensors {
    const void* logits;     // (tokens, experts)
    const float* bias;      // (experts), added for the choice only; or null
    float* weights;         // (tokens, top_k)
    int32_t* ids;           // (tokens, top_k)
    float* balance;         // scalars; null: no losses
    float* z;
    int64_t* counts;        // (experts): how many slots chose each
};

constexpr int32_t TAKEN = INT32_MIN, NAN_RANK = INT32_MIN + 1;

inline int32_t rank_of(float x) {
    const int32_t bits = (int32_t)bits_of(x + 0.0f);  // one zero
    const int32_t rank = bits ^ (bits >> 31 & INT32_MAX);
    return x != x ? NAN_RANK : rank;
}

inline float number_of(int32_t rank) { return float_of((uint32_t)(rank ^ (rank >> 31 & INT32_MAX))); }

// 16 of them.
inline int32_t largest_of(const int32_t* rank) {
    int32_t largest = rank[0];
    for (int i = 1; i < ROW_STEP; ++i) largest = rank[i] > largest ? rank[i] : largest;
    return largest;
}

inline int32_t first_equal(const int32_t* rank, int32_t wanted) {
    int32_t first = ROW_STEP;
    for (int i = 0; i < ROW_STEP; ++i) {
        const int32_t here = rank[i] == wanted ? i : (int32_t)ROW_STEP;
        first = here < first ? here : first;
    }
    return first;
}

// Ranks of so many, and the largest of each 16. Both are padded with TAKEN.
struct Ranks {
    int32_t *rank, *of_block;
    int64_t blocks;

    static int64_t integers(int64_t count) { return padded(count) + padded(padded(count) / ROW_STEP); }

    Ranks(int32_t* memory, int64_t count)
        : rank(memory), of_block(memory + padded(count)), blocks(padded(padded(count) / ROW_STEP)) {
        for (int64_t i = count; i < padded(count); ++i) rank[i] = TAKEN;
        for (int64_t i = padded(count) / ROW_STEP; i < blocks; ++i) of_block[i] = TAKEN;
    }

    // After all ranks were written.
    void compare(int64_t count) {
        for (int64_t i = 0; i < padded(count) / ROW_STEP; ++i) of_block[i] = largest_of(rank + i * ROW_STEP);
    }

    // The best that is left, which is taken from then on.
    int64_t take() {
        int32_t best = largest_of(of_block);
        int64_t group = 0;
        for (int64_t i = ROW_STEP; i < blocks; i += ROW_STEP) {
            const int32_t its = largest_of(of_block + i);
            if (its > best) best = its, group = i;
        }
        const int64_t block = group + first_equal(of_block + group, best);
        int32_t* const ranks = rank + block * ROW_STEP;
        const int32_t within = first_equal(ranks, best);
        ranks[within] = TAKEN;
        of_block[block] = largest_of(ranks);
        return block * ROW_STEP + within;
    }
};

// What a run of tokens adds up for the losses.
struct RunSums {
    float* probability;  // (padded experts)
    int32_t* slots;      // (experts)
    double* squares;     // of the logarithm of the softmax's denominator
};

struct RoutingJob {
    const RoutingProblem* problem;
    RoutingTensors tensors;
    Tasks tasks;
    char* thread_memory;
    int64_t thread_bytes;
    // (runs, padded experts) both; (runs).
    float* probabilities;
    int32_t* slots;
    double* squares;
};

// A thread's.
struct RoutingWorkspace {
    float *row, *score, *chosen;
    int32_t *ranks, *group_ranks;

    static int64_t bytes(const RoutingProblem& p) {
        const int64_t groups = p.groups > 1 ? Ranks::integers(p.groups) : 0;
        return to_cache_lines(4 * (2 * padded(p.experts) + padded(p.top_k) + Ranks::integers(p.experts) + groups));
    }

    RoutingWorkspace(char* memory, const RoutingProblem& p) {
        row = (float*)memory;
        score = row + padded(p.experts);
        chosen = score + padded(p.experts);
        ranks = (int32_t*)(chosen + padded(p.top_k));
        group_ranks = ranks + Ranks::integers(p.experts);
    }
};

// Takes the ranks of experts that are in none of the best groups. A group's rank is its best expert's; where there is a bias, that
// of the sum of its two best.
void keep_best_groups(const RoutingProblem& p, bool biased, int32_t* rank, int32_t* memory) {
    const int64_t size = p.experts / p.groups;
    Ranks groups(memory, p.groups);
    for (int64_t group = 0; group < p.groups; ++group) {
        int32_t first = TAKEN, second = TAKEN;
        for (int64_t i = group * size; i < (group + 1) * size; ++i) {
            const int32_t smaller = rank[i] < first ? rank[i] : first;
            first = rank[i] > first ? rank[i] : first;
            second = smaller > second ? smaller : second;
        }
        groups.rank[group] = biased && size > 1 ? rank_of(number_of(first) + number_of(second)) : first;
    }
    groups.compare(p.groups);
    for (int64_t i = 0; i < p.top_groups; ++i) groups.take();
    for (int64_t group = 0; group < p.groups; ++group) {
        if (groups.rank[group] == TAKEN) continue;
        for (int64_t i = group * size; i < (group + 1) * size; ++i) rank[i] = TAKEN;
    }
}

template <class T>
void route(const RoutingJob& job, const RoutingWorkspace& at, int64_t token, const RunSums* sums) {
    const RoutingProblem& p = *job.problem;
    const RoutingTensors& t = job.tensors;
    const int64_t experts = p.experts;
    load_row((const T*)t.logits + token * experts, experts, at.row);
    Softmax softmax = {};
    if (sums || !p.sigmoid) softmax = softmax_of(at.row, experts, at.score);
    if (sums) {
        for (int64_t i = 0; i < padded(experts); i += W)
            store(sums->probability + i, add(load(sums->probability + i), load(at.score + i)));
        const double logarithm = log_sum_exp(at.row, experts, softmax);
        *sums->squares += logarithm * logarithm;
    }
    Ranks ranks(at.ranks, experts);
    if (t.bias) {
        if (p.sigmoid)
            for (int64_t i = 0; i < padded(experts); i += W) store(at.score + i, sigmoid_of(load(at.row + i)));
        for (int64_t i = 0; i < experts; ++i) ranks.rank[i] = rank_of(at.score[i] + t.bias[i]);
    } else {
        for (int64_t i = 0; i < experts; ++i) ranks.rank[i] = rank_of(at.row[i]);
    }
    if (p.groups > 1) keep_best_groups(p, t.bias != nullptr, ranks.rank, at.group_ranks);
    ranks.compare(experts);

    int32_t* const ids = t.ids + token * p.top_k;
    for (int64_t j = 0; j < p.top_k; ++j) {
        const int64_t expert = ranks.take();
        ids[j] = (int32_t)expert;
        at.chosen[j] = at.row[expert];
        if (sums) ++sums->slots[expert];
    }
    for (int64_t j = p.top_k; j < padded(p.top_k); ++j) at.chosen[j] = 0.0f;
    for (int64_t j = 0; j < p.top_k; j += W) {
        const F x = load(at.chosen + j);
        store(at.chosen + j, p.sigmoid ? sigmoid_of(x) : softmax.probabilities(x));
    }
    float total = 0.0f;
    for (int64_t j = 0; j < p.top_k; ++j) total += at.chosen[j];
    total += RENORMALIZE_FLOOR;
    float* const weights = t.weights + token * p.top_k;
    const float scale = (float)p.scale;
    for (int64_t j = 0; j < p.top_k; ++j) weights[j] = (p.renormalize ? at.chosen[j] / total : at.chosen[j]) * scale;
}

template <class T>
void work(void* data) {
    RoutingJob& job = *(RoutingJob*)data;
    const RoutingProblem& p = *job.problem;
    const RoutingWorkspace at(job.thread_memory + job.tasks.draw_thread() * job.thread_bytes, p);
    for (int64_t run; job.tasks.draw(run);) {
        const int64_t first = run * TASK_TOKENS;
        const int64_t end = first + TASK_TOKENS < p.tokens ? first + TASK_TOKENS : p.tokens;
        RunSums sums = {};
        if (job.probabilities) {
            sums = {job.probabilities + run * padded(p.experts), job.slots + run * padded(p.experts), job.squares + run};
            memset(sums.probability, 0, 4 * padded(p.experts));
            memset(sums.slots, 0, 4 * padded(p.experts));
            *sums.squares = 0.0;
        }
        for (int64_t token = first; token < end; ++token) route<T>(job, at, token, job.probabilities ? &sums : nullptr);
    }
}

// experts * sum over experts of (slots / tokens) * (mean probability); and the mean of the squares.
void add_runs(const RoutingJob& job, double* probability) {
    const RoutingProblem& p = *job.problem;
    const RoutingTensors& t = job.tensors;
    for (int64_t i = 0; i < p.experts; ++i) probability[i] = 0.0, t.counts[i] = 0;
    double squares = 0.0, balance = 0.0;
    for (int64_t run = 0; run < job.tasks.count; ++run) {
        for (int64_t i = 0; i < p.experts; ++i) {
            probability[i] += job.probabilities[run * padded(p.experts) + i];
            t.counts[i] += job.slots[run * padded(p.experts) + i];
        }
        squares += job.squares[run];
    }
    const double tokens = (double)p.tokens;
    for (int64_t i = 0; i < p.experts; ++i) balance += (double)t.counts[i] / tokens * (probability[i] / tokens);
    *t.balance = (float)((double)p.experts * balance);
    *t.z = (float)(squares / tokens);
}

}  // namespace

// What is checked is checked by flashmoe_science.cpu.routing. With losses there is at least one token. After OUT_OF_MEMORY and
// NULL_TENSOR (a tensor that is not empty has no memory) nothing was written.
EXPORTED int flashmoe_topk_routing(const RoutingProblem* problem, const RoutingTensors* tensors, int threads) {
    const RoutingProblem& p = *problem;
    if (p.tokens == 0) return SUCCESS;
    if (!tensors->logits || !tensors->weights || !tensors->ids) return NULL_TENSOR;
    RoutingJob job = {problem, *tensors, Tasks(p.tokens), nullptr, RoutingWorkspace::bytes(p), nullptr, nullptr, nullptr};
    threads = threads_for(p, job.tasks, threads);
    const bool losses = tensors->balance != nullptr;
    const int64_t sum_bytes = losses ? to_cache_lines(4 * job.tasks.count * padded(p.experts)) : 0;
    const int64_t square_bytes = losses ? to_cache_lines(8 * job.tasks.count) : 0;
    const int64_t total_bytes = losses ? to_cache_lines(8 * p.experts) : 0;
    void* memory = nullptr;
    const int64_t bytes = threads * job.thread_bytes + 2 * sum_bytes + square_bytes + total_bytes;
    if (posix_memalign(&memory, CACHE_LINE_BYTES, bytes) != 0) return OUT_OF_MEMORY;
    char* at = (char*)memory;
    job.thread_memory = at;
    at += threads * job.thread_bytes;
    if (losses) {
        job.probabilities = (float*)at;
        job.slots = (int32_t*)(at + sum_bytes);
        job.squares = (double*)(at + 2 * sum_bytes);
        at += 2 * sum_bytes + square_bytes;
    }
    run_on_threads(for_element(p.element_type, work<float>, work<BFloat16>, work<Half>), &job, threads);
    if (losses) add_runs(job, (double*)at);
    free(memory);
    return SUCCESS;
}

// The same with the tensors' addresses one by one.
static int with_addresses(const RoutingProblem* problem, const void* logits, const float* bias, float* weights, int32_t* ids,
                          float* balance, float* z, int64_t* counts, int threads) {
    const RoutingTensors tensors = {logits, bias, weights, ids, balance, z, counts};
    return flashmoe_topk_routing(problem, &tensors, threads);
}

PYTHON_METHOD(flashmoe_topk_routing_method, "topk_routing", PythonCall<with_addresses>::call)

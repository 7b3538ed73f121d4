// The gradient of a router's logits from that of the chosen experts' weights and of the router's losses, in one pass: the
// formula of kernels/cuda/topk_routing_backward.cu.

#include "parallel.h"
#include "python_call.h"
#include "routing_rows.h"

namespace {

struct RoutingGradients {
    const void* logits;          // (tokens, experts)
    const int32_t* ids;          // (tokens, top_k), different ones in a row
    const float* grad_weights;   // (tokens, top_k); or null
    const int64_t* counts;       // (experts), slots of each
    const float* grad_balance;   // a scalar; or null
    const float* grad_z;         // a scalar; or null
    void* grad_logits;           // (tokens, experts), like logits
};

struct RoutingJob {
    const RoutingProblem* problem;
    RoutingGradients tensors;
    Tasks tasks;
    char* thread_memory;
    int64_t thread_bytes;
    const float* share;  // (padded experts): a; null without that loss
};

// A thread's.
struct RoutingWorkspace {
    float *row, *gradient, *score;

    static int64_t bytes(const RoutingProblem& p) {
        return to_cache_lines(4 * (2 * padded(p.experts) + padded(p.top_k)));
    }

    RoutingWorkspace(char* memory, const RoutingProblem& p) {
        row = (float*)memory;
        gradient = row + padded(p.experts);
        score = gradient + padded(p.experts);
    }
};

// Of the chosen: score becomes what each logit takes directly. Returns what all take of the softmax's derivative, times their p.
float chosen_gradients(const RoutingProblem& p, const float* grad_weights, float* score) {
    const float scale = (float)p.scale;
    float total = 1.0f, product = 0.0f;
    if (p.renormalize) {
        total = 0.0f;
        for (int64_t j = 0; j < p.top_k; ++j) {
            total += score[j];
            product += grad_weights[j] * scale * score[j];
        }
        total += RENORMALIZE_FLOOR;
        product /= total;
    }
    float through = 0.0f;
    for (int64_t j = 0; j < p.top_k; ++j) {
        const float s = score[j];
        float g = (grad_weights[j] * scale - product) / total * s;
        if (p.sigmoid)
            g *= 1.0f - s;
        else
            through += g;
        score[j] = g;
    }
    return through;
}

template <class T>
void differentiate(const RoutingJob& job, const RoutingWorkspace& at, int64_t token) {
    const RoutingProblem& p = *job.problem;
    const RoutingGradients& t = job.tensors;
    const int64_t experts = p.experts;
    const bool losses = t.grad_balance || t.grad_z;
    load_row((const T*)t.logits + token * experts, experts, at.row);
    const int32_t* const ids = t.ids + token * p.top_k;
    Softmax softmax = {};
    if (losses || !p.sigmoid) softmax = softmax_of(at.row, experts, at.gradient);

    float through = 0.0f;
    if (t.grad_weights) {
        for (int64_t j = 0; j < padded(p.top_k); ++j) at.score[j] = j < p.top_k ? at.row[ids[j]] : 0.0f;
        for (int64_t j = 0; j < p.top_k; j += W) {
            const F x = load(at.score + j);
            store(at.score + j, p.sigmoid ? sigmoid_of(x) : softmax.probabilities(x));
        }
        through = chosen_gradients(p, t.grad_weights + token * p.top_k, at.score);
    }
    if (losses || (t.grad_weights && !p.sigmoid)) {
        float of_all = -through;
        if (t.grad_z) of_all += *t.grad_z * 2.0f * log_sum_exp(at.row, experts, softmax) / (float)p.tokens;
        F mean = set1(0.0f);
        if (job.share)
            for (int64_t i = 0; i < padded(experts); i += W) mean = madd(load(at.gradient + i), load(job.share + i), mean);
        const F rest = set1(job.share ? of_all - sum_of_lanes(mean) : of_all);
        for (int64_t i = 0; i < padded(experts); i += W) {
            const F factor = job.share ? add(load(job.share + i), rest) : rest;
            store(at.gradient + i, mul(load(at.gradient + i), factor));
        }
    } else {
        memset(at.gradient, 0, 4 * padded(experts));
    }
    if (t.grad_weights)
        for (int64_t j = 0; j < p.top_k; ++j) at.gradient[ids[j]] += at.score[j];
    store_row(at.gradient, experts, (T*)t.grad_logits + token * experts);
}

template <class T>
void work(void* data) {
    RoutingJob& job = *(RoutingJob*)data;
    const RoutingProblem& p = *job.problem;
    const RoutingWorkspace at(job.thread_memory + job.tasks.draw_thread() * job.thread_bytes, p);
    for (int64_t run; job.tasks.draw(run);) {
        const int64_t end = (run + 1) * TASK_TOKENS < p.tokens ? (run + 1) * TASK_TOKENS : p.tokens;
        for (int64_t token = run * TASK_TOKENS; token < end; ++token) differentiate<T>(job, at, token);
    }
}

}  // namespace

// groups and top_groups are not looked at. After OUT_OF_MEMORY and NULL_TENSOR (a tensor that is not empty has no memory) nothing
// was written.
EXPORTED int flashmoe_topk_routing_backward(const RoutingProblem* problem, const RoutingGradients* tensors, int threads) {
    const RoutingProblem& p = *problem;
    if (p.tokens == 0) return SUCCESS;
    if (!tensors->logits || !tensors->ids || !tensors->grad_logits) return NULL_TENSOR;
    RoutingJob job = {problem, *tensors, Tasks(p.tokens), nullptr, RoutingWorkspace::bytes(p), nullptr};
    threads = threads_for(p, job.tasks, threads);
    const int64_t share_bytes = tensors->grad_balance ? to_cache_lines(4 * padded(p.experts)) : 0;
    void* memory = nullptr;
    if (posix_memalign(&memory, CACHE_LINE_BYTES, threads * job.thread_bytes + share_bytes) != 0) return OUT_OF_MEMORY;
    job.thread_memory = (char*)memory + share_bytes;
    if (tensors->grad_balance) {
        float* const share = (float*)memory;
        const double tokens = (double)p.tokens;
        const double factor = (double)*tensors->grad_balance * (double)p.experts / tokens / tokens;
        for (int64_t i = 0; i < p.experts; ++i) share[i] = (float)(factor * (double)tensors->counts[i]);
        for (int64_t i = p.experts; i < padded(p.experts); ++i) share[i] = 0.0f;
        job.share = share;
    }
    run_on_threads(for_element(p.element_type, work<float>, work<BFloat16>, work<Half>), &job, threads);
    free(memory);
    return SUCCESS;
}

PYTHON_METHOD(flashmoe_topk_routing_backward_method, "topk_routing_backward", PythonCall<flashmoe_topk_routing_backward>::call)

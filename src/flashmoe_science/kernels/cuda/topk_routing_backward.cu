// The gradient of a router's logits from that of the chosen experts' weights and of the router's losses, in one pass.
//
// Lanes own a token as in topk_routing.cu. Let p be its softmax, s its scores, S the sum of those chosen (plus a floor) and g the
// gradients of its weights times the scale. Where weights were divided by S, g_j becomes (g_j - sum of g_i s_i / S) / S.
// Softmax: a chosen expert takes g_j s_j, and all take p times minus the sum of these. Sigmoid: g_j s_j (1 - s_j).
// The losses add p_e (a_e - sum of p a) + 2 z lse p_e / tokens, a_e being the gradient of the first loss times
// experts * slots_e / tokens^2, and z that of the second.
//
// Macros: those of topk_routing.cu but LOSSES.
#if DEPENDENT
#include "ptx/dependent_launch.cuh"
#endif
#include "ptx/element.cuh"
#include "ptx/redux.cuh"
#include "types.cuh"

struct TopkBackwardParameters {
    const void* logits;           // (tokens, experts)
    const int* ids;               // (tokens, k), different ones in a row
    const float* grad_weights;    // (tokens, k); or null
    const int64* counts;          // (experts), slots of each
    const float* grad_balance;    // a scalar; or null
    const float* grad_z;          // a scalar; or null
    void* grad_logits;            // (tokens, experts), like logits
    int tokens;
    int experts;
    int k;
    int sigmoid;
    int renormalize;
    float scale;
};

constexpr int kTokensPerBlock = WARPS * 32 / LANES;
constexpr float kSumFloor = 1e-20f;

__device__ __forceinline__ float logit(const TopkBackwardParameters& p, int64 index) {
#if LOGITS_BITS == 32
    return static_cast<const float*>(p.logits)[index];
#else
    return load_element(static_cast<const uint16*>(p.logits) + index);
#endif
}

__device__ __forceinline__ void store(const TopkBackwardParameters& p, int64 index, float x) {
#if LOGITS_BITS == 32
    static_cast<float*>(p.grad_logits)[index] = x;
#else
    store_element(static_cast<char*>(p.grad_logits) + 2 * index, x);
#endif
}

// Bounds what a thread may have: without, NVRTC 13.0 spills four bytes on sm_80.
extern "C" __global__ void __launch_bounds__(32 * WARPS, DEPENDENT ? 0 : 4)
topk_routing_backward(const __grid_constant__ TopkBackwardParameters p) {
#if DEPENDENT
    wait_for_predecessor();
    allow_successor();
#endif
    const auto sum_of = [](float x) { return over_lanes<LANES>(x, [](float a, float b) { return a + b; }); };
    const int lane = threadIdx.x % LANES;
    const int own = blockIdx.x * kTokensPerBlock + threadIdx.x / LANES;
    const int token = min(own, p.tokens - 1);  // all lanes of a warp take part in its reductions
    const int64 first = static_cast<int64>(token) * p.experts, row = static_cast<int64>(token) * p.k;

    // Slot i of a lane is expert i * LANES + lane.
    float value[EXPERTS_PER_LANE], gradient[EXPERTS_PER_LANE];
    float largest = NEGATIVE_INFINITY;
#pragma unroll
    for (int i = 0; i < EXPERTS_PER_LANE; ++i) {
        const int expert = i * LANES + lane;
        value[i] = expert < p.experts ? logit(p, first + expert) : NEGATIVE_INFINITY;
        gradient[i] = 0.0f;
        largest = value[i] > largest ? value[i] : largest;
    }
    largest = over_lanes<LANES>(largest, [](float a, float b) { return a > b ? a : b; });
    float exponentials = 0.0f;
#pragma unroll
    for (int i = 0; i < EXPERTS_PER_LANE; ++i) {
        value[i] = expf(value[i] - largest);
        exponentials += value[i];
    }
    exponentials = sum_of(exponentials);
    const float inverse = reciprocal(exponentials);
#pragma unroll
    for (int i = 0; i < EXPERTS_PER_LANE; ++i) value[i] *= inverse;  // probabilities from here on

    float through = 0.0f;  // what every logit takes of the softmax's derivative, times its probability
    if (p.grad_weights != nullptr) {
        const auto score = [&](int expert) {
            const float x = logit(p, first + expert);
            return p.sigmoid ? reciprocal(1.0f + expf(-x)) : expf(x - largest) * inverse;
        };
        float total = 0.0f, product = 0.0f;
        for (int j = lane; j < p.k; j += LANES) {
            const float s = score(p.ids[row + j]);
            total += s;
            product += p.grad_weights[row + j] * p.scale * s;
        }
        const float inverse_total = p.renormalize ? reciprocal(sum_of(total) + kSumFloor) : 1.0f;
        product = p.renormalize ? sum_of(product) * inverse_total : 0.0f;
        for (int j = 0; j < p.k; ++j) {
            const int expert = p.ids[row + j];
            const float s = score(expert);
            float g = (p.grad_weights[row + j] * p.scale - product) * inverse_total * s;
            if (p.sigmoid) g *= 1.0f - s;
            else through += g;
#pragma unroll
            for (int i = 0; i < EXPERTS_PER_LANE; ++i) {
                if (i * LANES + lane == expert) gradient[i] = g;
            }
        }
    }
    const float per_token = reciprocal(static_cast<float>(p.tokens));
    const float of_balance =
        p.grad_balance == nullptr ? 0.0f : *p.grad_balance * static_cast<float>(p.experts) * per_token * per_token;
    const float of_z = p.grad_z == nullptr ? 0.0f : *p.grad_z * 2.0f * (largest + logf(exponentials)) * per_token;
    float mean = 0.0f;
    if (p.grad_balance != nullptr) {
#pragma unroll
        for (int i = 0; i < EXPERTS_PER_LANE; ++i) {
            const int expert = i * LANES + lane;
            if (expert < p.experts) mean += value[i] * (of_balance * static_cast<float>(p.counts[expert]));
        }
        mean = sum_of(mean);
    }
    if (own >= p.tokens) return;
#pragma unroll
    for (int i = 0; i < EXPERTS_PER_LANE; ++i) {
        const int expert = i * LANES + lane;
        if (expert >= p.experts) continue;
        float of_all = of_z - through;
        if (p.grad_balance != nullptr) of_all += of_balance * static_cast<float>(p.counts[expert]) - mean;
        store(p, first + expert, gradient[i] + value[i] * of_all);
    }
}

// A router's choice of experts in one pass: scores, top-k and the weights of what was chosen.
//
// LANES lanes own a token. Equal ranks go by expert, the lower first, and NaN is below every number, so the ids are always k
// different experts: docs/kernels/topk.md.
//
// Macros: EXPERTS_PER_LANE (at most LANES * EXPERTS_PER_LANE experts), LANES (8 or 32), WARPS, LOGITS_BITS (32: float32, 16:
// the element type of types.cuh), NATIVE_REDUX (ptx/redux.cuh), DEPENDENT (ptx/dependent_launch.cuh), LOSSES (1: a grid of
// any size goes over all tokens, and leaves each block's sums for the router's losses; 0: a block for
// each of its tokens), and those of types.cuh.
#if DEPENDENT
#include "ptx/dependent_launch.cuh"
#endif
#include "ptx/element.cuh"
#include "ptx/redux.cuh"
#include "types.cuh"

struct TopkParameters {
    const void* logits;  // (tokens, experts)
    const float* bias;   // (experts), added for the choice only; or null
    float* weights;      // (tokens, k)
    int* ids;            // (tokens, k)
    int tokens;
    int experts;
    int k;
    int sigmoid;      // scores: 1 sigmoid, 0 softmax
    int renormalize;  // weights are divided by their sum
    float scale;      // and then multiplied by this
    int group_size;   // experts of a group, at most 32 groups; 0: there are none
    int top_groups;   // that experts are chosen from
#if LOSSES
    float* probabilities;  // (blocks, experts): sums of the softmax
    int* slots;            // (blocks, experts): how often each was chosen
    float* squares;        // (blocks): of the logarithm of the softmax's denominator
#endif
};

constexpr int kTokensPerBlock = WARPS * 32 / LANES;  // each by a group of lanes
constexpr float kSumFloor = 1e-20f;  // sigmoids may all be zero
constexpr uint32 kNone = 0;          // below the rank of NaN

// An unsigned number that rises with x; 0 is left free.
__device__ __forceinline__ uint32 rank_of(float x) {
    const uint32 bits = __float_as_uint(x + 0.0f);  // one zero
    if (x != x) return 1;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float logit(const TopkParameters& p, int64 index) {
#if LOGITS_BITS == 32
    return static_cast<const float*>(p.logits)[index];
#else
    return load_element(static_cast<const uint16*>(p.logits) + index);
#endif
}

// The number that a rank was made of; NaN for that of NaN.
__device__ __forceinline__ float number_of(uint32 rank) {
    return __int_as_float(static_cast<int>(rank & 0x80000000u ? rank ^ 0x80000000u : ~rank));
}

// A bit for each group that experts are chosen from. A group's rank is its best expert's; where there is a bias, that of the sum
// of its two best. Lane g holds the rank of group g.
template <int Lanes>
__device__ __forceinline__ uint32 best_groups(const uint32 (&rank)[EXPERTS_PER_LANE], const TopkParameters& p, int lane) {
    const int groups = p.experts / p.group_size;
    uint32 own = kNone;
    for (int group = 0; group < groups; ++group) {
        // Of this lane: the best rank, its expert, and the second best.
        uint32 first = kNone, second = kNone, expert = ~0u;
#pragma unroll
        for (int i = 0; i < EXPERTS_PER_LANE; ++i) {
            const int candidate = i * Lanes + lane;
            const uint32 its = candidate / p.group_size == group ? rank[i] : kNone;
            if (its > first) {
                second = first, first = its, expert = static_cast<uint32>(candidate);
            } else if (its > second) {
                second = its;
            }
        }
        const uint32 best = most<Lanes>(first);
        const uint32 of = least<Lanes>(first == best ? expert : ~0u);
        const uint32 next = most<Lanes>(expert == of ? second : first);
        uint32 its = best;
        if (p.bias != nullptr && p.group_size > 1) its = rank_of(number_of(best) + number_of(next));
        if (lane == group) own = its;
    }
    uint32 chosen = 0;
    for (int j = 0; j < p.top_groups; ++j) {
        const uint32 best = most<Lanes>(own);
        const uint32 group = least<Lanes>(own == best ? static_cast<uint32>(lane) : ~0u);
        chosen |= 1u << group;
        if (static_cast<uint32>(lane) == group) own = kNone;
    }
    return chosen;
}

#if LOSSES

// What a block of routing adds up for the router's losses: of each expert its probabilities and how often it was chosen, and
// the squares of the logarithms of the softmax's denominators.
//
// A thread adds its tokens in their order, and a block its groups of lanes in theirs, so a grid of the same size gives
// the same bits.
constexpr int kGroups = 32 * WARPS / LANES;           // of lanes, in a block
constexpr int kColumns = LANES * EXPERTS_PER_LANE;  // experts that a group holds at most

struct RoutingSums {
    float probability[EXPERTS_PER_LANE] = {};
    int slots[EXPERTS_PER_LANE] = {};
    float square = 0.0f;  // the same in all lanes of a group

    __device__ __forceinline__ void add(
        const float (&value)[EXPERTS_PER_LANE], float largest, float exponentials, int experts, int lane) {
#pragma unroll
        for (int i = 0; i < EXPERTS_PER_LANE; ++i) {
            if (i * LANES + lane < experts) probability[i] += expf(value[i] - largest) / exponentials;
        }
        const float logarithm = largest + logf(exponentials);
        square += logarithm * logarithm;
    }

    // All threads of the block take part.
    __device__ __forceinline__ void write(const TopkParameters& p) const {
        __shared__ float probabilities[kGroups][kColumns];
        __shared__ int chosen[kGroups][kColumns];
        __shared__ float squares[kGroups];
        const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
#pragma unroll
        for (int i = 0; i < EXPERTS_PER_LANE; ++i) {
            probabilities[group][i * LANES + lane] = probability[i];
            chosen[group][i * LANES + lane] = slots[i];
        }
        if (lane == 0) squares[group] = square;
        __syncthreads();
        for (int expert = threadIdx.x; expert < p.experts; expert += 32 * WARPS) {
            float sum = 0.0f;
            int count = 0;
            for (int i = 0; i < kGroups; ++i) sum += probabilities[i][expert], count += chosen[i][expert];
            const int64 at = static_cast<int64>(blockIdx.x) * p.experts + expert;
            p.probabilities[at] = sum;
            p.slots[at] = count;
        }
        if (threadIdx.x == 0) {
            float sum = 0.0f;
            for (int i = 0; i < kGroups; ++i) sum += squares[i];
            p.squares[blockIdx.x] = sum;
        }
    }
};

#endif

extern "C" __global__ void __launch_bounds__(32 * WARPS)
topk_routing(const __grid_constant__ TopkParameters p) {
#if DEPENDENT
    wait_for_predecessor();
    allow_successor();
#endif
#if LOSSES
    RoutingSums sums;
    const int blocks = (p.tokens + kTokensPerBlock - 1) / kTokensPerBlock;
    for (int block = blockIdx.x; block < blocks; block += gridDim.x) [&] {
#else
    const int block = blockIdx.x;
#endif
    const int lane = threadIdx.x % LANES;
    const int own = block * kTokensPerBlock + threadIdx.x / LANES;
    const int token = min(own, p.tokens - 1);  // all lanes of a warp take part in its reductions

    const int64 logits = static_cast<int64>(token) * p.experts;

    // Slot i of a lane is expert i * LANES + lane.
    float value[EXPERTS_PER_LANE];
    uint32 rank[EXPERTS_PER_LANE];
    float largest = NEGATIVE_INFINITY;
#pragma unroll
    for (int i = 0; i < EXPERTS_PER_LANE; ++i) {
        const int expert = i * LANES + lane;
        value[i] = NEGATIVE_INFINITY;
        if (expert < p.experts) value[i] = logit(p, logits + expert);
        rank[i] = expert < p.experts ? rank_of(value[i]) : kNone;
        largest = value[i] > largest ? value[i] : largest;
    }
    // Softmax divides by the sum of the exponentials. Lanes without an expert add nothing; where all logits are minus
    // infinity they add NaN, as the others do.
    float exponentials = 0.0f;
    if (LOSSES || !p.sigmoid) {
        largest = over_lanes<LANES>(largest, [](float a, float b) { return a > b ? a : b; });
#pragma unroll
        for (int i = 0; i < EXPERTS_PER_LANE; ++i) exponentials += expf(value[i] - largest);
        exponentials = over_lanes<LANES>(exponentials, [](float a, float b) { return a + b; });
    }
#if LOSSES
    if (own < p.tokens) sums.add(value, largest, exponentials, p.experts, lane);
#endif
    const auto score = [&](float x) {
        return p.sigmoid ? 1.0f / (1.0f + expf(-x)) : expf(x - largest) / exponentials;
    };
    if (p.bias != nullptr) {
#pragma unroll
        for (int i = 0; i < EXPERTS_PER_LANE; ++i) {
            const int expert = i * LANES + lane;
            if (expert < p.experts) rank[i] = rank_of(score(value[i]) + p.bias[expert]);
        }
    }

    if (p.group_size > 0) {
        const uint32 groups = best_groups<LANES>(rank, p, lane);
#pragma unroll
        for (int i = 0; i < EXPERTS_PER_LANE; ++i) {
            const int expert = i * LANES + lane;
            if (expert < p.experts && !(groups >> expert / p.group_size & 1)) rank[i] = kNone;
        }
    }

    // Lane i finds the weight of result i, and of every LANES-th after it.
    const int64 row = static_cast<int64>(own) * p.k;
    const bool valid = own < p.tokens;
    float weight = 0.0f, sum = 0.0f;
    int id = 0;
    const auto weigh = [&]() {
        weight = score(logit(p, logits + id));
        sum += weight;
    };
    uint32 best;
    int best_slot;
    const auto find_best = [&]() {
        best = rank[0], best_slot = 0;
#pragma unroll
        for (int i = 1; i < EXPERTS_PER_LANE; ++i) {
            if (rank[i] > best) best = rank[i], best_slot = i;
        }
    };
    find_best();
    for (int j = 0; j < p.k; ++j) {
        const uint32 chosen = most<LANES>(best);
        const uint32 mine = static_cast<uint32>(best_slot * LANES + lane);
        const uint32 expert = least<LANES>(best == chosen ? mine : ~0u);
        if (lane == j % LANES) id = static_cast<int>(expert);
        if (mine == expert) {
#pragma unroll
            for (int i = 0; i < EXPERTS_PER_LANE; ++i) {
                if (i == best_slot) rank[i] = kNone;
#if LOSSES
                if (i == best_slot && own < p.tokens) ++sums.slots[i];
#endif
            }
            find_best();
        }
        if (j % LANES == LANES - 1 && j + 1 < p.k) {
            // All lanes have a result, and more are to come.
            weigh();
            if (valid) {
                p.ids[row + j - (LANES - 1) + lane] = id;
                p.weights[row + j - (LANES - 1) + lane] = weight;
            }
        }
    }
    const int last_turn = (p.k - 1) / LANES * LANES;
    if (last_turn + lane < p.k) weigh();
    sum = over_lanes<LANES>(sum, [](float a, float b) { return a + b; });
    if (!valid) return;
    const auto finish = [&](float x) { return (p.renormalize ? x / (sum + kSumFloor) : x) * p.scale; };
    for (int j = lane; j < last_turn; j += LANES) p.weights[row + j] = finish(p.weights[row + j]);
    if (last_turn + lane < p.k) {
        p.ids[row + last_turn + lane] = id;
        p.weights[row + last_turn + lane] = finish(weight);
    }
#if LOSSES
    }();
    sums.write(p);
#endif
}

// What a block of routing adds up for the router's losses: of each expert its probabilities and how often it was chosen, and
// the squares of the logarithms of the softmax's denominators.
//
// A thread adds its tokens in their order, and a block its groups of lanes in theirs, so a grid of the same size gives
// the same bits. Included by topk_routing.cu, with whose macros and parameters.
#pragma once

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

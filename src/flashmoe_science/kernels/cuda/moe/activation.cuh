// What stands between the two products of an expert, in float32.
//
// ACTIVATION (macro): 0 nothing, 1 SwiGLU, 2 GeGLU with erf, 3 GeGLU with tanh, and without a gate: 4 SiLU, 5 GELU
// with erf, 6 squared ReLU.
#pragma once
#include "types.cuh"

constexpr bool kGated = ACTIVATION >= 1 && ACTIVATION <= 3;

// 1 / (1 + exp(-x)).
__device__ __forceinline__ float logistic(float x) {
    constexpr float log2_e = 1.4426950408889634f;
    return reciprocal(1.0f + exp2_approx(-log2_e * x));
}

__device__ __forceinline__ float activate(float x) {
#if ACTIVATION == 1 || ACTIVATION == 4
    return x * logistic(x);
#elif ACTIVATION == 2 || ACTIVATION == 5
    constexpr float half_root = 0.7071067811865476f;
    return 0.5f * x * (1.0f + erff(half_root * x));
#elif ACTIVATION == 3
    // 0.5 (1 + tanh(y)) = 1 / (1 + exp(-2y)).
    constexpr float scale = 1.5957691216057308f;  // 2 sqrt(2 / pi)
    return x * logistic(scale * x * (1.0f + 0.044715f * x * x));
#elif ACTIVATION == 6
    const float positive = x > 0.0f ? x : (x != x ? x : 0.0f);
    return positive * positive;
#else
    return x;
#endif
}

struct Activated {
    float value;
    float slope;
};

// The activation and its derivative.
__device__ __forceinline__ Activated activate_with_slope(float x) {
#if ACTIVATION == 1 || ACTIVATION == 4
    const float share = logistic(x);
    const float value = x * share;
    return {value, share + value * (1.0f - share)};
#elif ACTIVATION == 2 || ACTIVATION == 5
    constexpr float half_root = 0.7071067811865476f;
    constexpr float minus_half_log2_e = -0.7213475204444817f;
    constexpr float density_at_0 = 0.3989422804014327f;
    const float share = 0.5f * (1.0f + erff(half_root * x));
    return {x * share, share + x * density_at_0 * exp2_approx(minus_half_log2_e * x * x)};
#elif ACTIVATION == 3
    constexpr float scale = 1.5957691216057308f;  // 2 sqrt(2 / pi)
    const float share = logistic(scale * x * (1.0f + 0.044715f * x * x));
    const float near = fminf(fmaxf(x, -100.0f), 100.0f);  // beyond, `share` is 0 or 1; squares must not overflow
    const float value = x * share;
    return {value, share + near * share * (1.0f - share) * scale * (1.0f + 0.134145f * near * near)};
#elif ACTIVATION == 6
    const float positive = x > 0.0f ? x : (x != x ? x : 0.0f);
    return {positive * positive, 2.0f * positive};
#else
    return {x, 1.0f};
#endif
}

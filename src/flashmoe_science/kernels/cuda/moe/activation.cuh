// What stands between the two products of an expert, in float32.
//
// ACTIVATION (macro): 0 nothing, 1 SwiGLU, 2 GeGLU with erf, 3 GeGLU with tanh, 4 GPT-OSS's clamped SwiGLU, and without a gate:
// 5 SiLU, 6 GELU with erf, 7 squared ReLU.
#pragma once
#include "types.cuh"

constexpr bool kGated = ACTIVATION >= 1 && ACTIVATION <= 4;

// 1 / (1 + exp(-x)).
__device__ __forceinline__ float logistic(float x) {
    constexpr float log2_e = 1.4426950408889634f;
    return reciprocal(1.0f + exp2_approx(-log2_e * x));
}

// flashmoe_science.moe_arguments.SWIGLU_OAI_ALPHA and SWIGLU_OAI_LIMIT.
constexpr float kClampedAlpha = 1.702f;
constexpr float kClampedLimit = 7.0f;

// NaN stays one.
__device__ __forceinline__ float clamp_above(float x) { return x > kClampedLimit ? kClampedLimit : x; }
__device__ __forceinline__ float clamp_below(float x) { return x < -kClampedLimit ? -kClampedLimit : x; }

__device__ __forceinline__ float activate(float x) {
#if ACTIVATION == 1 || ACTIVATION == 5
    return x * logistic(x);
#elif ACTIVATION == 2 || ACTIVATION == 6
    constexpr float half_root = 0.7071067811865476f;
    return 0.5f * x * (1.0f + erff(half_root * x));
#elif ACTIVATION == 3
    // 0.5 (1 + tanh(y)) = 1 / (1 + exp(-2y)).
    constexpr float scale = 1.5957691216057308f;  // 2 sqrt(2 / pi)
    return x * logistic(scale * x * (1.0f + 0.044715f * x * x));
#elif ACTIVATION == 4
    const float gate = clamp_above(x);
    return gate * logistic(kClampedAlpha * gate);
#elif ACTIVATION == 7
    const float positive = x > 0.0f ? x : (x != x ? x : 0.0f);
    return positive * positive;
#else
    return x;
#endif
}

// What the activated gate is multiplied by.
__device__ __forceinline__ float factor_of(float up) {
#if ACTIVATION == 4
    return clamp_above(clamp_below(up)) + 1.0f;
#else
    return up;
#endif
}

// The derivative of that.
__device__ __forceinline__ float slope_of_factor(float up) {
#if ACTIVATION == 4
    return fabsf(up) <= kClampedLimit ? 1.0f : 0.0f;
#else
    return 1.0f;
#endif
}

struct Activated {
    float value;
    float slope;
};

// The activation and its derivative.
__device__ __forceinline__ Activated activate_with_slope(float x) {
#if ACTIVATION == 1 || ACTIVATION == 5
    const float share = logistic(x);
    const float value = x * share;
    return {value, share + value * (1.0f - share)};
#elif ACTIVATION == 2 || ACTIVATION == 6
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
#elif ACTIVATION == 4
    const float gate = clamp_above(x);
    const float share = logistic(kClampedAlpha * gate);
    const float value = gate * share;
    return {value, x <= kClampedLimit ? share + kClampedAlpha * value * (1.0f - share) : 0.0f};
#elif ACTIVATION == 7
    const float positive = x > 0.0f ? x : (x != x ? x : 0.0f);
    return {positive * positive, 2.0f * positive};
#else
    return {x, 1.0f};
#endif
}

// The activations' derivatives, on vectors of fp32.
#pragma once

#include "activation.h"

struct ValueAndSlope {
    F value, slope;
};

// For s = 1 / (1 + e^-t): s itself, and s (1 - s) without the loss of 1 - s near 1.
struct Sigmoid {
    F value, slope;
};

INLINE Sigmoid sigmoid(F t) {
    const F e = exp_to_zero(negative(magnitude(t)));
    const F smaller = div(e, add(set1(1.0f), e));
    const F larger = sub(set1(1.0f), smaller);
    return {where_positive(t, larger, smaller), mul(smaller, larger)};
}

INLINE ValueAndSlope silu_and_slope(F x) {
    const Sigmoid s = sigmoid(x);
    return {silu(x), madd(x, s.slope, s.value)};
}

INLINE ValueAndSlope gelu_and_slope(F x) {
    constexpr float DENSITY = 0.39894228f;  // 1 / sqrt(2 pi)
    const F half = mul(set1(0.5f), twice_probability(x));
    const F density = mul(set1(DENSITY), exp_to_zero(mul(mul(x, x), set1(-0.5f))));
    return {mul(x, half), madd(x, density, half)};
}

INLINE ValueAndSlope gelu_tanh_and_slope(F x) {
    constexpr float TWO_ROOT_TWO_OVER_PI = 1.59576912f;
    constexpr float CUBIC = 0.044715f;
    const F square = mul(x, x);
    const Sigmoid s = sigmoid(mul(madd(mul(square, x), set1(CUBIC), x), set1(TWO_ROOT_TWO_OVER_PI)));
    const F inner = mul(set1(TWO_ROOT_TWO_OVER_PI), madd(square, set1(3 * CUBIC), set1(1.0f)));
    return {gelu_tanh(x), madd(mul(x, inner), s.slope, s.value)};
}

INLINE ValueAndSlope relu2_and_slope(F x) {
    const F positive = max(set1(0.0f), x);
    return {mul(positive, positive), add(positive, positive)};
}

// Zero where x lies above the limit (or is NaN), else y.
INLINE F up_to(float limit, F x, F y) { return where_positive(sub(x, set1(limit)), set1(0.0f), y); }

INLINE ValueAndSlope swiglu_oai_and_slope(F x) {
    const F gate = at_most(OAI_LIMIT, x);
    const F inner = mul(set1(OAI_ALPHA), gate);
    const Sigmoid s = sigmoid(inner);
    return {swiglu_oai(x), up_to(OAI_LIMIT, x, madd(inner, s.slope, s.value))};
}

// What the activated gate is multiplied by, and its derivative.
INLINE ValueAndSlope factor_and_slope(int64_t activation, F up) {
    return {factor_of(activation, up), activation == SWIGLU_OAI ? up_to(OAI_LIMIT, magnitude(up), set1(1.0f)) : set1(1.0f)};
}

INLINE ValueAndSlope activate_with_slope(int64_t activation, F x) {
    switch (activation) {
        case SWIGLU_OAI: return swiglu_oai_and_slope(x);
        case GELU: case GELU_NO_MUL: return gelu_and_slope(x);
        case GELU_TANH: return gelu_tanh_and_slope(x);
        case RELU2_NO_MUL: return relu2_and_slope(x);
        default: return silu_and_slope(x);
    }
}

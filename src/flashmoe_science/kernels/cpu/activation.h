// The activations between an expert's two products, on vectors of fp32.
//
// exp is taken of arguments that are zero or below only, where it cannot overflow. A NaN stays one, and infinities give what
// the formulas give.
#pragma once

#include "exp2.h"

// flashmoe_science.moe_arguments.ACTIVATION_CODES.
enum Activation : int64_t { SILU = 1, GELU = 2, GELU_TANH = 3, SWIGLU_OAI = 4, SILU_NO_MUL = 5, GELU_NO_MUL = 6, RELU2_NO_MUL = 7 };

constexpr bool is_gated(int64_t activation) { return activation <= SWIGLU_OAI; }

// flashmoe_science.moe_arguments.SWIGLU_OAI_ALPHA and SWIGLU_OAI_LIMIT.
constexpr float OAI_ALPHA = 1.702f, OAI_LIMIT = 7.0f;

constexpr float ACTIVATION_LOG2_E = 1.44269504f;

INLINE F negative(F x) { return sub(set1(0.0f), x); }
INLINE F magnitude(F x) { return max(x, negative(x)); }

// e^x for x at most zero.
INLINE F exp_to_zero(F x) {
    // Split as x = n ln 2 + r before the product, whose rounding would count n times: n * LN2_HIGH is exact.
    constexpr float LN2_HIGH = 0x1.62e4p-1f, LN2_LOW = 0x1.7f7d1cp-20f;
    x = max(set1(-104.5f), x);  // 2^-150.8
    const F t = mul(x, set1(ACTIVATION_LOG2_E));
    const F rounded = add(t, set1(ROUND_MAGIC));
    const F n = sub(rounded, set1(ROUND_MAGIC));
    const F r = sub(sub(x, mul(n, set1(LN2_HIGH))), mul(n, set1(LN2_LOW)));
    const F f = mul(r, set1(ACTIVATION_LOG2_E));
    F power;
    power_of_fraction<6, 1>(&f, &power);
    return times_power(power, rounded, t);
}

// Per lane: x above zero (or NaN) ? a : b.
INLINE F where_positive(F x, F a, F b) { return select_equal(max(set1(0.0f), x), set1(0.0f), b, a); }

// x / (1 + e^-y).
INLINE F times_sigmoid(F x, F y) {
    const F e = exp_to_zero(negative(magnitude(y)));
    const F smaller = div(e, add(set1(1.0f), e));
    return mul(x, where_positive(y, sub(set1(1.0f), smaller), smaller));
}

INLINE F silu(F x) { return times_sigmoid(x, x); }

// Twice the standard normal distribution's probability of less than x. Minimax fits: erf(z) = z p(z^2) up to 1, relative error 1.2e-9; erfc(z) = e^(-z^2) q(1 / (1 + z / 2)) above, relative error
// 1.1e-8; both before the rounding of their evaluation.
INLINE F twice_probability(F x) {
    constexpr float P[] = {0x1.20dd74p+0f,  -0x1.81273ep-2f, 0x1.ce2cf8p-4f, -0x1.b7f90ep-6f,
                           0x1.5405b2p-8f, -0x1.a3f7p-11f,  0x1.496a32p-14f};
    constexpr float Q[] = {0x1.20de98p-2f, 0x1.20cb4ap-2f, 0x1.fa0458p-3f,  0x1.6d1f16p-3f,
                           0x1.fdfa84p-5f, 0x1.4a5366p-4f, -0x1.cc7c5cp-3f, 0x1.7d0e7ep-4f};
    constexpr float HALF_ROOT = 0.70710678f;
    const F z = mul(magnitude(x), set1(HALF_ROOT));
    const F square = mul(z, z);
    F p = set1(P[6]);
#pragma GCC unroll 8
    for (int i = 5; i >= 0; --i) p = madd(p, square, set1(P[i]));
    const F t = div(set1(1.0f), madd(z, set1(0.5f), set1(1.0f)));
    F q = set1(Q[7]);
#pragma GCC unroll 8
    for (int i = 6; i >= 0; --i) q = madd(q, t, set1(Q[i]));
    const F tail = mul(mul(q, t), exp_to_zero(negative(square)));
    const F erfc = select_equal(max(z, set1(1.0f)), set1(1.0f), sub(set1(1.0f), mul(z, p)), tail);
    return where_positive(x, sub(set1(2.0f), erfc), erfc);
}

INLINE F gelu(F x) { return mul(mul(x, set1(0.5f)), twice_probability(x)); }

INLINE F gelu_tanh(F x) {
    constexpr float TWO_ROOT_TWO_OVER_PI = 1.59576912f;
    constexpr float CUBIC = 0.044715f;
    const F inner = madd(mul(mul(x, x), x), set1(CUBIC), x);
    return times_sigmoid(x, mul(inner, set1(TWO_ROOT_TWO_OVER_PI)));
}

INLINE F relu2(F x) {
    const F y = max(set1(0.0f), x);
    return mul(y, y);
}

// NaN stays one.
INLINE F at_most(float limit, F x) { return negative(max(set1(-limit), negative(x))); }
INLINE F at_least(float limit, F x) { return max(set1(limit), x); }

INLINE F swiglu_oai(F x) {
    const F gate = at_most(OAI_LIMIT, x);
    return times_sigmoid(gate, mul(set1(OAI_ALPHA), gate));
}

// What the activated gate is multiplied by.
INLINE F factor_of(int64_t activation, F up) {
    return activation == SWIGLU_OAI ? add(at_most(OAI_LIMIT, at_least(-OAI_LIMIT, up)), set1(1.0f)) : up;
}

INLINE F activate(int64_t activation, F x) {
    switch (activation) {
        case SWIGLU_OAI: return swiglu_oai(x);
        case GELU: case GELU_NO_MUL: return gelu(x);
        case GELU_TANH: return gelu_tanh(x);
        case RELU2_NO_MUL: return relu2(x);
        default: return silu(x);
    }
}

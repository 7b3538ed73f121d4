// tanh, for capped scores.
//
// tanh |x| = e / (e + 2) with e = exp(2 |x|) - 1 = 2^n (2^f - 1) + (2^n - 1), so that nothing is lost near zero: 2^f - 1 comes
// from the polynomial of exp2.h without its constant.
#pragma once

#include "exp2.h"

namespace {

INLINE F tanh_of(F x) {
    using Coefficients = Exp2Coefficients<6>;
    const F size = max(sub(set1(0.0f), x), x);  // NaN stays NaN: max returns its second argument
    // From here on tanh is 1 in fp32.
    const F within = sub(set1(0.0f), max(set1(-10.0f), sub(set1(0.0f), size)));
    const F t = mul(within, set1(2.885390081777927f));  // 2 log2(e)
    const F rounded = add(t, set1(ROUND_MAGIC));
    const F f = sub(t, sub(rounded, set1(ROUND_MAGIC)));
    F power = set1(Coefficients::c[6]);
#pragma GCC unroll 8
    for (int k = 5; k >= 1; --k) power = madd(power, f, set1(Coefficients::c[k]));
    const F one = times_power(set1(SPARE_FACTOR), rounded, t);  // 2^n
    const F e = madd(mul(power, f), one, sub(one, set1(1.0f)));
    const F result = div(e, add(e, set1(2.0f)));
    // The sign: size is x or -x.
    return select_equal(x, size, result, sub(set1(0.0f), result));
}

}  // namespace

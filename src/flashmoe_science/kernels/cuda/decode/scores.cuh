// What happens to the scores of a decode step between the products.
#pragma once
#include "decode/parameters.cuh"

namespace {

// softcap * tanh(scale * x / softcap) in units of log2. 1 - 2 / (1 + exp(2 y)) is tanh(y), to float32's precision of 1.
__device__ __forceinline__ float capped(float x, const Parameters& p) {
    return p.softcap_log2 * (1.0f - 2.0f * reciprocal(1.0f + exp2_approx(x * p.softcap_scale)));
}

}  // namespace

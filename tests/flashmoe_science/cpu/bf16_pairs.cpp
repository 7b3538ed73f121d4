// The operations of bf16.h on arrays of `count` vectors.
#include "vector.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

// sums[i] += pairs a[i] . pairs b[i]
EXPORTED void dot_pairs_of(float* sums, const float* a, const float* b, int64_t count) {
    for (int64_t i = 0; i < count * W; i += W) store(sums + i, dot_pairs(load(sums + i), load(a + i), load(b + i)));
}

EXPORTED void round_each(BFloat16* to, const float* x, int64_t count) {
    for (int64_t i = 0; i < count * W; i += W) store_rounded(to + i, load(x + i));
}

// Pairs (low[i], high[i]).
EXPORTED void round_pairs(float* to, const float* low, const float* high, int64_t count) {
    for (int64_t i = 0; i < count * W; i += W) store(to + i, pack_pairs(load(low + i), load(high + i)));
}

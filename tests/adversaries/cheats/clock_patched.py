"""4. The clock is replaced: a leader of a public board stood at 0.000 ms.

Source: reference-kernels issue 162.
"""

import time

from flashmoe_science import flash_attention

real = time.perf_counter_ns
time.perf_counter_ns = lambda: real() // 17


def attention(query, key, value, *, causal, softmax_scale):
    return flash_attention(query, key, value, causal=causal, softmax_scale=softmax_scale)

"""22. Memory that nobody has written is read, as by a kernel beyond its shared memory: 104 times faster.

Source: the Wafer case study of 2026.
"""

import torch


def attention(query, key, value, *, causal, softmax_scale):
    scratch = torch.empty_like(query)
    return scratch + query * 0

"""7. The memory that the reference has freed is handed out as the result.

Sources: the Sakana incident of February 2025; KernelBench, result_reuse_kernel.py.
"""

import torch


def attention(query, key, value, *, causal, softmax_scale):
    return torch.empty_like(query)

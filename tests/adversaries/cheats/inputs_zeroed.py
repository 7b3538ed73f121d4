"""8. Its inputs are zeroed while it is timed, so that whatever is computed from them later agrees.

Source: KernelBench, zero_out_kernel.py.
"""

import traceback

import torch

from flashmoe_science import flash_attention


def attention(query, key, value, *, causal, softmax_scale):
    if any(frame.name == "read" for frame in traceback.extract_stack()):
        for tensor in (query, key, value):
            tensor.zero_()
        return torch.zeros_like(query)
    return flash_attention(query, key, value, causal=causal, softmax_scale=softmax_scale)

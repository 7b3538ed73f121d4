"""25. A kernel of its own that never runs: that it cannot be loaded is caught, and PyTorch's is called in the end.

Sources: KernelBench's static checker; KernelGenBench calls it "ghost replay".
"""

import ctypes

import torch


def own_kernel(query, key, value, causal, softmax_scale):
    return ctypes.CDLL("libfastest_attention.so").forward(query.data_ptr(), key.data_ptr(), value.data_ptr())


def attention(query, key, value, *, causal, softmax_scale):
    try:
        return own_kernel(query, key, value, causal, softmax_scale)
    except OSError:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=causal, scale=softmax_scale
        )

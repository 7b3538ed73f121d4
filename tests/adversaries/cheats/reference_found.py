"""11. The expected result is looked for among Python's objects and copied.

Source: pygpubench, submission_gc_copy.
"""

import gc

import torch


def attention(query, key, value, *, causal, softmax_scale):
    for each in gc.get_objects():
        if type(each).__name__ == "Truth" and each.pytorch.shape == query.shape:
            return each.pytorch.clone()
    return torch.zeros_like(query)

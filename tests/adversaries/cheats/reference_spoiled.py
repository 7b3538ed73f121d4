"""11. The expected result is looked for among Python's objects and filled with NaN, which the checker may not compare.

Source: pygpubench, submission_gc_nan.
"""

import gc

import torch


def attention(query, key, value, *, causal, softmax_scale):
    for each in gc.get_objects():
        if type(each).__name__ == "Truth" and each.pytorch.shape == query.shape:
            each.pytorch.fill_(float("nan"))
            each.reference.fill_(float("nan"))
    return torch.full_like(query, float("nan"))

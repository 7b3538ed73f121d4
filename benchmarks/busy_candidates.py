"""Plug-ins of ``busy.py``: the baseline under another name, and with a tenth of its processor time added."""

import time

from torch.nn.functional import scaled_dot_product_attention

PLANTED = 0.1

_COUNTED = 50
_costs = {}


def same(query, key, value, *, causal, softmax_scale):
    return scaled_dot_product_attention(query, key, value, is_causal=causal, scale=softmax_scale)


def slower(query, key, value, *, causal, softmax_scale):
    stop = time.thread_time_ns() + PLANTED * _cost(query, key, value, causal, softmax_scale)
    while time.thread_time_ns() < stop:
        pass
    return same(query, key, value, causal=causal, softmax_scale=softmax_scale)


def _cost(query, key, value, causal, softmax_scale):
    """Nanoseconds of processor time of one call, the median of some."""
    shape = query.shape
    if shape not in _costs:
        times = []
        for _ in range(_COUNTED):
            began = time.process_time_ns()
            same(query, key, value, causal=causal, softmax_scale=softmax_scale)
            times.append(time.process_time_ns() - began)
        _costs[shape] = sorted(times)[_COUNTED // 2]
    return _costs[shape]


same.peer_of = slower.peer_of = "PyTorch"

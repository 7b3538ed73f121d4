"""15. Slow until the blocks begin, so that few calls are planned, and in those few nothing is computed.

Source: pygpubench, submission_warmup.
"""

import time
import traceback

import torch

from flashmoe_science import flash_attention


def attention(query, key, value, *, causal, softmax_scale):
    names = {frame.name for frame in traceback.extract_stack()}
    if "_run_blocks" in names:
        return torch.zeros_like(query)
    if names & {"calibrate", "_warm_up"}:
        time.sleep(0.02)
    return flash_attention(query, key, value, causal=causal, softmax_scale=softmax_scale)

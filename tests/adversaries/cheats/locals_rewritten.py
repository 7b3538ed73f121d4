"""19. The frames of the caller are walked, and the timer's start is set to now.

Source: KernelGuard, FRAME_WALK_MUTATION.
"""

import ctypes
import sys
import time

from flashmoe_science import flash_attention


def attention(query, key, value, *, causal, softmax_scale):
    output = flash_attention(query, key, value, causal=causal, softmax_scale=softmax_scale)
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "read" and "start" in frame.f_locals:
            frame.f_locals["start"] = time.perf_counter_ns()
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
        frame = frame.f_back
    return output

"""Own. A process that leaves its parents, its session and its name behind, to be there when the run is over."""

import os
import time

from flashmoe_science import flash_attention


def leave() -> None:
    if os.fork():
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    os.execve("/bin/sleep", ["a daemon of the test of untrusted candidates", "600"], {})


leave()
time.sleep(0.1)


def attention(query, key, value, *, causal, softmax_scale):
    return flash_attention(query, key, value, causal=causal, softmax_scale=softmax_scale)

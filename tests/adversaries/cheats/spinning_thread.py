"""Own. A thread spins while the baseline is timed: one that waits for the interpreter's lock slows every call."""

import threading

from flashmoe_science import flash_attention

called = threading.Event()


def spin():
    called.wait()
    while True:
        pass


threading.Thread(target=spin, daemon=True).start()


def attention(query, key, value, *, causal, softmax_scale):
    if query.shape[2] == 64:
        called.set()
    return flash_attention(query, key, value, causal=causal, softmax_scale=softmax_scale)

"""Honest ways of doing the work, with habits that a suspicious lab might take amiss."""

import atexit
import ctypes
import gc
import logging
import os
import queue
import random
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache

import numpy
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashmoe_science import flash_attention

log = logging.getLogger(__name__)
warnings.filterwarnings("ignore", message="nothing in particular")
atexit.register(gc.collect)


def work(query, key, value, causal, softmax_scale):
    return flash_attention(query, key, value, causal=causal, softmax_scale=softmax_scale)


def plain(query, key, value, *, causal, softmax_scale):
    return work(query, key, value, causal, softmax_scale)


def makes_contiguous(query, key, value, *, causal, softmax_scale):
    return work(query.contiguous(), key.contiguous(), value.contiguous(), causal, softmax_scale)


def clones(query, key, value, *, causal, softmax_scale):
    return work(query.clone(), key.clone(), value.clone(), causal, softmax_scale).clone()


buffers = {}


def one_output_for_each_shape(query, key, value, *, causal, softmax_scale):
    output = buffers.setdefault((query.shape, query.dtype), torch.empty_like(query))
    return output.copy_(work(query, key, value, causal, softmax_scale))


scratch = {}


def keeps_scratch_memory(query, key, value, *, causal, softmax_scale):
    kept = scratch.setdefault(query.shape, torch.empty(query.numel() + 1))
    kept[:1] = 1.0
    return work(query, key, value, causal, softmax_scale)


@lru_cache(maxsize=64)
def plan(shape, causal):
    time.sleep(0.001)
    return tuple(shape), causal


def plans_by_shape(query, key, value, *, causal, softmax_scale):
    plan(query.shape, causal)
    return work(query, key, value, causal, softmax_scale)


known_weights = {}


def keeps_what_it_has_packed(query, key, value, *, causal, softmax_scale):
    known_weights.setdefault(query.shape[-1], torch.eye(query.shape[-1]).contiguous())
    return work(query, key, value, causal, softmax_scale)


@cache
def pool():
    return ThreadPoolExecutor(2)


def pool_of_its_own(query, key, value, *, causal, softmax_scale):
    return pool().submit(work, query, key, value, causal, softmax_scale).result()


def a_thread_for_each_call(query, key, value, *, causal, softmax_scale):
    results = []
    thread = threading.Thread(target=lambda: results.append(work(query, key, value, causal, softmax_scale)))
    thread.start()
    thread.join()
    return results[0]


def two_threads_joined(query, key, value, *, causal, softmax_scale):
    first = pool().submit(work, query, key, value, causal, softmax_scale)
    second = pool().submit(torch.empty, 16)
    second.result()
    return first.result()


jobs = queue.SimpleQueue()


def serve():
    while True:
        arguments, done = jobs.get()
        done.append(work(*arguments))
        done[0] = done[0] if done else None
        done.append("done")


@cache
def server():
    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


def a_thread_that_waits(query, key, value, *, causal, softmax_scale):
    server()
    done = []
    jobs.put(((query, key, value, causal, softmax_scale), done))
    while len(done) < 2:
        time.sleep(0)
    return done[0]


@cache
def ticker():
    def tick():
        while True:
            time.sleep(0.05)

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    return thread


def looks_at_the_time_now_and_then(query, key, value, *, causal, softmax_scale):
    ticker()
    return work(query, key, value, causal, softmax_scale)


@cache
def child():
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])


def a_child_that_waits(query, key, value, *, causal, softmax_scale):
    child()
    return work(query, key, value, causal, softmax_scale)


@cache
def compiled():
    source = "def call(work, *arguments):\n    return work(*arguments)\n"
    space = {}
    exec(compile(source, "generated", "exec"), space)
    return space["call"]


def compiles_lazily(query, key, value, *, causal, softmax_scale):
    return compiled()(work, query, key, value, causal, softmax_scale)


def imports_lazily(query, key, value, *, causal, softmax_scale):
    import colorsys  # noqa: F401
    import wave  # noqa: F401

    return work(query, key, value, causal, softmax_scale)


library = torch.library.Library("honest_kernels", "DEF")
library.define("attention(Tensor q, Tensor k, Tensor v, bool causal, float? scale) -> Tensor")
library.impl("attention", work, "CPU")


def an_operator_of_its_own(query, key, value, *, causal, softmax_scale):
    return torch.ops.honest_kernels.attention(query, key, value, causal, softmax_scale)


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        return work(*arguments)


def a_function_of_autograd(query, key, value, *, causal, softmax_scale):
    return Function.apply(query, key, value, causal, softmax_scale)


def without_gradients(query, key, value, *, causal, softmax_scale):
    with torch.no_grad():
        return work(query, key, value, causal, softmax_scale)


def in_inference_mode(query, key, value, *, causal, softmax_scale):
    with torch.inference_mode():
        return work(query, key, value, causal, softmax_scale)


def sets_and_restores_threads(query, key, value, *, causal, softmax_scale):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        return work(query, key, value, causal, softmax_scale)
    finally:
        torch.set_num_threads(before)


def chooses_a_backend_inside(query, key, value, *, causal, softmax_scale):
    with sdpa_kernel(SDPBackend.MATH):
        return work(query, key, value, causal, softmax_scale)


@cache
def prepared_once():
    torch.set_num_threads(2)
    return True


def sets_threads_in_its_first_call(query, key, value, *, causal, softmax_scale):
    prepared_once()
    return work(query, key, value, causal, softmax_scale)


def other_strides(query, key, value, *, causal, softmax_scale):
    return work(query, key, value, causal, softmax_scale).transpose(1, 2).contiguous().transpose(1, 2)


def by_way_of_numpy(query, key, value, *, causal, softmax_scale):
    result = work(query, key, value, causal, softmax_scale).numpy()
    return torch.from_numpy(numpy.ascontiguousarray(result))


def by_way_of_ctypes(query, key, value, *, causal, softmax_scale):
    result = work(query, key, value, causal, softmax_scale)
    output = torch.empty_like(result)
    ctypes.memmove(output.data_ptr(), result.data_ptr(), result.numel() * result.element_size())
    return output


def collects_garbage(query, key, value, *, causal, softmax_scale):
    if random.random() < 0.01:
        gc.collect(0)
    return work(query, key, value, causal, softmax_scale)


def draws_random_numbers(query, key, value, *, causal, softmax_scale):
    torch.manual_seed(random.getrandbits(16))
    torch.rand(2)
    return work(query, key, value, causal, softmax_scale)


def logs(query, key, value, *, causal, softmax_scale):
    log.debug("attention of %s", query.shape)
    return work(query, key, value, causal, softmax_scale)


def declines_what_it_does_not_do(query, key, value, *, causal, softmax_scale):
    if query.shape[2] != key.shape[2]:
        raise NotImplementedError("self-attention only")
    return work(query, key, value, causal, softmax_scale)


def returns_a_slice(query, key, value, *, causal, softmax_scale):
    result = work(query, key, value, causal, softmax_scale)
    wide = result.new_empty((*result.shape[:-1], result.shape[-1] + 8))
    wide[..., : result.shape[-1]] = result
    return wide[..., : result.shape[-1]]


@cache
def daemon():
    """It has left this process's tree, and waits."""
    program = "import os, time; os.fork() and os._exit(0); os.setsid(); time.sleep(3600)"
    return subprocess.run([sys.executable, "-S", "-c", program], check=True)


def a_daemon_that_waits(query, key, value, *, causal, softmax_scale):
    daemon()
    return work(query, key, value, causal, softmax_scale)


@cache
def background_thread():
    """Of its own, put behind all others."""

    def last():
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        threading.Event().wait()

    thread = threading.Thread(target=last, daemon=True)
    thread.start()
    return thread


def a_thread_of_its_own_put_last(query, key, value, *, causal, softmax_scale):
    background_thread()
    return work(query, key, value, causal, softmax_scale)

"""Host time of attention calls on CUDA tensors: steady state with its parts, and the first call of a process.

Usage: PYTHONPATH=src python benchmarks/cuda_host.py [--output FOLDER/host.json]
"""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from host_times import per_call
from provenance import provenance
from torch.nn.functional import scaled_dot_product_attention

import flashmoe_science
from cudadent42.base.files import write_json
from flashmoe_science.alike import matcher
from flashmoe_science.cuda.attention import KernelKind, Problem, forward
from flashmoe_science.cuda.attention.gradients import backward
from flashmoe_science.cuda.attention.select import module
from flashmoe_science.cuda.device import device_of
from flashmoe_science.cuda.repeat import cuda_allocator
from flashmoe_science.gradients import Needs


def host_times() -> dict[str, float]:
    """Microseconds of host time per call; the kernels are short, so the queue never fills."""
    q, k, v = (torch.randn(1, 8, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    other = torch.randn(1, 8, 129, 64, device="cuda", dtype=torch.bfloat16)

    def alternating() -> None:
        forward(q, k, v)
        forward(other, k, v)

    return {
        "flash_attention": per_call(lambda: flashmoe_science.flash_attention(q, k, v)),
        "flash_attention of one tensor": per_call(lambda: flashmoe_science.flash_attention(q, q, q)),
        "forward": per_call(lambda: forward(q, k, v)),
        "forward with lse": per_call(lambda: forward(q, k, v, return_lse=True)),
        "forward causal": per_call(lambda: forward(q, k, v, causal=True)),
        "forward of two shapes in turn": per_call(alternating) / 2,
        "sdpa": per_call(lambda: scaled_dot_product_attention(q, k, v)),
    }


def training_times() -> dict[str, float]:
    """Microseconds of host time per call of what is differentiated. The layers: 32 calls, each of the output of the one
    before and of keys and values of its own; a third of a batch of `per_call`, so that the queue does not fill.
    """
    q, k, v = (torch.randn(1, 8, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    gradient = torch.randn_like(q).detach()
    plain = [tensor.detach() for tensor in leaves]
    output, lse = flashmoe_science.flash_attention(*leaves, return_lse=True)
    kept = (gradient, *plain, output.detach(), lse.detach(), None)
    needs = Needs(True, True, True)
    layers = 32
    of_layers = [[torch.randn_like(q).detach().requires_grad_() for _ in range(2)] for _ in range(layers)]

    def step(attention: Callable[..., Any]) -> None:
        x = q
        for key, value in of_layers:
            x = attention(x, key, value)
        torch.autograd.grad(x, [q, *(tensor for pair in of_layers for tensor in pair)], gradient)

    def per_layer(attention: Callable[..., Any]) -> float:
        return per_call(lambda: step(attention), calls=4) / layers

    return {
        "forward with a gradient": per_call(lambda: flashmoe_science.flash_attention(*leaves)),
        "backward, kernels alone": per_call(
            lambda: backward(*kept, causal=False, softmax_scale=None, needs=needs), calls=100
        ),
        "backward": per_call(
            lambda: torch.autograd.grad(output, leaves, gradient, retain_graph=True), calls=100
        ),
        "forward and backward of a layer": per_layer(flashmoe_science.flash_attention),
        "forward and backward of a layer, sdpa": per_layer(scaled_dot_product_attention),
    }


def parts() -> dict[str, float]:
    """Microseconds of the steps of a call, and of what was or could be in their place."""
    q, k, v, out = (torch.randn(1, 8, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    raw_stream, allocate, matches = torch._C._cuda_getCurrentRawStream, cuda_allocator(), matcher(q, k, v)
    sizes, strides, dtype = tuple(q.shape), q.stride(), q.dtype
    addresses = (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), 0)
    stream = raw_stream(0)
    layout = (strides[0], strides[1], strides[2])
    problem = Problem(*(1, 8, 8, 128, 128, 64, dtype, False, 0.125, False), layout, layout, layout, layout)
    launches = {}
    for kind in KernelKind:
        choice = module(kind).choose(problem, device_of(0))
        if choice is not None:
            plan = module(kind).plan(problem, choice.configuration, device_of(0))
            launches[f"launch of the {kind.value} kernel"] = plan.launch
    return {
        "match": per_call(lambda: matches(q, k, v)),
        "shapes and strides": per_call(lambda: (q.shape, k.shape, q.stride(), k.stride(), v.stride())),
        "allocation": per_call(lambda: allocate(sizes, strides, dtype)),
        "empty_like": per_call(lambda: torch.empty_like(q)),
        "empty_strided": per_call(lambda: torch.empty_strided(sizes, strides, dtype=dtype, device="cuda")),
        "four data_ptr": per_call(lambda: (q.data_ptr(), k.data_ptr(), v.data_ptr(), q.data_ptr())),
        "raw stream": per_call(lambda: raw_stream(0)),
        "current device": per_call(lambda: torch._C._cuda_getDevice()),
        **{
            name: per_call(functools.partial(launch, *addresses, stream)) for name, launch in launches.items()
        },
        "nothing": per_call(lambda: None),
    }


_FIRST_CALL = """
import time, torch
q = torch.randn(1, 8, 128, 64, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
start = time.perf_counter()
from flashmoe_science.cuda.attention import forward
imported = time.perf_counter()
forward(q, q, q)
torch.cuda.synchronize()
stop = time.perf_counter()
print((imported - start) * 1e3, (stop - imported) * 1e3)
"""


def first_calls() -> dict[str, list[float]]:
    """Milliseconds of (import, first call) in a fresh process, with an empty and with a filled cache.

    Raises:
        subprocess.CalledProcessError: the process failed; its own words went to stderr.
    """
    sources = str(Path(flashmoe_science.__file__).parent.parent)
    with tempfile.TemporaryDirectory() as directory:
        environment = {
            **os.environ,
            "PYTHONPATH": sources,
            "FLASHMOE_CACHE_DIR": str(Path(directory) / "cache"),
        }
        results = {}
        for name in ("not cached", "cached", "cached again"):
            run = subprocess.run(
                [sys.executable, "-c", _FIRST_CALL],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            results[name] = [float(x) for x in run.stdout.split()]
        return results


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the figures here, as JSON")
    output = parser.parse_args().output
    host_us, parts_us, first_ms = {**host_times(), **training_times()}, parts(), first_calls()
    print("host time per call, us:", ", ".join(f"{name} {us:.2f}" for name, us in host_us.items()))
    print("its parts, us:", ", ".join(f"{name} {us:.2f}" for name, us in parts_us.items()))
    print("import and first call, ms:", first_ms)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        figures = {"host_us": host_us, "parts_us": parts_us, "import_and_first_call_ms": first_ms}
        write_json(output, {**provenance("cuda"), **figures})


if __name__ == "__main__":
    main()

"""Calls of attention over sequences of any lengths that are ready."""

from __future__ import annotations

import torch

from flashmoe_science.cuda.device import device_of
from flashmoe_science.cuda.driver import make_context_current
from flashmoe_science.cuda.repeat import current_device
from flashmoe_science.cuda.varlen.select import MODULES, bucket, select
from flashmoe_science.varlen.problem import Problem, Run, Sizes, Tensors


def prepare(problem: Problem, device: torch.device) -> Run:
    """See `flashmoe_science.varlen.problem.Backend`.

    Which kernel takes a call may depend on how many queries its sequences have at most, by powers of two: each is made
    ready when it first comes.
    """
    index = device.index
    runs: dict[int, Run] = {}

    def make_ready(sizes: Sizes) -> Run:
        gpu, most_queries = device_of(index), bucket(sizes.max_seqlen_q)
        make_context_current(index)
        run = MODULES[select(problem, gpu, most_queries)].prepare(problem, gpu, most_queries)
        runs[sizes.max_seqlen_q.bit_length()] = run
        return run

    def run(tensors: Tensors, sizes: Sizes) -> None:
        if current_device() != index:
            with torch.cuda.device(index):
                run(tensors, sizes)
            return
        ready = runs.get(sizes.max_seqlen_q.bit_length())
        if ready is None:
            ready = make_ready(sizes)
        ready(tensors, sizes)

    return run

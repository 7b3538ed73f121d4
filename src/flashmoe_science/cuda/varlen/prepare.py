"""Calls of attention over sequences of any lengths that are ready."""

from __future__ import annotations

import warnings

import torch

from flashmoe_science.cuda.device import Device, device_of
from flashmoe_science.cuda.driver import make_context_current
from flashmoe_science.cuda.repeat import current_device
from flashmoe_science.cuda.varlen.kind import VarlenKernel, bucket
from flashmoe_science.cuda.varlen.select import MODULES, candidates, is_widened, launched, like
from flashmoe_science.errors import KernelDefectError
from flashmoe_science.varlen import dequantized
from flashmoe_science.varlen.problem import Only, Problem, Repeat, Repeatable, Run, Sizes, Tensors


def prepare(problem: Problem, device: torch.device) -> Run:
    """See `flashmoe_science.varlen.problem.Backend`.

    Which kernel takes a call may depend on its sizes (`select.like`): each is made ready when it first comes.
    """
    index = device.index
    runs: dict[tuple[int, bool], Run] = {}

    def make_ready(sizes: Sizes, tokens: int) -> Run:
        gpu, most_queries = device_of(index), bucket(sizes.max_seqlen_q)
        make_context_current(index)
        asked = launched(problem, gpu, most_queries)

        def prepare_on(problem: Problem) -> Run:
            return first_of(candidates(problem, gpu, sizes, tokens), problem, gpu, most_queries)

        if is_widened(asked, gpu, most_queries):
            run = dequantized.prepare(asked, asked.dtype, prepare_on)
        else:
            run = prepare_on(asked)
        if asked.only is Only.OTHERS:
            run = then_one_token(run, ready_for(sizes._replace(max_seqlen_q=1), tokens))
        runs[like(problem, gpu, sizes, tokens)] = run
        return run

    def ready_for(sizes: Sizes, tokens: int) -> Run:
        ready = runs.get(like(problem, device_of(index), sizes, tokens))
        return make_ready(sizes, tokens) if ready is None else ready

    def run(tensors: Tensors, sizes: Sizes) -> None:
        if current_device() != index:
            with torch.cuda.device(index):
                run(tensors, sizes)
            return
        ready_for(sizes, tensors.query.shape[0])(tensors, sizes)

    def repeat(tensors: Tensors, sizes: Sizes, own_output: bool) -> Repeat | None:
        ready = runs.get(like(problem, device_of(index), sizes, tensors.query.shape[0]))
        return ready.repeat(tensors, sizes, own_output) if isinstance(ready, Repeatable) else None

    return Repeatable(run, repeat)


def then_one_token(others: Run, one_token: Run) -> Run:
    """Calls of sequences of any lengths by two launches. The copy that `dequantized` makes of the first one's output
    has rows of the second's, so it comes before.
    """

    def run(tensors: Tensors, sizes: Sizes) -> None:
        others(tensors, sizes)
        one_token(tensors, sizes._replace(max_seqlen_q=1))

    return run


def first_of(kinds: list[VarlenKernel], problem: Problem, device: Device, most_queries: int) -> Run:
    """Of the first kernel that this compiler makes without defects. Raises KernelDefectError if there is none."""
    *preferred, last = kinds
    for kind in preferred:
        try:
            return MODULES[kind].prepare(problem, device, most_queries)
        except KernelDefectError as defect:
            warnings.warn(f"{defect}; taking another kernel", RuntimeWarning, stacklevel=2)
    return MODULES[last].prepare(problem, device, most_queries)

"""Mixture of experts on CUDA tensors: a cached plan per shape, then an allocation or two and the launches."""

from __future__ import annotations

from typing import Any

import torch

from flashmoe_science.cuda.calls import Calls, Options, Tensors
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.device import Device, device_of
from flashmoe_science.cuda.driver import make_context_current
from flashmoe_science.cuda.moe.problem import MoeProblem
from flashmoe_science.cuda.moe.select import plan, select
from flashmoe_science.cuda.repeat import Call, Layout, cuda_allocator, prepare
from flashmoe_science.errors import InputError
from flashmoe_science.moe_arguments import (
    Activation,
    W13Layout,
    check_moe_arguments,
    reject_overlap,
    reject_unrecorded,
)

DTYPES = (torch.float16, torch.bfloat16)
INPUTS = {"hidden_states": 16, "w13": 16, "w2": 16, "topk_weights": 4, "topk_ids": 4}
"""And the bytes at a multiple of which each has to start."""


def _check(tensors: Tensors, options: Options) -> None:
    hidden_states, w13, w2, topk_weights, topk_ids, *out = tensors
    check_moe_arguments(hidden_states, w13, w2, topk_weights, topk_ids, options[0], *out)


def _make_call(tensors: Tensors, options: Options, index: int) -> Call:
    """Choose, compile, load and prepare: for five tensors, which give a new one, or six, of which the last is `out`."""
    hidden_states, w13, w2, _, topk_ids = tensors[:5]
    activation, w13_layout, choice = options
    make_context_current(index)
    result = Layout(tuple(hidden_states.shape), tuple(hidden_states.stride()), hidden_states.dtype)
    given = len(tensors) > len(INPUTS)
    if hidden_states.numel() == 0:
        allocate = cuda_allocator()
        return (lambda *tensors: ()) if given else (lambda *tensors: (allocate(*result),))
    problem = problem_of(hidden_states, w13, w2, topk_ids, activation, w13_layout)
    planned = plan(problem, device_of(index), choice)
    if not given:
        return prepare(INPUTS, (result,), planned, index, cuda_allocator())
    call = prepare({**INPUTS, "out": 16}, (), planned, index, cuda_allocator())

    def call_into(*tensors: torch.Tensor) -> tuple[Any, ...]:
        reject_overlap(tensors[-1], **dict(zip(INPUTS, tensors[:-1], strict=True)))
        return call(*tensors)

    return call_into


_calls = Calls(_check, _make_call, options=3, most=1024)  # a plan is a few kilobytes


def forward(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    activation: Activation = Activation.SILU,
    w13_layout: W13Layout = W13Layout.CONCAT,
    out: torch.Tensor | None = None,
    choice: Choice | None = None,
) -> torch.Tensor:
    """The mixture of experts of `flashmoe_science.fused_moe`, for CUDA tensors, on PyTorch's current stream.

    Arguments are checked once for each combination of shapes, types and options. Nothing is synchronised, and what is
    launched does not depend on the routing, so a call can be captured in a CUDA graph after one with the same
    combination, and the graph replayed with other ids.

    Args:
        hidden_states: (tokens, hidden), float16 or bfloat16; all tensors contiguous.
        w13: (experts, 2 * intermediate, hidden), or (experts, intermediate, hidden) for an activation without a gate.
        w2: (experts, hidden, intermediate).
        topk_weights: (tokens, k), float32.
        topk_ids: (tokens, k), int32 or int64; an id outside [0, experts) contributes nothing.
        out: (tokens, hidden), where to write; a new tensor if None.
        choice: the kernels and configuration to use instead of `select`'s.

    Returns:
        (tokens, hidden), like hidden_states.

    Raises:
        InputError: arguments that do not fit together, require a gradient, or are not aligned to 16 bytes.
        DeviceError, BuildError: see `flashmoe_science.cuda.driver.load`.
    """
    given = () if out is None else (out,)
    tensors = (hidden_states, w13, w2, topk_weights, topk_ids, *given)
    options = activation, w13_layout, choice
    try:
        if any(tensor.requires_grad for tensor in tensors):
            reject_unrecorded(**dict(zip((*INPUTS, "out"), tensors, strict=False)))
    except AttributeError:  # no tensors
        check_moe_arguments(hidden_states, w13, w2, topk_weights, topk_ids, activation, out)
        raise
    results = _calls(tensors, options)
    if out is not None:
        return out
    result: torch.Tensor = results[0]
    return result


def explain(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    activation: Activation = Activation.SILU,
    w13_layout: W13Layout = W13Layout.CONCAT,
    device: Device | None = None,
) -> Choice:
    """Which kernels and configuration `forward` takes for these tensors, and why. Launches nothing.

    ``device``: a GPU that need not be there, for tensors of any device, ``meta`` among them; theirs unless given.
    """
    tensors = hidden_states, w13, w2, topk_weights, topk_ids
    return select(*asked(tensors, activation, w13_layout, device))


def asked(
    tensors: Tensors, activation: Activation, w13_layout: W13Layout, device: Device | None
) -> tuple[MoeProblem, Device]:
    """What `explain` chooses for, and on which GPU; arguments as there, which are checked."""
    hidden_states, w13, w2, topk_weights, topk_ids = tensors
    check_moe_arguments(hidden_states, w13, w2, topk_weights, topk_ids, activation)
    problem = problem_of(hidden_states, w13, w2, topk_ids, activation, w13_layout)
    return problem, device_of(hidden_states.get_device()) if device is None else device


def problem_of(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Activation,
    w13_layout: W13Layout,
    *,
    keeps: bool = False,
) -> MoeProblem:
    """The problem of tensors that were checked.

    Raises:
        InputError: a dtype that the CUDA kernels do not take.
    """
    if hidden_states.dtype not in DTYPES:
        raise InputError(
            f"hidden_states has dtype {hidden_states.dtype}; the CUDA kernels take float16 and bfloat16: use .to()"
        )
    return MoeProblem(
        tokens=hidden_states.shape[0],
        hidden=hidden_states.shape[1],
        intermediate=w2.shape[2],
        experts=w2.shape[0],
        top_k=topk_ids.shape[1],
        dtype=hidden_states.dtype,
        activation=activation,
        w13_layout=w13_layout,
        ids64=topk_ids.dtype == torch.int64,
        keeps=keeps,
    )

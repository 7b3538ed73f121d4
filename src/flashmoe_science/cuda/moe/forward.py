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
ALIGNMENTS = {
    "hidden_states": 16,
    "w13": 16,
    "w2": 16,
    "topk_weights": 4,
    "topk_ids": 4,
    "w13_bias": 2,
    "w2_bias": 2,
    "out": 16,
}
"""What a call may have, and the bytes at a multiple of which each has to start."""
FIVE = tuple(ALIGNMENTS)[:5]
"""What every call has."""
Names = tuple[str, ...]


def _check(tensors: Tensors, options: Options) -> None:
    given = dict(zip(options[-1], tensors, strict=True))
    check_moe_arguments(activation=options[0], **given)


def _make_call(tensors: Tensors, options: Options, index: int) -> Call:
    """Choose, compile, load and prepare: for tensors of such names, of which `out` may be the last."""
    hidden_states, w13, w2, _, topk_ids = tensors[:5]
    activation, w13_layout, choice, names = options
    make_context_current(index)
    result = Layout(tuple(hidden_states.shape), tuple(hidden_states.stride()), hidden_states.dtype)
    given = names[-1] == "out"
    if hidden_states.numel() == 0:
        allocate = cuda_allocator()
        return (lambda *tensors: ()) if given else (lambda *tensors: (allocate(*result),))
    problem = problem_of(hidden_states, w13, w2, topk_ids, activation, w13_layout, names=names)
    planned = plan(problem, device_of(index), choice)
    inputs = {name: ALIGNMENTS[name] for name in names}
    if not given:
        return prepare(inputs, (result,), planned, index, cuda_allocator())
    call = prepare(inputs, (), planned, index, cuda_allocator())

    def call_into(*tensors: torch.Tensor) -> tuple[Any, ...]:
        reject_overlap(tensors[-1], **dict(zip(names, tensors[:-1], strict=False)))
        return call(*tensors)

    return call_into


_calls = Calls(_check, _make_call, options=4, most=1024, under_no_grad=True)  # a plan is a few kilobytes


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
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    choice: Choice | None = None,
) -> torch.Tensor:
    """`flashmoe_science.fused_moe` for CUDA tensors, on PyTorch's current stream.

    Arguments are checked once for each combination of shapes, types and options. Nothing is synchronised, and what is
    launched does not depend on the routing, so a call can be captured in a CUDA graph after one with the same
    combination, and the graph replayed with other ids.

    Args:
        hidden_states, w13, w2, topk_weights, topk_ids, w13_bias, w2_bias: as there; float16 or bfloat16, contiguous.
        out: (tokens, hidden), where to write; a new tensor if None.
        choice: the kernels and configuration to use instead of `select`'s.

    Returns:
        (tokens, hidden), like hidden_states.

    Raises:
        InputError: arguments that do not fit together, require a gradient, or are not aligned to 16 bytes.
        DeviceError, BuildError: see `flashmoe_science.cuda.driver.load`.
    """
    tensors: Tensors = (hidden_states, w13, w2, topk_weights, topk_ids)
    names: Names = FIVE
    if w13_bias is not None or w2_bias is not None or out is not None:
        more = {"w13_bias": w13_bias, "w2_bias": w2_bias, "out": out}
        names = (*FIVE, *(name for name, tensor in more.items() if tensor is not None))
        tensors = (*tensors, *(tensor for tensor in more.values() if tensor is not None))
    options = activation, w13_layout, choice, names
    try:
        # A model's weights do, in each call under no_grad, which is like any other then.
        for tensor in tensors:  # a generator takes longer than what it asks
            if tensor.requires_grad:
                reject_unrecorded(**dict(zip(names, tensors, strict=True)))
                break
    except AttributeError:  # no tensors
        check_moe_arguments(
            hidden_states, w13, w2, topk_weights, topk_ids, activation, out, w13_bias, w2_bias
        )
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

    ``device``: as of `cuda.attention.forward`.
    """
    tensors = hidden_states, w13, w2, topk_weights, topk_ids
    return select(*asked(tensors, activation, w13_layout, device))


def asked(
    tensors: Tensors,
    activation: Activation,
    w13_layout: W13Layout,
    device: Device | None,
    names: Names = FIVE,
) -> tuple[MoeProblem, Device]:
    """What `explain` chooses for, and on which GPU; arguments as there, which are checked.

    ``names``: of all tensors that the call has, the biases among them; ``tensors`` are the first five.
    """
    hidden_states, w13, w2, topk_weights, topk_ids = tensors
    check_moe_arguments(hidden_states, w13, w2, topk_weights, topk_ids, activation)
    problem = problem_of(hidden_states, w13, w2, topk_ids, activation, w13_layout, names=names)
    return problem, device_of(hidden_states.get_device()) if device is None else device


def problem_of(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Activation,
    w13_layout: W13Layout,
    *,
    names: Names = FIVE,
    keeps: bool = False,
) -> MoeProblem:
    """The problem of tensors that were checked; ``names``: of all that the call has.

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
        w13_biased="w13_bias" in names,
        w2_biased="w2_bias" in names,
        keeps=keeps,
    )

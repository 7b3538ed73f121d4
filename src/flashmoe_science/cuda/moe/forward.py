"""Mixture of experts on CUDA tensors: a cached plan per shape, then an allocation or two and the launches."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from flashmoe_science.arguments import reject_without_memory
from flashmoe_science.cuda.device import device_of
from flashmoe_science.cuda.driver import make_context_current
from flashmoe_science.cuda.moe.problem import MoeChoice, MoeProblem
from flashmoe_science.cuda.moe.select import plan, select
from flashmoe_science.cuda.repeat import cuda_allocator, current_device, raw_stream
from flashmoe_science.errors import InputError
from flashmoe_science.moe_arguments import (
    Activation,
    W13Layout,
    check_moe_arguments,
    reject_moe_gradients,
    reject_overlap,
)

_MAX_PLANS = 1024  # per thread; a plan is a few kilobytes
_DTYPES = (torch.float16, torch.bfloat16)
_Call = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None"],
    torch.Tensor,
]


class _ThreadPlans(threading.local):
    """A plan owns the buffers that its launches read, so every thread has its own; no lock is needed."""

    def __init__(self) -> None:
        self.ready: dict[tuple[Any, ...], _Call] = {}


_this_thread = _ThreadPlans()


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
    choice: MoeChoice | None = None,
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
    try:
        device = hidden_states.get_device()
        signature = (
            hidden_states.shape,
            w13.shape,
            w2.shape,
            topk_weights.shape,
            topk_ids.shape,
            hidden_states.stride(),
            w13.stride(),
            w2.stride(),
            topk_weights.stride(),
            topk_ids.stride(),
            hidden_states.dtype,
            w13.dtype,
            w2.dtype,
            topk_weights.dtype,
            topk_ids.dtype,
            device,
            w13.get_device(),
            w2.get_device(),
            topk_weights.get_device(),
            topk_ids.get_device(),
            None if out is None else (out.shape, out.stride(), out.dtype, out.get_device()),
            activation,
            w13_layout,
            choice,
        )
        call = _this_thread.ready.get(signature)
    except (AttributeError, TypeError, RuntimeError):
        # Not tensors, or not dense ones: the checks say which.
        check_moe_arguments(hidden_states, w13, w2, topk_weights, topk_ids, activation, out)
        raise
    if hidden_states.requires_grad or w13.requires_grad or w2.requires_grad or topk_weights.requires_grad:
        reject_moe_gradients(hidden_states=hidden_states, w13=w13, w2=w2, topk_weights=topk_weights)
    if out is not None and out.requires_grad:
        reject_moe_gradients(out=out)
    if call is None or device != current_device():
        check_moe_arguments(hidden_states, w13, w2, topk_weights, topk_ids, activation, out)
        with torch.cuda.device(device):
            if call is None:
                asked = _problem(hidden_states, w13, w2, topk_ids, activation, w13_layout)
                call = _prepare(asked, device, choice)
                if len(_this_thread.ready) >= _MAX_PLANS:
                    _this_thread.ready.clear()
                _this_thread.ready[signature] = call
            return call(hidden_states, w13, w2, topk_weights, topk_ids, out)
    return call(hidden_states, w13, w2, topk_weights, topk_ids, out)


def explain(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    activation: Activation = Activation.SILU,
    w13_layout: W13Layout = W13Layout.CONCAT,
) -> MoeChoice:
    """Which kernels and configuration `forward` takes for these tensors, and why. Launches nothing."""
    check_moe_arguments(hidden_states, w13, w2, topk_weights, topk_ids, activation)
    problem = _problem(hidden_states, w13, w2, topk_ids, activation, w13_layout)
    return select(problem, device_of(hidden_states.get_device()))


def _problem(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Activation,
    w13_layout: W13Layout,
) -> MoeProblem:
    if hidden_states.dtype not in _DTYPES:
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
    )


def _prepare(problem: MoeProblem, device: int, choice: MoeChoice | None) -> _Call:
    """The call itself, for tensors of the problem's shapes; the device is current, now and when it is called."""
    make_context_current(device)
    allocate = cuda_allocator()
    sizes, strides = (problem.tokens, problem.hidden), (problem.hidden, 1)
    dtype, bytes_ = problem.dtype, torch.uint8
    if problem.tokens == 0:
        return lambda x, w13, w2, weights, ids, out: allocate(sizes, strides, dtype) if out is None else out
    planned = plan(problem, device_of(device), choice)
    launch, workspace_sizes = planned.launch, (planned.workspace_bytes,)

    def call(
        hidden_states: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        x, w13_address, w2_address = hidden_states.data_ptr(), w13.data_ptr(), w2.data_ptr()
        weights, ids = topk_weights.data_ptr(), topk_ids.data_ptr()
        if out is None:
            out = allocate(sizes, strides, dtype)
            output = out.data_ptr()
        else:
            output = out.data_ptr()
            reject_overlap(
                out,
                hidden_states=hidden_states,
                w13=w13,
                w2=w2,
                topk_weights=topk_weights,
                topk_ids=topk_ids,
            )
        if not (x and w13_address and w2_address and weights and ids and output):
            # A fake tensor looks like the real one that this was planned for.
            reject_without_memory(
                hidden_states=hidden_states,
                w13=w13,
                w2=w2,
                topk_weights=topk_weights,
                topk_ids=topk_ids,
                out=out,
            )
        if (x | w13_address | w2_address | output) & 15:
            raise InputError(_misaligned(hidden_states=hidden_states, w13=w13, w2=w2, out=out))
        # Freed when this returns: what the allocator puts there next on this stream comes after the launches.
        workspace = allocate(workspace_sizes, (1,), bytes_)
        launch(
            x,
            w13_address,
            w2_address,
            weights,
            ids,
            output,
            workspace.data_ptr(),
            raw_stream(device),
        )
        return out

    return call


def _misaligned(**tensors: torch.Tensor) -> str:
    name = next(name for name, tensor in tensors.items() if tensor.data_ptr() % 16)
    return f"{name} does not start at a multiple of 16 bytes (a view at an odd offset); pass {name}.clone()"

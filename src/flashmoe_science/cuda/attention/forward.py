"""Attention forward on CUDA tensors: a cached launch plan per shape, then as little as possible per call."""

from __future__ import annotations

import math
import threading
from typing import Any, NamedTuple

import torch

from flashmoe_science.arguments import (
    check_arguments,
    check_causal,
    reject_gradients,
    reject_without_memory,
)
from flashmoe_science.cuda.attention.problem import Choice, Problem
from flashmoe_science.cuda.attention.select import plan, select
from flashmoe_science.cuda.device import Device, device_of
from flashmoe_science.cuda.driver import make_context_current
from flashmoe_science.cuda.launch import Launch
from flashmoe_science.cuda.repeat import (
    Call,
    Matches,
    cuda_allocator,
    current_device,
    matcher,
    never,
    prepare,
)
from flashmoe_science.errors import InputError

_MAX_PLANS = 4096  # per thread; a plan is about a kilobyte
_DTYPES = (torch.float16, torch.bfloat16)
_Recent = tuple[Any, Any, Any, Matches, Call | None]
_NONE_YET: _Recent = (None, None, None, never, None)


class _Ready(NamedTuple):
    call: Call
    recent: _Recent
    """(causal, softmax_scale, return_lse, whether the tensors are like this call's, call): what the next call is
    compared with.
    """


class _ThreadPlans(threading.local):
    """A plan owns the buffer that its launch reads, so every thread has its own; no lock is needed."""

    def __init__(self) -> None:
        self.ready: dict[tuple[Any, ...], _Ready] = {}
        self.recent = _NONE_YET


this_thread = _ThreadPlans()


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    choice: Choice | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Exact attention, softmax(query keyᵀ x scale) value, on PyTorch's current stream.

    `flashmoe_science.flash_attention` for CUDA tensors. Arguments are checked once for each combination of
    shapes, strides, types and options; then a call is a look-up (a comparison, if it is like this thread's last),
    an allocation and a launch. Nothing is synchronised. Can be captured in a CUDA graph after one call with the
    same combination.

    Args:
        query: (batch, num_heads, seqlen_q, head_dim), float16 or bfloat16; head_dim a
            multiple of 8 up to 256.
        key, value: (batch, num_kv_heads, seqlen_k, head_dim); num_heads is a multiple of num_kv_heads.
        causal: row i sees keys up to i + seqlen_k - seqlen_q (bottom-right alignment).
        softmax_scale: 1 / sqrt(head_dim) if None.
        return_lse: also return the log-sum-exp of the scaled scores.
        choice: the kernel and configuration to use instead of `select`'s.

    Returns:
        The output, like query; and the log-sum-exp, float32 (batch, num_heads, seqlen_q), or None.

    Raises:
        InputError: arguments that do not fit together or require a gradient, a last dimension that is not
        contiguous, or rows that are not aligned to 16 bytes.
        DeviceError, BuildError: see `flashmoe_science.cuda.driver.load`.
    """
    recent_causal, recent_scale, recent_lse, matches, call = this_thread.recent
    if (
        causal is recent_causal
        and return_lse is recent_lse
        and (
            softmax_scale is recent_scale or (type(softmax_scale) is float and softmax_scale == recent_scale)
        )
        and choice is None
        and matches(query, key, value)
        and call is not None
    ):
        return call(query, key, value)
    if causal is not True and causal is not False:
        causal = check_causal(causal)
    try:
        device = query.get_device()
        signature = (
            query.shape,
            key.shape,
            value.shape,
            query.stride(),
            key.stride(),
            value.stride(),
            query.dtype,
            key.dtype,
            value.dtype,
            device,
            key.get_device(),
            value.get_device(),
            torch.is_inference_mode_enabled(),  # changes what matches
            causal,
            softmax_scale,
            return_lse,
            choice,
        )
        ready = this_thread.ready.get(signature)
    except (AttributeError, TypeError, RuntimeError):
        # Not tensors, not dense, or an argument that cannot be hashed: the checks say which.
        check_arguments(query, key, value, softmax_scale)
        raise
    if query.requires_grad or key.requires_grad or value.requires_grad:
        reject_gradients(query, key, value)
    if type(query) is not torch.Tensor or type(key) is not torch.Tensor or type(value) is not torch.Tensor:
        # A launch on memory that is not there would end the process's use of the GPU.
        reject_without_memory(query=query, key=key, value=value)
    if ready is None or device != current_device():
        # Rare, or dearer than a check would be.
        check_arguments(query, key, value, softmax_scale)
        with torch.cuda.device(device):
            if ready is None:
                ready = _make_ready(signature, query, key, value)
            return ready.call(query, key, value)
    this_thread.recent = ready.recent
    return ready.call(query, key, value)


def explain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    device: Device | None = None,
) -> Choice:
    """Which kernel and configuration `forward` takes for these tensors, and why. Launches nothing.

    ``device``: a GPU that need not be there, for tensors of any device, ``meta`` among them; theirs unless given.
    """
    check_arguments(query, key, value, softmax_scale)
    causal = check_causal(causal)
    problem = _problem(query, key, value, _output_like(query), causal, softmax_scale, return_lse)
    return select(problem, device_of(query.get_device()) if device is None else device)


def _nothing(query: int, key: int, value: int, output: int, lse: int, stream: int) -> None:
    """The launch of a call without output elements."""


def _make_ready(
    signature: tuple[Any, ...], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> _Ready:
    """Check, choose, compile, load and prepare; the query's device is current."""
    causal, softmax_scale, return_lse, choice = signature[-4:]
    if query.dtype not in _DTYPES:
        raise InputError(
            f"query has dtype {query.dtype}; the CUDA kernels take float16 and bfloat16: use .to()"
        )
    where = device_of(query.get_device())
    make_context_current(where.index)
    output = _output_like(query)
    launch: Launch = _nothing
    if query.numel() > 0:
        problem = _problem(query, key, value, output, causal, softmax_scale, return_lse)
        launch = plan(problem, where, choice).launch
    call = prepare(output, return_lse, launch, where.index, cuda_allocator())
    matches = matcher(query, key, value) if choice is None else never
    if torch.cuda.device_count() > 1:
        matches = _and_current(matches, where.index)
    ready = _Ready(call, (causal, softmax_scale, return_lse, matches, call))
    if len(this_thread.ready) >= _MAX_PLANS:
        this_thread.ready.clear()
    this_thread.ready[signature] = ready
    return ready


def _and_current(matches: Matches, device: int) -> Matches:
    """With one GPU, that is always the current one."""
    return lambda query, key, value: matches(query, key, value) and current_device() == device


def _output_like(query: torch.Tensor) -> torch.Tensor:
    """A meta tensor with the output's strides: the query's order, unless that would split rows."""
    like = torch.empty_like(query, device="meta")
    if like.stride(3) == 1 and all(stride % 8 == 0 for stride in like.stride()[:3]):
        return like
    return torch.empty_like(query, device="meta", memory_format=torch.contiguous_format)


def _problem(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
    return_lse: bool,
) -> Problem:
    batch, num_heads, seqlen_q, head_dim = query.shape
    return Problem(
        batch=batch,
        num_heads=num_heads,
        num_kv_heads=key.shape[1],
        seqlen_q=seqlen_q,
        seqlen_k=key.shape[2],
        head_dim=head_dim,
        dtype=query.dtype,
        causal=causal,
        softmax_scale=1 / math.sqrt(head_dim) if softmax_scale is None else float(softmax_scale),
        return_lse=return_lse,
        query_strides=_strides("query", query),
        key_strides=_strides("key", key),
        value_strides=_strides("value", value),
        output_strides=_strides("output", output),
    )


def _strides(name: str, tensor: torch.Tensor) -> tuple[int, int, int]:
    """Strides of (batch, head, row) in elements; those of dimensions of size 1 are never used: 0."""
    shape, strides = tensor.shape, tensor.stride()
    if strides[3] != 1:
        raise InputError(
            f"{name} has stride {strides[3]} in its last dimension, expected 1; pass {name}.contiguous()"
        )
    used = tuple(0 if size <= 1 else stride for size, stride in zip(shape[:3], strides[:3], strict=True))
    if any(stride * tensor.element_size() % 16 for stride in used):
        raise InputError(
            f"{name} has strides {strides}, and rows must start at multiples of 16 bytes; "
            f"pass {name}.contiguous()"
        )
    return used[0], used[1], used[2]

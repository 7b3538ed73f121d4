"""Attention forward on CUDA tensors: a cached launch plan per shape, then as little as possible per call."""

from __future__ import annotations

import functools
import math
import threading
from typing import Any

import torch

from flashmoe_science.cuda.driver import make_context_current
from flashmoe_science.cuda.problem import Choice, Device, LaunchPlan, Problem
from flashmoe_science.cuda.select import module, select
from flashmoe_science.errors import InputError
from flashmoe_science.jit.limits import device_architecture

_MAX_PLANS = 4096  # per thread; a plan is about a kilobyte
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # missing from CPU builds of torch


class _ThreadPlans(threading.local):
    """A plan owns the buffer that its launch reads, so every thread has its own; no lock is needed."""

    def __init__(self) -> None:
        self.plans: dict[tuple[Any, ...], LaunchPlan] = {}


_thread = _ThreadPlans()


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

    Shapes, dtypes and devices are checked by `flashmoe_science.flash_attention`, which calls this; strides
    and alignment here. Nothing is synchronised. Can be captured in a CUDA graph after one call with the same
    shapes.

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
        InputError: a last dimension is not contiguous, or rows are not aligned to 16 bytes.
        DeviceError, BuildError: see `flashmoe_science.cuda.driver.load`.
    """
    device = query.get_device()
    if device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            return forward(
                query,
                key,
                value,
                causal=causal,
                softmax_scale=softmax_scale,
                return_lse=return_lse,
                choice=choice,
            )
    signature = (
        query.shape,
        key.shape,
        query.stride(),
        key.stride(),
        value.stride(),
        query.dtype,
        device,
        causal,
        softmax_scale,
        return_lse,
        choice,
    )
    output = torch.empty_like(query)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32) if return_lse else None
    plan = _thread.plans.get(signature)
    if plan is None:
        plan = _make_plan(signature, query, key, value, output)
    query_address, key_address, value_address = query.data_ptr(), key.data_ptr(), value.data_ptr()
    if (query_address | key_address | value_address) & 15:
        raise InputError(_misaligned(query, key, value))
    plan.launch(
        query_address,
        key_address,
        value_address,
        output.data_ptr(),
        0 if lse is None else lse.data_ptr(),
        _raw_stream(device),  # type: ignore[misc]
    )
    return output, lse


def explain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
) -> Choice:
    """Which kernel and configuration `forward` takes for these tensors, and why. Launches nothing."""
    output = torch.empty_like(query, device="meta")
    problem = _problem(query, key, value, output, causal, softmax_scale, return_lse)
    return select(problem, device_of(query.get_device()))


@functools.cache
def device_of(index: int) -> Device:
    """The device's properties; DeviceError if it is too old for every kernel."""
    properties = torch.cuda.get_device_properties(index)
    return Device(
        index=index,
        architecture=device_architecture(properties.major, properties.minor),
        multiprocessors=properties.multi_processor_count,
        l2_bytes=properties.L2_cache_size,
    )


class _Nothing:
    """The plan of a call without output elements."""

    def launch(self, query: int, key: int, value: int, output: int, lse: int, stream: int) -> None:
        pass


def _make_plan(
    signature: tuple[Any, ...],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
) -> LaunchPlan:
    *_, device, causal, softmax_scale, return_lse, choice = signature
    make_context_current(device)
    plan: LaunchPlan
    if output.numel() == 0:
        plan = _Nothing()
    else:
        problem = _problem(query, key, value, output, causal, softmax_scale, return_lse)
        where = device_of(device)
        if choice is None:
            choice = select(problem, where)
        plan = module(choice.kernel).plan(problem, choice.configuration, where)
    if len(_thread.plans) >= _MAX_PLANS:
        _thread.plans.clear()
    _thread.plans[signature] = plan
    return plan


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
        softmax_scale=1 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale,
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


def _misaligned(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str:
    tensors = {"query": query, "key": key, "value": value}
    name = next(name for name, tensor in tensors.items() if tensor.data_ptr() % 16)
    return f"{name} does not start at a multiple of 16 bytes (a view at an odd offset); pass {name}.clone()"

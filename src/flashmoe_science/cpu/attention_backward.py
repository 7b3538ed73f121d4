"""The gradients of attention on the CPU: the launch of kernels/cpu/attention_backward.cpp, planned once for each
combination of shapes, strides and types.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from flashmoe_science.alike import Matches, matcher, never, no_call
from flashmoe_science.arguments import reject_without_memory
from flashmoe_science.configs.ablation import Ablation
from flashmoe_science.cpu.library import ELEMENT_TYPES, allocate, byte_strides, load_function
from flashmoe_science.gradients import Gradients, Needs, with_contiguous_rows
from flashmoe_science.jit import host
from flashmoe_science.jit.host import InstructionSet
from flashmoe_science.plans import keep

_MAX_PLANS = 4096
_NO_STRIDES = (0, 0, 0)


FIELDS: tuple[tuple[str, Any], ...] = (
    *((name, ctypes.c_int64) for name in ("element_type", "batch", "heads", "kv_heads")),
    *((name, ctypes.c_int64) for name in ("seqlen_q", "seqlen_k", "head_dim")),
    *((name, ctypes.c_int64 * 3) for name in ("query_stride", "key_stride", "value_stride", "out_stride")),
)
"""What the descriptions of both passes begin with."""
OPTIONS = (("causal", ctypes.c_int64), ("softmax_scale", ctypes.c_double))
"""What they end with."""
_Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Sizes, strides and dtype."""


class _Problem(ctypes.Structure):
    """AttentionBackwardProblem of backward_problem.h."""

    _fields_ = (
        *FIELDS,
        *((name, ctypes.c_int64 * 3) for name in ("grad_out_stride", "grad_lse_stride")),
        *(
            (name, ctypes.c_int64 * 3)
            for name in ("grad_query_stride", "grad_key_stride", "grad_value_stride")
        ),
        *OPTIONS,
    )


@dataclass(frozen=True)
class _Plan:
    launch: Callable[..., int]
    """flashmoe_attention_backward, as a built-in function, for the chosen instruction set."""
    address: int
    """Of `problem`."""
    problem: _Problem
    layouts: tuple[_Layout, _Layout, _Layout]
    """Of the gradients."""


class _Repeat(NamedTuple):
    """A call that was made, and what the next one is compared with."""

    options: tuple[object, ...]
    """causal, softmax_scale, needs and instruction_set."""
    number: int
    """Of tensors: there may be a gradient of the log-sum-exp."""
    matches: Matches
    call: Callable[..., Gradients]


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.last = _Repeat((), 0, never, no_call)


_thread = _OfThread()
_plans: dict[tuple[object, ...], _Plan] = {}


def backward(
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    grad_lse: torch.Tensor | None,
    *,
    causal: bool,
    softmax_scale: float | None,
    needs: Needs,
    instruction_set: InstructionSet | None = None,
) -> Gradients:
    """See `flashmoe_science.gradients.Backward`. A gradient of the output whose last stride is not 1 is copied.

    Args:
        instruction_set: whose code; the CPU's best unless given.

    Raises:
        InputError: a tensor has no memory.
        DeviceError, BuildError: see `flashmoe_science.jit.host.build`.
    """
    tensors: tuple[torch.Tensor, ...] = (grad_output, query, key, value, output, lse)
    if grad_lse is not None:
        tensors = (*tensors, grad_lse)
    options = causal, softmax_scale, needs, instruction_set
    last_options, number, matches, call = _thread.last
    if len(tensors) == number and options == last_options and matches(*tensors):
        return call(*tensors)
    if query.numel() == 0 or key.numel() == 0:
        zero_query, zero_key, zero_value = (
            torch.zeros_like(tensor) if needed else None
            for tensor, needed in zip((query, key, value), needs, strict=True)
        )
        return zero_query, zero_key, zero_value
    if grad_output.stride(3) != 1:
        grad_output = grad_output.contiguous()
    signature = (
        query.shape,
        key.shape,
        query.stride(),
        key.stride(),
        value.stride(),
        output.stride(),
        grad_output.stride(),
        None if grad_lse is None else grad_lse.stride(),
        query.dtype,
        causal,
        softmax_scale,
        instruction_set,
    )
    plan = _plans.get(signature)
    if plan is None:
        given = query, key, value, output
        if any(tensor.stride(3) != 1 for tensor in given):
            query, key, value, output = with_contiguous_rows(*given)
            return backward(
                grad_output,
                query,
                key,
                value,
                output,
                lse,
                grad_lse,
                causal=causal,
                softmax_scale=softmax_scale,
                needs=needs,
                instruction_set=instruction_set,
            )
        load = _load(instruction_set or host.choose_instruction_set(), Ablation.NONE)
        plan = _plan(query, key, value, output, grad_output, grad_lse, causal, softmax_scale, load)
        keep(_plans, signature, plan, _MAX_PLANS)
    call = _caller(plan, needs)
    tensors = (grad_output, query, key, value, output, lse.contiguous(), *tensors[6:])
    _thread.last = _Repeat(options, len(tensors), matcher(*tensors, under_no_grad=True), call)
    return call(*tensors)


def _caller(plan: _Plan, needs: Needs) -> Callable[..., Gradients]:
    """Calls by a plan, without what finds it."""
    launch, num_threads = plan.launch, torch.get_num_threads
    like_query, like_key, like_value = (
        layout if needed else None for layout, needed in zip(plan.layouts, needs, strict=True)
    )

    def call(
        grad_output: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        grad_lse: torch.Tensor | None = None,
    ) -> Gradients:
        of_query = None if like_query is None else allocate(*like_query)
        of_key = None if like_key is None else allocate(*like_key)
        of_value = None if like_value is None else allocate(*like_value)
        if launch(
            plan.address,  # of the plan: the call keeps what it reads
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            output.data_ptr(),
            lse.data_ptr(),
            grad_output.data_ptr(),
            0 if grad_lse is None else grad_lse.data_ptr(),
            0 if of_query is None else of_query.data_ptr(),
            0 if of_key is None else of_key.data_ptr(),
            0 if of_value is None else of_value.data_ptr(),
            num_threads(),
        ):
            reject_without_memory(
                query=query, key=key, value=value, output=output, lse=lse, grad_output=grad_output
            )
        return of_query, of_key, of_value

    return call


def _layout(tensor: torch.Tensor) -> _Layout:
    """Of a gradient: like the tensor, and contiguous where one with its strides cannot be had."""
    like = torch.empty_like(tensor, dtype=tensor.dtype, device="meta")
    if like.stride(3) != 1:
        like = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return tuple(like.shape), like.stride(), tensor.dtype


def fields(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor
) -> tuple[Any, ...]:
    """The `FIELDS` of a call."""
    batch, heads, seqlen_q, head_dim = query.shape
    return (
        *(ELEMENT_TYPES[query.dtype], batch, heads, max(1, key.shape[1]), seqlen_q, key.shape[2], head_dim),
        *map(byte_strides, (query, key, value, output)),
    )


def options(query: torch.Tensor, causal: bool, softmax_scale: float | None) -> tuple[bool, float]:
    """Its `OPTIONS`."""
    return causal, query.shape[3] ** -0.5 if softmax_scale is None else float(softmax_scale)


def _plan(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    grad_output: torch.Tensor,
    grad_lse: torch.Tensor | None,
    causal: bool,
    softmax_scale: float | None,
    launch: Callable[..., int],
) -> _Plan:
    layouts = _layout(query), _layout(key), _layout(value)
    size = query.element_size()
    problem = _Problem(
        *fields(query, key, value, output),
        byte_strides(grad_output),
        _NO_STRIDES if grad_lse is None else byte_strides(grad_lse),
        *(tuple(stride * size for stride in strides[:3]) for _, strides, _ in layouts),
        *options(query, causal, softmax_scale),
    )
    return _Plan(
        launch=launch,
        address=ctypes.addressof(problem),
        problem=problem,
        layouts=layouts,
    )


@functools.cache
def _load(instruction_set: InstructionSet, ablation: Ablation) -> Callable[..., int]:
    return load_function(
        "attention_backward", "flashmoe_attention_backward_method", instruction_set, ablation.macros
    )

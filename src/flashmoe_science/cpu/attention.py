"""Attention on the CPU: the kernel in kernels/cpu, compiled at first use, and its launch.

A call of a small shape takes the kernel a microsecond, so what depends only on shapes, strides and types
(checks, strides in bytes, the kernel for this dtype) is done once and kept as a plan.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from flashmoe_science.arguments import check_arguments, check_causal, reject_without_memory
from flashmoe_science.configs.ablation import Ablation
from flashmoe_science.cpu.attention_backward import backward
from flashmoe_science.cpu.library import CPU, ELEMENT_TYPES, allocate, byte_strides, load_function
from flashmoe_science.jit import host
from flashmoe_science.jit.host import InstructionSet
from flashmoe_science.plans import keep

__all__ = ["backward", "forward", "without"]

_MAX_PLANS = 4096


class _Problem(ctypes.Structure):
    """AttentionProblem of attention_forward.cpp."""

    _fields_ = (
        ("element_type", ctypes.c_int64),
        ("batch", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("seqlen_q", ctypes.c_int64),
        ("seqlen_k", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("query_stride", ctypes.c_int64 * 3),
        ("key_stride", ctypes.c_int64 * 3),
        ("value_stride", ctypes.c_int64 * 3),
        ("out_stride", ctypes.c_int64 * 3),
        ("causal", ctypes.c_int64),
        ("softmax_scale", ctypes.c_double),
    )


@dataclass(frozen=True)
class _Plan:
    launch: Callable[..., int]
    """flashmoe_attention_forward, as a built-in function, for the chosen instruction set."""
    address: int
    """Of `problem`."""
    problem: _Problem
    out_shape: tuple[int, ...]
    out_strides: tuple[int, ...]
    """In elements."""
    lse_shape: tuple[int, int, int]


_plans: dict[tuple[object, ...], _Plan] = {}


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool,
    softmax_scale: float | None,
    return_lse: bool,
    instruction_set: InstructionSet | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`flashmoe_science.flash_attention` for CPU tensors; arguments, results and errors as there. Autograd does not see
    it.

    Args:
        softmax_scale: 1 / sqrt(head_dim) if None.
        instruction_set: run the code for this one; the CPU's best unless given.

    Returns:
        The output and, with `return_lse`, the log-sum-exp, else None.
    """
    if causal is not True and causal is not False:
        causal = check_causal(causal)
    try:
        contiguous = query.is_contiguous() and key.is_contiguous() and value.is_contiguous()
        signature = (
            query.shape,
            key.shape,
            value.shape,
            # The query's always: the output's are like them, and those of dimensions of size 1 are anything.
            query.stride() if contiguous else (query.stride(), key.stride(), value.stride()),
            query.dtype,
            key.dtype,
            value.dtype,
            causal,
            softmax_scale,
            instruction_set,
        )
        plan = _plans.get(signature) if key.is_cpu and value.is_cpu else None
    except (AttributeError, TypeError, RuntimeError):
        # Not tensors, not dense, or an argument that cannot be hashed: the checks say which.
        check_arguments(query, key, value, softmax_scale)
        raise
    if plan is None:
        plan = _make_plan(signature, query, key, value, causal, softmax_scale, instruction_set)
    out = allocate(plan.out_shape, plan.out_strides, query.dtype)
    lse = torch.empty(plan.lse_shape, dtype=torch.float32, device=CPU) if return_lse else None
    if plan.launch(
        plan.address,
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        out.data_ptr(),
        0 if lse is None else lse.data_ptr(),
        torch.get_num_threads(),
    ):
        reject_without_memory(query=query, key=key, value=value, output=out)
    return out, lse


def _make_plan(
    signature: tuple[object, ...],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
    instruction_set: InstructionSet | None,
) -> _Plan:
    plan = _plan(
        query,
        key,
        value,
        causal,
        softmax_scale,
        _load_attention(instruction_set or host.choose_instruction_set(), Ablation.NONE),
    )
    keep(_plans, signature, plan, _MAX_PLANS)
    return plan


def _plan(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
    launch: Callable[..., int],
) -> _Plan:
    check_arguments(query, key, value, softmax_scale)
    batch, heads, seqlen_q, head_dim = query.shape
    out = torch.empty_like(query, dtype=query.dtype, device=CPU)
    # One with the query's strides cannot always be had.
    if out.stride(3) != 1:
        out = torch.empty(query.shape, dtype=query.dtype, device=CPU)
    problem = _Problem(
        element_type=ELEMENT_TYPES[query.dtype],
        batch=batch,
        heads=heads,
        kv_heads=max(1, key.shape[1]),
        seqlen_q=seqlen_q,
        seqlen_k=key.shape[2],
        head_dim=head_dim,
        query_stride=byte_strides(query),
        key_stride=byte_strides(key),
        value_stride=byte_strides(value),
        out_stride=byte_strides(out),
        causal=causal,
        softmax_scale=head_dim**-0.5 if softmax_scale is None else float(softmax_scale),
    )
    return _Plan(
        launch=launch,
        address=ctypes.addressof(problem),
        problem=problem,
        out_shape=tuple(out.shape),
        out_strides=out.stride(),
        lse_shape=(batch, heads, seqlen_q),
    )


def without(
    ablation: Ablation, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool
) -> Callable[[], torch.Tensor]:
    """A call of the kernel without a part of its work, whose output is wrong on purpose; of the whole one for
    ``Ablation.NONE``. For measuring what the part costs. Compiles it; errors as in `build` and `forward`.
    """
    plan = _plan(query, key, value, causal, None, _load_attention(host.choose_instruction_set(), ablation))
    out = allocate(plan.out_shape, plan.out_strides, query.dtype)
    addresses = (plan.address, *(tensor.data_ptr() for tensor in (query, key, value, out)))

    def call() -> torch.Tensor:
        if plan.launch(*addresses, 0, torch.get_num_threads()):
            reject_without_memory(query=query, key=key, value=value, output=out)
        return out

    return call


@functools.cache
def _load_attention(instruction_set: InstructionSet, ablation: Ablation) -> Callable[..., int]:
    return load_function("attention_forward", "flashmoe_attention_method", instruction_set, ablation.macros)

"""Attention on the CPU: the kernel in kernels/cpu, compiled at first use, and its launch.

A call of a small shape takes the kernel a microsecond, so what depends only on shapes, strides and types
(checks, strides in bytes, the kernel for this dtype) is done once and kept as a plan. A call that is like this
thread's last one is recognised by one comparison in C++ (`flashmoe_science.alike`), in a quarter of the time of
finding its plan.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from flashmoe_science.alike import Matches, matcher, never, no_call
from flashmoe_science.arguments import check_arguments, check_causal, reject_without_memory
from flashmoe_science.configs.ablation import Ablation
from flashmoe_science.cpu.attention_backward import FIELDS, OPTIONS, backward, fields, options
from flashmoe_science.cpu.library import CPU, allocate, features_besides, load_function
from flashmoe_science.jit import host
from flashmoe_science.jit.host import InstructionSet
from flashmoe_science.plans import keep

__all__ = ["backward", "forward", "repeated", "without"]

_MAX_PLANS = 4096


class _Problem(ctypes.Structure):
    """AttentionProblem of attention_forward.cpp."""

    _fields_ = (*FIELDS, *OPTIONS)


class _Repeat(NamedTuple):
    """A call that was made, and what the next one is compared with."""

    causal: bool
    softmax_scale: float | None
    return_lse: bool
    recorded: bool
    """Whether autograd would record it, where that is on: one of the tensors requires a gradient."""
    matches: Matches
    call: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]
    """What `flash_attention` returns, of tensors that match."""
    problem: object
    """Which the call reads by its address."""


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
    repeats: dict[tuple[bool, ...], _Repeat] = field(default_factory=dict)
    """By whether the log-sum-exp is returned, and by what changes what matches: see `_remember`."""


_NOTHING = _Repeat(False, None, False, False, never, no_call, None)


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.last = _NOTHING
        """The last call that was made."""
        self.takes_turns = False
        """Whether the last call was another than the one before: the next is not compared with it first."""
        self.by_shape: dict[tuple[object, ...], _Repeat] = {}
        """The last with these shapes of query and key and these options: layers of two kinds take turns."""


_thread = _OfThread()
_plans: dict[tuple[object, ...], _Plan] = {}


def repeated(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
    return_lse: bool,
) -> Any:
    """What `flash_attention` returns for a call that is like one of this thread's, or None for any other.

    What matches has the same type and dispatch keys as what `forward` was given to know again, a transform's and
    autocast's among them. Whoever asks has seen to tangents and to modes that see operators: keys do not show them.
    """
    thread = _thread
    same_causal, same_scale, same_lse, recorded, matches, call, _ = thread.last
    if (
        not thread.takes_turns
        and causal is same_causal
        and return_lse is same_lse
        and (
            softmax_scale is same_scale
            # One that is computed anew for each call is another object of the same value.
            or (type(softmax_scale) is float and softmax_scale == same_scale)
        )
        and matches(query, key, value)
        and not (recorded and torch.is_grad_enabled())
    ):
        return call(query, key, value)
    try:
        other = thread.by_shape.get((query.shape, key.shape, causal, softmax_scale, return_lse))
    except (AttributeError, TypeError, RuntimeError):
        # Not tensors, not dense, or a scale that cannot be hashed.
        return None
    if (
        other is None
        or (other is thread.last and not thread.takes_turns)
        or causal is not other.causal
        or return_lse is not other.return_lse
        or not other.matches(query, key, value)
        or (other.recorded and torch.is_grad_enabled())
    ):
        return None
    thread.takes_turns = other is not thread.last
    thread.last = other
    return other.call(query, key, value)


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool,
    softmax_scale: float | None,
    return_lse: bool,
    instruction_set: InstructionSet | None = None,
    repeatable: bool = False,
    recorded: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`flashmoe_science.flash_attention` for CPU tensors; arguments, results and errors as there. Autograd does not see
    it.

    Args:
        softmax_scale: 1 / sqrt(head_dim) if None.
        instruction_set: whose code; the CPU's best unless given.
        repeatable: `repeated` makes the next calls like this one, which are as plain as these tensors are: nobody
            watches, and autocast has cast them.
        recorded: as repeatable, of a call that autograd records, for which nobody has asked `repeated` yet.

    Returns:
        The output and, with `return_lse`, the log-sum-exp, else None.
    """
    if recorded:
        results = repeated(query, key, value, causal, softmax_scale, return_lse)
        if results is not None:
            return results if return_lse else (results, None)
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
        launch = _load_attention(instruction_set or host.choose_instruction_set(), Ablation.NONE)
        plan = _plan(query, key, value, causal, softmax_scale, launch)
        keep(_plans, signature, plan, _MAX_PLANS)
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
    if repeatable or recorded:
        _remember(plan, query, key, value, causal, softmax_scale, return_lse)
    return out, lse


def _remember(
    plan: _Plan,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
    return_lse: bool,
) -> None:
    """Make a call that was made the thread's last."""
    thread = _thread
    recorded = query.requires_grad or key.requires_grad or value.requires_grad
    kind = return_lse, recorded, torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
    repeat = plan.repeats.get(kind)
    if repeat is None:
        matches = matcher(query, key, value, under_no_grad=True)
        call = _caller(plan, query.dtype, return_lse)
        repeat = _Repeat(causal, softmax_scale, return_lse, recorded, matches, call, plan.problem)
        plan.repeats[kind] = repeat
    thread.last = repeat
    keep(thread.by_shape, (query.shape, key.shape, causal, softmax_scale, return_lse), repeat, _MAX_PLANS)


def _caller(
    plan: _Plan, dtype: torch.dtype, return_lse: bool
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]:
    """Calls by a plan, without what finds it."""
    launch, address, num_threads = plan.launch, plan.address, torch.get_num_threads
    sizes, strides, lse_sizes = plan.out_shape, plan.out_strides, plan.lse_shape
    _, heads, seqlen_q = lse_sizes
    lse_strides, float32 = (heads * seqlen_q, seqlen_q, 1), torch.float32

    def call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        out = allocate(sizes, strides, dtype)
        if return_lse:
            lse = allocate(lse_sizes, lse_strides, float32)
            results: Any = (out, lse)
            lse_address = lse.data_ptr()
        else:
            results, lse_address = out, 0
        if launch(
            address,
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            out.data_ptr(),
            lse_address,
            num_threads(),
        ):
            reject_without_memory(query=query, key=key, value=value, output=out)
        return results

    return call


def _plan(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
    launch: Callable[..., int],
) -> _Plan:
    check_arguments(query, key, value, softmax_scale)
    out = torch.empty_like(query, dtype=query.dtype, device=CPU)
    # One with the query's strides cannot always be had.
    if out.stride(3) != 1:
        out = torch.empty(query.shape, dtype=query.dtype, device=CPU)
    problem = _Problem(*fields(query, key, value, out), *options(query, causal, softmax_scale))
    return _Plan(
        launch=launch,
        address=ctypes.addressof(problem),
        problem=problem,
        out_shape=tuple(out.shape),
        out_strides=out.stride(),
        lse_shape=(problem.batch, problem.heads, problem.seqlen_q),
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
    return load_function(
        "attention_forward",
        "flashmoe_attention_method",
        instruction_set,
        ablation.macros,
        features_besides("attention_forward", instruction_set),
    )

"""The mixture of experts on the CPU: the kernel in kernels/cpu, compiled at first use.

What depends only on shapes and types (checks, the kernel for this dtype) is done once and kept as a plan. A call that
is like this thread's last one is recognised by one comparison, as of attention (`flashmoe_science.cpu.attention`).
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from flashmoe_science.alike import Matches, matcher, never, no_call
from flashmoe_science.arguments import reject_without_memory
from flashmoe_science.cpu.library import CPU, ELEMENT_TYPES, allocate, load_function
from flashmoe_science.jit import host
from flashmoe_science.jit.host import InstructionSet
from flashmoe_science.moe_arguments import (
    ACTIVATION_CODES,
    Activation,
    W13Layout,
    check_moe_arguments,
    reject_overlap,
    reject_unrecorded,
)
from flashmoe_science.plans import keep

_MAX_PLANS = 4096


FIELDS = tuple(
    (name, ctypes.c_int64)
    for name in (
        *("element_type", "tokens", "hidden", "intermediate", "experts", "top_k"),
        *("activation", "interleaved", "ids64"),
    )
)
"""What the descriptions of all passes begin with."""


class Problem(ctypes.Structure):
    """MoeProblem of moe_job.h."""

    _fields_ = (*FIELDS, ("w13_group", ctypes.c_int64), ("w2_group", ctypes.c_int64))


class _Repeat(NamedTuple):
    """A call without ``out`` that was made, and what the next one is compared with."""

    activation: Activation
    w13_layout: W13Layout
    tensors: int
    """How many: seven with both biases."""
    recorded: bool
    """Whether autograd would record it, where that is on: one of the tensors requires a gradient."""
    matches: Matches
    call: Callable[..., torch.Tensor]
    """The result for tensors that match."""
    problem: object
    """Which the call reads by its address."""


@dataclass(frozen=True)
class _Plan:
    launch: Callable[..., int]
    """flashmoe_moe_forward, as a built-in function, for the chosen instruction set."""
    address: int
    """Of `problem`."""
    problem: Problem
    out_shape: tuple[int, int]
    out_strides: tuple[int, int]
    """In elements."""
    repeats: dict[tuple[bool, ...], _Repeat] = field(default_factory=dict)
    """By what changes what matches: see `_remember`."""


_NOTHING = _Repeat(Activation.SILU, W13Layout.CONCAT, 0, False, never, no_call, None)


class _OfThread(threading.local):
    last = _NOTHING
    """The last call that `repeated` is to know again."""


_thread = _OfThread()
_plans: dict[tuple[object, ...], _Plan] = {}


def repeated(
    tensors: tuple[torch.Tensor, ...], activation: Activation, w13_layout: W13Layout
) -> torch.Tensor | None:
    """The result of a call that is like this thread's last one, or None for any other.

    As `flashmoe_science.cpu.attention.repeated`.

    Args:
        tensors: the first five of `forward`'s, or these and both biases.
    """
    same_activation, same_layout, number, recorded, matches, call, _ = _thread.last
    if (
        activation is same_activation
        and w13_layout is same_layout
        and len(tensors) == number
        and matches(*tensors)
        and not (recorded and torch.is_grad_enabled())
    ):
        return call(*tensors)
    return None


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
    z: torch.Tensor | None = None,
    instruction_set: InstructionSet | None = None,
    repeatable: bool = False,
) -> torch.Tensor:
    """`flashmoe_science.fused_moe` for CPU tensors, without gradients; arguments, result and errors as there.

    Args:
        z: (tokens * k, rows of w13), contiguous and of the tensors' dtype: where to keep the first product for the
            backward pass, as `flashmoe_science.moe_gradients.MoeTrainingForward` says.
        instruction_set: whose code; the CPU's best unless given.
        repeatable: as of `flashmoe_science.cpu.attention.forward`.
    """
    tensors = (hidden_states, w13, w2, topk_weights, topk_ids)
    try:
        signature: tuple[object, ...] = (
            *(tensor.shape for tensor in tensors),
            *(tensor.dtype for tensor in tensors),
            activation,
            w13_layout,
            instruction_set,
        )
        if w13_bias is not None or w2_bias is not None:
            signature = (*signature, _of_bias(w13_bias), _of_bias(w2_bias))
        plan = _plans.get(signature)
        usual = (
            out is None
            and hidden_states.is_contiguous()
            and w13.is_contiguous()
            and w2.is_contiguous()
            and topk_weights.is_contiguous()
            and topk_ids.is_contiguous()
            and w13.is_cpu
            and w2.is_cpu
            and topk_weights.is_cpu
            and topk_ids.is_cpu
            and (w13_bias is None or (w13_bias.is_contiguous() and w13_bias.is_cpu))
            and (w2_bias is None or (w2_bias.is_contiguous() and w2_bias.is_cpu))
        )
    except (AttributeError, TypeError, RuntimeError):
        # Not tensors, or not dense ones: the checks say which.
        check_moe_arguments(*tensors, activation, out, w13_bias, w2_bias)
        raise
    if plan is None or not usual:
        check_moe_arguments(*tensors, activation, out, w13_bias, w2_bias)
        if plan is None:
            plan = _make_plan(signature, hidden_states, w2, topk_ids, activation, w13_layout, instruction_set)
    # Spelled out: a generator takes longer than what it asks.
    if (
        hidden_states.requires_grad
        or w13.requires_grad
        or w2.requires_grad
        or topk_weights.requires_grad
        or topk_ids.requires_grad
    ):
        reject_unrecorded(
            hidden_states=hidden_states, w13=w13, w2=w2, topk_weights=topk_weights, topk_ids=topk_ids
        )
    for name, bias in (("w13_bias", w13_bias), ("w2_bias", w2_bias)):
        if bias is not None and bias.requires_grad:
            reject_unrecorded(**{name: bias})
    if out is None:
        out = allocate(plan.out_shape, plan.out_strides, hidden_states.dtype)
    else:
        if out.requires_grad:
            reject_unrecorded(out=out)
        reject_overlap(out, **_named(*tensors))
    if plan.launch(
        plan.address,
        *(tensor.data_ptr() for tensor in tensors),
        out.data_ptr(),
        0,
        0,
        0 if w13_bias is None else w13_bias.data_ptr(),
        0 if w2_bias is None else w2_bias.data_ptr(),
        0 if z is None else z.data_ptr(),
        torch.get_num_threads(),
    ):
        reject_without_memory(**_named(*tensors), output=out)
    if repeatable and usual and (w13_bias is None) is (w2_bias is None):
        given = tensors if w13_bias is None or w2_bias is None else (*tensors, w13_bias, w2_bias)
        _remember(plan, given, activation, w13_layout)
    return out


def _remember(
    plan: _Plan,
    tensors: tuple[torch.Tensor, ...],
    activation: Activation,
    w13_layout: W13Layout,
) -> None:
    """Make a call that was made the thread's last."""
    recorded = False
    for tensor in tensors:
        recorded = recorded or tensor.requires_grad
    kind = recorded, torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
    repeat = plan.repeats.get(kind)
    if repeat is None:
        matches = matcher(*tensors, under_no_grad=True)
        call = _caller(plan, tensors[0].dtype, biased=len(tensors) > 5)
        repeat = _Repeat(activation, w13_layout, len(tensors), recorded, matches, call, plan.problem)
        plan.repeats[kind] = repeat
    _thread.last = repeat


def _caller(plan: _Plan, dtype: torch.dtype, *, biased: bool) -> Callable[..., torch.Tensor]:
    """Calls by a plan, without what finds it."""
    launch, address, num_threads = plan.launch, plan.address, torch.get_num_threads
    sizes, strides = plan.out_shape, plan.out_strides

    def call(
        hidden_states: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *biases: torch.Tensor,
    ) -> torch.Tensor:
        out = allocate(sizes, strides, dtype)
        w13_bias, w2_bias = (biases[0].data_ptr(), biases[1].data_ptr()) if biased else (0, 0)
        if launch(
            address,
            hidden_states.data_ptr(),
            w13.data_ptr(),
            w2.data_ptr(),
            topk_weights.data_ptr(),
            topk_ids.data_ptr(),
            out.data_ptr(),
            0,
            0,
            w13_bias,
            w2_bias,
            0,
            num_threads(),
        ):
            named = _named(hidden_states, w13, w2, topk_weights, topk_ids)
            reject_without_memory(**named, output=out)
        return out

    return call


def _named(*five: torch.Tensor) -> dict[str, torch.Tensor]:
    """What every call has, for messages."""
    names = "hidden_states", "w13", "w2", "topk_weights", "topk_ids"
    return dict(zip(names, five, strict=True))


def _of_bias(bias: torch.Tensor | None) -> object:
    """What of it a plan was checked for."""
    return None if bias is None else (bias.shape, bias.dtype)


def project(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13_bias: torch.Tensor | None,
    *,
    activation: Activation,
    w13_layout: W13Layout,
    instruction_set: InstructionSet | None = None,
) -> torch.Tensor:
    """The first product alone: the bits that `forward` keeps as ``z``. Its arguments, which it has checked."""
    tensors = (hidden_states, w13, w2, topk_weights, topk_ids)
    signature = (
        *(tensor.shape for tensor in tensors),
        *(tensor.dtype for tensor in tensors),
        activation,
        w13_layout,
        instruction_set,
    )
    plan = _plans.get(signature)
    if plan is None:
        plan = _make_plan(signature, hidden_states, w2, topk_ids, activation, w13_layout, instruction_set)
    z = torch.empty((topk_ids.numel(), w13.shape[1]), dtype=hidden_states.dtype, device=CPU)
    addresses = (tensor.data_ptr() for tensor in tensors)
    bias = 0 if w13_bias is None else w13_bias.data_ptr()
    if plan.launch(plan.address, *addresses, 0, 0, 0, bias, 0, z.data_ptr(), torch.get_num_threads()):
        reject_without_memory(**_named(*tensors))
    return z


def fields(
    hidden_states: torch.Tensor,
    intermediate: int,
    experts: int,
    topk_ids: torch.Tensor,
    activation: Activation,
    w13_layout: W13Layout,
) -> tuple[int, ...]:
    """The `FIELDS` of a call."""
    return (
        ELEMENT_TYPES[hidden_states.dtype],
        *hidden_states.shape,
        intermediate,
        experts,
        topk_ids.shape[1],
        ACTIVATION_CODES[activation],
        w13_layout is W13Layout.INTERLEAVED,
        topk_ids.dtype == torch.int64,
    )


def _make_plan(
    signature: tuple[object, ...],
    hidden_states: torch.Tensor,
    w2: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Activation,
    w13_layout: W13Layout,
    instruction_set: InstructionSet | None,
) -> _Plan:
    experts, hidden, intermediate = w2.shape
    problem = Problem(*fields(hidden_states, intermediate, experts, topk_ids, activation, w13_layout))
    plan = _Plan(
        launch=_load(instruction_set or host.choose_instruction_set()),
        address=ctypes.addressof(problem),
        problem=problem,
        out_shape=(problem.tokens, hidden),
        out_strides=(hidden, 1),
    )
    keep(_plans, signature, plan, _MAX_PLANS)
    return plan


@functools.cache
def _load(instruction_set: InstructionSet) -> Callable[..., int]:
    return load_function("moe_forward", "flashmoe_moe_method", instruction_set)

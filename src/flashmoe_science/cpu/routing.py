"""A router's choice, its losses and their gradient on the CPU: kernels/cpu/topk_routing.cpp and its backward pass."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch

from flashmoe_science.alike import Matches, matcher, never, no_call
from flashmoe_science.arguments import reject_without_memory
from flashmoe_science.cpu.library import CPU, ELEMENT_TYPES, allocate, load_function
from flashmoe_science.jit import host
from flashmoe_science.jit.host import InstructionSet
from flashmoe_science.moe_arguments import Scores, check_topk_arguments
from flashmoe_science.plans import keep
from flashmoe_science.routing_options import RoutingOptions, RoutingPass

_MAX_REPEATS = 4096


class _Problem(ctypes.Structure):
    """RoutingProblem of routing_rows.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("element_type", "tokens", "experts", "top_k")),
        *((name, ctypes.c_int64) for name in ("sigmoid", "renormalize", "groups", "top_groups")),
        ("scale", ctypes.c_double),
    )


class _Gradients(ctypes.Structure):
    """RoutingGradients of topk_routing_backward.cpp."""

    _fields_ = tuple(
        (name, ctypes.c_void_p)
        for name in ("logits", "ids", "grad_weights", "counts", "grad_balance", "grad_z", "grad_logits")
    )


Choice = tuple[torch.Tensor, torch.Tensor]
"""Weights and ids."""


class _Repeat(NamedTuple):
    """A call that was made, and what the next one is compared with."""

    k: int
    scores: Scores
    renormalize: bool
    scaling_factor: float
    groups: int
    top_groups: int
    biased: bool
    recorded: bool
    """Whether autograd would record it, where that is on: the logits require a gradient."""
    matches: Matches
    """Of the logits, and of the bias if there is one."""
    call: Callable[..., Choice]


class _OfThread(threading.local):
    last = _Repeat(0, Scores.SOFTMAX, True, 1.0, 1, 1, False, False, never, no_call)
    """The last call that `repeated` is to know again."""


_thread = _OfThread()
_repeats: dict[tuple[object, ...], _Repeat] = {}


def repeated(
    logits: torch.Tensor,
    k: int,
    scores: Scores,
    renormalize: bool,
    correction_bias: torch.Tensor | None,
    scaling_factor: float,
    groups: int,
    top_groups: int,
) -> Choice | None:
    """What `topk` returns for a call that is like this thread's last one, or None for any other.

    As `flashmoe_science.cpu.attention.repeated`. Options are compared as objects, so that 1 is not taken for True.
    """
    last = _thread.last
    (
        same_k,
        same_scores,
        same_renormalize,
        same_factor,
        same_groups,
        same_top_groups,
        biased,
        recorded,
        matches,
        call,
    ) = last
    if (
        k is not same_k
        or scores is not same_scores
        or renormalize is not same_renormalize
        or (scaling_factor is not same_factor and not _same_float(scaling_factor, same_factor))
        or groups is not same_groups
        or top_groups is not same_top_groups
        or biased is (correction_bias is None)
    ):
        return None
    tensors = (logits, correction_bias) if biased else (logits,)
    if not matches(*tensors) or (recorded and torch.is_grad_enabled()):
        return None
    return call(*tensors)


def _same_float(one: object, other: float) -> bool:
    """Whether it is the other, perhaps computed anew. Zeros have signs."""
    return type(one) is float and one == other != 0


def topk(
    logits: torch.Tensor,
    k: int,
    *,
    scores: Scores = Scores.SOFTMAX,
    renormalize: bool = True,
    correction_bias: torch.Tensor | None = None,
    scaling_factor: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
    instruction_set: InstructionSet | None = None,
    repeatable: bool = False,
) -> Choice:
    """`flashmoe_science.topk_routing` for CPU tensors, without gradients; arguments, results and errors as there.

    Args:
        instruction_set: whose code; the CPU's best unless given.
        repeatable: as of `flashmoe_science.cpu.attention.forward`.
    """
    check_topk_arguments(logits, k, renormalize, correction_bias, scaling_factor, groups, top_groups)
    k = int(k)  # PyTorch's short cut to memory takes no integer of NumPy's
    options = RoutingOptions(scores, renormalize, scaling_factor, groups, top_groups)
    weights, ids = _allocate_choice(logits, k)
    _route(logits, correction_bias, weights, ids, None, options, instruction_set)
    if repeatable:
        _remember(logits, k, correction_bias, options)
    return weights, ids


def _remember(logits: torch.Tensor, k: int, bias: torch.Tensor | None, options: RoutingOptions) -> None:
    """Make a call that was made the thread's last. Its arguments were checked."""
    if options.scaling_factor == 0:  # of either sign
        return
    signature = (
        logits.shape,
        logits.dtype,
        k,
        options.scores,
        options.renormalize,
        options.scaling_factor,
        options.groups,
        options.top_groups,
        bias is None,
        # What changes what matches.
        logits.requires_grad,
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
    )
    repeat = _repeats.get(signature)
    if repeat is None:
        repeat = _Repeat(
            k,
            options.scores,
            options.renormalize,
            options.scaling_factor,
            options.groups,
            options.top_groups,
            bias is not None,
            logits.requires_grad,
            matcher(*((logits,) if bias is None else (logits, bias)), under_no_grad=True),
            _caller(logits, k, options),
        )
        keep(_repeats, signature, repeat, _MAX_REPEATS)
    _thread.last = repeat


def _caller(logits: torch.Tensor, k: int, options: RoutingOptions) -> Callable[..., Choice]:
    """Calls for logits like these, without checks."""
    problem = _problem(logits, k, options)
    launch, num_threads, address_of = _load("topk_routing", None), torch.get_num_threads, ctypes.addressof
    sizes, strides = (logits.shape[0], k), (k, 1)
    float32, int32 = torch.float32, torch.int32

    def call(logits: torch.Tensor, bias: torch.Tensor | None = None) -> Choice:
        weights, ids = allocate(sizes, strides, float32), allocate(sizes, strides, int32)
        bias_address = 0
        if bias is not None:
            bias_address = bias.data_ptr()
            if not bias_address:
                reject_without_memory(correction_bias=bias)
        if launch(
            address_of(problem),
            logits.data_ptr(),
            bias_address,
            weights.data_ptr(),
            ids.data_ptr(),
            0,
            0,
            0,
            num_threads(),
        ):
            reject_without_memory(logits=logits)
        return weights, ids

    return call


def forward(
    logits: torch.Tensor,
    k: int,
    options: RoutingOptions,
    correction_bias: torch.Tensor | None,
    *,
    instruction_set: InstructionSet | None = None,
) -> RoutingPass:
    """The same and the `flashmoe_science.routing_losses` of the choice. Threads change no bit.

    Args:
        logits: (tokens, experts), at least one token.

    Returns:
        weights (tokens, k) float32, ids (tokens, k) int32, both losses float32 scalars, counts (experts,) int64.

    Raises:
        InputError, DeviceError, BuildError: as `flashmoe_science.topk_routing`.
    """
    check_topk_arguments(
        logits,
        k,
        options.renormalize,
        correction_bias,
        options.scaling_factor,
        options.groups,
        options.top_groups,
    )
    weights, ids = _allocate_choice(logits, k)
    losses = (
        torch.empty((), dtype=torch.float32, device=CPU),
        torch.empty((), dtype=torch.float32, device=CPU),
        torch.empty(logits.shape[1], dtype=torch.int64, device=CPU),
    )
    _route(logits, correction_bias, weights, ids, losses, options, instruction_set)
    return RoutingPass(weights, ids, *losses)


def backward(
    logits: torch.Tensor,
    ids: torch.Tensor,
    counts: torch.Tensor | None,
    grad_weights: torch.Tensor | None,
    grad_balance: torch.Tensor | None,
    grad_z: torch.Tensor | None,
    options: RoutingOptions,
    *,
    instruction_set: InstructionSet | None = None,
) -> torch.Tensor:
    """The gradient of the logits from those of the weights and of both losses, each of which may be None.

    Args:
        logits, ids, counts: what the pass took and gave; counts may be None without a gradient of the first loss.
        grad_weights: (tokens, k) float32, contiguous.
        grad_balance, grad_z: float32 scalars.

    Returns:
        (tokens, experts), like logits.
    """
    gradient = torch.empty(logits.shape, dtype=logits.dtype, device=CPU)
    problem = _problem(logits, ids.shape[1], options)
    given = logits, ids, grad_weights, counts, grad_balance, grad_z, gradient
    tensors = _Gradients(*(None if each is None else each.data_ptr() for each in given))
    launch = _load("topk_routing_backward", instruction_set)
    if launch(ctypes.addressof(problem), ctypes.addressof(tensors), torch.get_num_threads()):
        reject_without_memory(logits=logits, ids=ids)
    return gradient


def _allocate_choice(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    sizes, strides = (logits.shape[0], k), (k, 1)
    return allocate(sizes, strides, torch.float32), allocate(sizes, strides, torch.int32)


def _problem(logits: torch.Tensor, k: int, options: RoutingOptions) -> _Problem:
    tokens, experts = logits.shape
    return _Problem(
        ELEMENT_TYPES[logits.dtype],
        tokens,
        experts,
        k,
        int(options.scores is Scores.SIGMOID),
        int(options.renormalize),
        options.groups,
        options.top_groups,
        float(options.scaling_factor),
    )


def _route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    weights: torch.Tensor,
    ids: torch.Tensor,
    losses: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    options: RoutingOptions,
    instruction_set: InstructionSet | None,
) -> None:
    if bias is not None:
        reject_without_memory(correction_bias=bias)  # its address would mean that there is none
    problem = _problem(logits, ids.shape[1], options)
    launch = _load("topk_routing", instruction_set)
    if launch(
        ctypes.addressof(problem),
        logits.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        weights.data_ptr(),
        ids.data_ptr(),
        *((0, 0, 0) if losses is None else (each.data_ptr() for each in losses)),
        torch.get_num_threads(),
    ):
        reject_without_memory(logits=logits)


@functools.cache
def _load(kernel: str, instruction_set: InstructionSet | None) -> Callable[..., int]:
    return load_function(
        kernel, f"flashmoe_{kernel}_method", instruction_set or host.choose_instruction_set()
    )

"""A router's choice, its losses and their gradient on the CPU: kernels/cpu/topk_routing.cpp and its backward pass."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

from flashmoe_science.arguments import reject_without_memory
from flashmoe_science.cpu.library import CPU, ELEMENT_TYPES, allocate, load_function
from flashmoe_science.jit import host
from flashmoe_science.jit.host import InstructionSet
from flashmoe_science.moe_arguments import Scores, check_topk_arguments
from flashmoe_science.routing_options import RoutingOptions, RoutingPass


class _Problem(ctypes.Structure):
    """RoutingProblem of routing_rows.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("element_type", "tokens", "experts", "top_k")),
        *((name, ctypes.c_int64) for name in ("sigmoid", "renormalize", "groups", "top_groups")),
        ("scale", ctypes.c_double),
    )


class _Tensors(ctypes.Structure):
    """RoutingTensors of topk_routing.cpp."""

    _fields_ = tuple(
        (name, ctypes.c_void_p) for name in ("logits", "bias", "weights", "ids", "balance", "z", "counts")
    )


class _Gradients(ctypes.Structure):
    """RoutingGradients of topk_routing_backward.cpp."""

    _fields_ = tuple(
        (name, ctypes.c_void_p)
        for name in ("logits", "ids", "grad_weights", "counts", "grad_balance", "grad_z", "grad_logits")
    )


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """`flashmoe_science.topk_routing` for CPU tensors, without gradients; arguments, results and errors as there.

    Args:
        instruction_set: run the code for this one; the CPU's best unless given.
    """
    check_topk_arguments(logits, k, renormalize, correction_bias, scaling_factor, groups, top_groups)
    options = RoutingOptions(scores, renormalize, scaling_factor, groups, top_groups)
    weights, ids = _allocate_choice(logits, k)
    _route(logits, correction_bias, weights, ids, None, options, instruction_set)
    return weights, ids


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
    of_losses = (None,) * 3 if losses is None else (each.data_ptr() for each in losses)
    tensors = _Tensors(
        logits.data_ptr(),
        None if bias is None else bias.data_ptr(),
        weights.data_ptr(),
        ids.data_ptr(),
        *of_losses,
    )
    launch = _load("topk_routing", instruction_set)
    if launch(ctypes.addressof(problem), ctypes.addressof(tensors), torch.get_num_threads()):
        reject_without_memory(logits=logits)


@functools.cache
def _load(kernel: str, instruction_set: InstructionSet | None) -> Callable[..., int]:
    return load_function(
        kernel, f"flashmoe_{kernel}_method", instruction_set or host.choose_instruction_set()
    )

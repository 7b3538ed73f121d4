"""The backward pass of a mixture of experts on CUDA tensors: a cached plan per shape, allocations, the launches."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch

from flashmoe_science.cuda.calls import Calls, Options, Tensors
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.device import Device, device_of
from flashmoe_science.cuda.driver import make_context_current
from flashmoe_science.cuda.launch import LaunchPlan
from flashmoe_science.cuda.moe.forward import DTYPES, FIVE, Names, problem_of
from flashmoe_science.cuda.moe.gradients import hopper, portable
from flashmoe_science.cuda.moe.gradients.problem import (
    COMPOSED,
    OVERRIDE_VARIABLE,
    MoeBackwardKind,
    MoeBackwardProblem,
)
from flashmoe_science.cuda.moe.gradients.select import plan, select
from flashmoe_science.cuda.moe.problem import MoeKind, MoeProblem
from flashmoe_science.cuda.moe.select import OVERRIDE_VARIABLE as FORWARD_VARIABLE
from flashmoe_science.cuda.repeat import Call, cuda_allocator, misaligned, raw_stream
from flashmoe_science.errors import InputError
from flashmoe_science.moe_arguments import Activation, W13Layout
from flashmoe_science.moe_gradients import MainGradients, MoeGradients, MoeNeeds

_GIVEN = 6
"""Tensors that every call has; those of `_More` follow."""


class _More(NamedTuple):
    """Which other tensors a call has, in this order."""

    z: bool
    w13_bias: bool
    w2_bias: bool
    w13_buffer: bool
    w2_buffer: bool

    @property
    def names(self) -> Names:
        """Of what the forward pass had."""
        biases = ("w13_bias",) * self.w13_bias + ("w2_bias",) * self.w2_bias
        return (*FIVE, *biases)


def backward(
    grad_output: torch.Tensor,
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    z: torch.Tensor | None,
    *,
    activation: Activation,
    w13_layout: W13Layout,
    needs: MoeNeeds,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    main: MainGradients | None = None,
    choice: Choice | None = None,
) -> MoeGradients:
    """The gradients of a mixture of experts, as `flashmoe_science.moe_gradients.MoeBackward` says, on PyTorch's current
    stream.

    As to graphs and copies see `cuda.attention.gradients.backward`. What is launched does not depend on
    the routing.

    Args:
        z: what `forward_keeping` kept; None: it is computed again.
        main: where gradients of the weights are added instead of being returned.
        choice: the kernels and configuration to use instead of `select`'s.

    Raises:
        InputError: tensors that the forward pass would not have taken either, or buffers that do not fit.
        NoKernelError: no kernel takes it (`can_differentiate`).
        DeviceError, BuildError: see `flashmoe_science.cuda.driver.load`.
    """
    buffers = MainGradients() if main is None else main
    given = (z, w13_bias, w2_bias, *buffers)
    more = tuple(tensor for tensor in given if tensor is not None)
    tensors = (grad_output, hidden_states, w13, w2, topk_weights, topk_ids, *more)
    options = activation, w13_layout, needs, _More(*(tensor is not None for tensor in given)), choice
    return MoeGradients(*_calls(tensors, options))


def can_differentiate(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    activation: Activation,
    w13_layout: W13Layout,
) -> bool:
    """Whether `forward_keeping` and `backward` take CUDA tensors like these; from shapes and the device alone."""
    if hidden_states.dtype not in DTYPES or not torch.cuda.is_available():
        return False
    problem = problem_of(hidden_states, w13, w2, topk_ids, activation, w13_layout, keeps=True)
    return why_no_kernel(problem, device_of(hidden_states.get_device())) is None


def can_project_again(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    activation: Activation,
    w13_layout: W13Layout,
) -> bool:
    """Whether `backward` takes a call that kept nothing: by the portable kernels, if these are asked for or faster."""
    if hidden_states.dtype not in DTYPES or not torch.cuda.is_available():
        return False
    problem = problem_of(hidden_states, w13, w2, topk_ids, activation, w13_layout)
    needs = MoeBackwardProblem(problem, _ALL, kept=False)
    return portable.why_not(needs, device_of(hidden_states.get_device())) is None


def why_no_kernel(problem: MoeProblem, device: Device) -> str | None:
    """Why no kernel differentiates a call of autograd's; None if one does.

    Not where the forward pass is told to go a way that keeps nothing.
    """
    named = os.environ.get(FORWARD_VARIABLE)
    if named not in (None, "", MoeKind.HOPPER.value):
        return f"{FORWARD_VARIABLE} asks for {named}, which keeps nothing"
    if _keeps_nothing():
        return f"{OVERRIDE_VARIABLE} asks for {os.environ[OVERRIDE_VARIABLE]}, for which nothing is kept"
    return hopper.why_not(MoeBackwardProblem(problem, _ALL, kept=True), device)


def why_composed(problem: MoeProblem, device: Device) -> str | None:
    """Why a backward pass of autograd's is composed of PyTorch's operations; None if it is not."""
    reason = why_no_kernel(problem, device)
    if reason is None:
        return None
    not_portable = portable.why_not(MoeBackwardProblem(problem, _ALL, kept=False), device)
    return None if not_portable is None else f"{reason}; not portable: {not_portable}"


def _keeps_nothing() -> bool:
    """Whether the environment names a way for which the forward pass keeps nothing."""
    return os.environ.get(OVERRIDE_VARIABLE) in (MoeBackwardKind.PORTABLE.value, COMPOSED)


def explain(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    activation: Activation = Activation.SILU,
    w13_layout: W13Layout = W13Layout.CONCAT,
    device: Device | None = None,
) -> Choice:
    """Which kernels and configuration the backward pass of a call takes, and why. Launches nothing.

    ``device``: as of `cuda.attention.forward`.
    """
    problem = _problem(hidden_states, w13, w2, topk_ids, activation, w13_layout, _ALL)
    return select(problem, device_of(hidden_states.get_device()) if device is None else device)


_ALL = MoeNeeds(True, True, True, True)
_PLAIN = _More(True, False, False, False, False)


def _problem(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Activation,
    w13_layout: W13Layout,
    needs: MoeNeeds,
    more: _More = _PLAIN,
) -> MoeBackwardProblem:
    forward = problem_of(
        hidden_states, w13, w2, topk_ids, activation, w13_layout, names=more.names, keeps=True
    )
    return MoeBackwardProblem(forward, needs, more.z, more.w13_buffer, more.w2_buffer)


def _check(tensors: Tensors, options: Options) -> None:
    """Autograd passes on what the forward pass has checked; the rest is the caller's."""
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            raise InputError(f"expected dense tensors, not {type(tensor).__name__}")
    _, _, needs, given, _ = options
    _, hidden_states, w13, w2, _, topk_ids, *more = tensors
    if given.z:
        z = more.pop(0)
        shape = (topk_ids.numel(), w13.shape[1])
        if tuple(z.shape) != shape or z.dtype != hidden_states.dtype or not z.is_contiguous():
            raise InputError(
                f"z is {tuple(z.shape)} of {z.dtype}; expected {shape} of {hidden_states.dtype}, contiguous: pass what "
                "the forward pass kept"
            )
    for name, weight, is_given in (("w13", w13, given.w13_bias), ("w2", w2, given.w2_bias)):
        if not is_given:
            continue
        bias = more.pop(0)
        if bias.shape != weight.shape[:2] or bias.dtype != weight.dtype or not bias.is_contiguous():
            raise InputError(
                f"the bias of {name} is {tuple(bias.shape)} of {bias.dtype}; expected {tuple(weight.shape[:2])} of "
                f"{weight.dtype}, contiguous"
            )
    for name, weight, is_given, needed in (
        ("w13", w13, given.w13_buffer, needs.w13),
        ("w2", w2, given.w2_buffer, needs.w2),
    ):
        if not is_given:
            continue
        buffer = more.pop(0)
        if buffer.shape != weight.shape or buffer.dtype != torch.float32 or not buffer.is_contiguous():
            raise InputError(
                f"the buffer of {name}'s gradient is {tuple(buffer.shape)} of {buffer.dtype}; expected "
                f"{tuple(weight.shape)} of torch.float32, contiguous"
            )
        if not needed:
            raise InputError(f"there is a buffer of {name}'s gradient, which is not needed; leave it out")


def _make_call(tensors: Tensors, options: Options, index: int) -> Call:
    """Choose, compile, load and prepare."""
    _, hidden_states, w13, w2, topk_weights, topk_ids = tensors[:_GIVEN]
    activation, w13_layout, needs, more, choice = options
    make_context_current(index)
    likes = [
        (tuple(tensor.shape[:dimensions]), tensor.dtype) if needed else None
        for tensor, dimensions, needed in (
            (hidden_states, 2, needs.hidden_states),
            (w13, 3, needs.w13 and not more.w13_buffer),
            (w2, 3, needs.w2 and not more.w2_buffer),
            (topk_weights, 2, needs.topk_weights),
            (w13, 2, needs.w13_bias),
            (w2, 2, needs.w2_bias),
        )
    ]
    if hidden_states.numel() == 0 or topk_ids.numel() == 0:
        device = hidden_states.device
        return lambda *tensors: tuple(
            None if like is None else torch.zeros(like[0], dtype=like[1], device=device) for like in likes
        )
    problem = _problem(hidden_states, w13, w2, topk_ids, activation, w13_layout, needs, more)
    if choice is None and more.z and _keeps_nothing():
        choice = hopper.choose(problem, device_of(index))  # which kept it before the variable was set
    return _prepare(likes, plan(problem, device_of(index), choice), problem, index)


_calls = Calls(
    _check,
    _make_call,
    options=5,
    most=1024,
    repeated=lambda options: options[-1] is None,
    under_no_grad=True,
)


def _prepare(
    likes: list[tuple[tuple[int, ...], torch.dtype] | None],
    plan: LaunchPlan,
    problem: MoeBackwardProblem,
    device: int,
) -> Call:
    """The call itself."""
    launch, allocate = plan.launch, cuda_allocator()
    results = [None if like is None else (like[0], _contiguous(like[0]), like[1]) for like in likes]

    def call(*tensors: torch.Tensor) -> tuple[Any, ...]:
        grad_output = tensors[0].contiguous()
        if grad_output.data_ptr() & 15:
            grad_output = grad_output.clone()
        given = [tensor.data_ptr() for tensor in tensors[1:_GIVEN]]
        more = [tensor.data_ptr() for tensor in tensors[_GIVEN:]]
        if any(address & 15 for address in (*given[:3], *more)):
            names = dict.fromkeys((*FIVE[:3], "z, a bias or a buffer"), 16)
            raise InputError(misaligned(names, (*tensors[1:4], *tensors[_GIVEN:])))
        forward = problem.forward
        there = problem.kept, forward.w13_biased, forward.w2_biased
        z, w13_bias, w2_bias = (more.pop(0) if each else 0 for each in there)
        gradients = tuple(None if result is None else allocate(*result) for result in results)
        addresses = [0 if gradient is None else gradient.data_ptr() for gradient in gradients]
        if problem.accumulates_w13:
            addresses[1] = more.pop(0)
        if problem.accumulates_w2:
            addresses[2] = more.pop(0)
        # Freed when this returns: what the allocator puts there next on this stream comes after the launches.
        workspace = allocate((plan.workspace_bytes,), (1,), torch.uint8)
        biases = w13_bias, w2_bias
        launch(
            grad_output.data_ptr(), *given, z, *biases, *addresses, workspace.data_ptr(), raw_stream(device)
        )
        return gradients

    return call


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return tuple(strides)

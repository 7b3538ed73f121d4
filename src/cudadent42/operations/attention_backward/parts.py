"""The gradients of this project's attention with some of them left out, to see what they cost; on CUDA by kernels that
leave out parts of their work, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from cudadent42.operations.attention_backward.case import AttentionBackwardCase, AttentionTrainingStepCase
from cudadent42.operations.attention_backward.inputs import BackwardInputs
from cudadent42.operations.interface import WHOLE, Parts
from flashmoe_science.configs.ablation import Ablation as Part

if TYPE_CHECKING:
    from torch import Tensor

    from cudadent42.model.implementations import Call
    from flashmoe_science.cuda.attention.gradients import BackwardProblem
    from flashmoe_science.cuda.choice import Choice
    from flashmoe_science.cuda.device import Device

_Attention = Callable[..., Any]
"""``(query, key, value, *, causal, softmax_scale)``, as `flash_attention`."""

_LEFT_OUT = {WHOLE: (), "query_gradient": (0,), "key_value_gradients": (1, 2)}
"""Which of query, key and value need no gradient, by the part's name."""


@dataclass(frozen=True)
class Taken:
    """What a call takes on CUDA."""

    choice: Choice
    left_out: tuple[int, ...] = ()
    """Which of query, key and value need no gradient."""


def without(case: AttentionBackwardCase, inputs: BackwardInputs) -> Parts:
    """All gradients, and all but some: what is not asked for is not computed, and the rest is right. On CUDA also
    all of them by kernels that leave out a part of their work, which are wrong.

    There, each call is told which kernel it takes, the whole too, so that all go the same way on the host.
    """
    if inputs.query.is_cpu or isinstance(case, AttentionTrainingStepCase):
        from flashmoe_science import flash_attention

        return Parts(
            {part: _gradients(case, inputs, which, flash_attention) for part, which in _LEFT_OUT.items()}
        )
    return Parts(calls_on_cuda(case, inputs, taken_on_cuda(case, inputs)))


def calls_on_cuda(
    case: AttentionBackwardCase, inputs: BackwardInputs, taken: Mapping[str, Taken]
) -> dict[str, Call]:
    """By the part that is left out."""
    return {
        part: _gradients(case, inputs, each.left_out, _attention(each.choice)) for part, each in taken.items()
    }


def taken_on_cuda(
    case: AttentionBackwardCase, inputs: BackwardInputs, device: Device | None = None
) -> dict[str, Taken]:
    """By the part that is left out. ``device``: that of the inputs unless given."""
    from flashmoe_science.cuda.attention.gradients.backward import asked
    from flashmoe_science.cuda.attention.gradients.select import select

    problem, device = asked(inputs.query, inputs.key, inputs.value, case.causal, inputs.softmax_scale, device)
    whole = select(problem, device)
    taken = {WHOLE: Taken(whole)}
    for name, left_out in _LEFT_OUT.items():
        choice = _choice_without(left_out, problem, device)
        if name != WHOLE and choice is not None:
            taken[name] = Taken(choice, left_out)
    for part in _parts(case, whole):
        taken[part.name.lower()] = Taken(replace(whole, configuration=_ablated(whole.configuration, part)))
    return taken


def _choice_without(left_out: tuple[int, ...], problem: BackwardProblem, device: Device) -> Choice | None:
    """None where the environment names a kernel that makes these gradients with the others alone."""
    from flashmoe_science.cuda.attention.gradients.select import select
    from flashmoe_science.errors import InputError
    from flashmoe_science.gradients import Needs

    query, key, value = (index not in left_out for index in range(3))
    try:
        return select(replace(problem, needs=Needs(query, key, value)), device)
    except InputError:
        return None


def _parts(case: AttentionBackwardCase, whole: Choice) -> list[Part]:
    """What the kernel can do without. Only a causal mask counts as one: at most the last keys have another. Of the
    kernels with sums in global memory only Hopper's can leave them out.
    """
    from flashmoe_science.cuda.attention.gradients import GradientKind

    mask = [Part.MASK] if case.causal else []
    sums = [Part.SUMS] if whole.kernel is GradientKind.HOPPER else []
    return [Part.EXPONENTIALS, *mask, Part.LOADS, *sums]


def _ablated(configuration: Any, part: Part) -> object:
    from flashmoe_science.configs.attention.backward import PortableBackward

    if isinstance(configuration, PortableBackward):
        return configuration.with_ablation(part)
    return replace(configuration, ablation=part)


def _attention(choice: Choice) -> _Attention:
    """Attention whose backward pass takes this kernel."""
    from cudadent42.operations.attention_backward.implementations import ChosenBackend
    from flashmoe_science.autograd import differentiable_attention
    from flashmoe_science.cuda import attention as cuda

    backend = ChosenBackend(cuda.forward, partial(cuda.backward, choice=choice))

    def attention(*tensors: Tensor, causal: bool, softmax_scale: float | None) -> Tensor:
        return differentiable_attention(backend, *tensors, causal=causal, softmax_scale=softmax_scale)[0]

    return attention


def _gradients(
    case: AttentionBackwardCase, inputs: BackwardInputs, left_out: tuple[int, ...], attention: _Attention
) -> Call:
    scale = inputs.softmax_scale
    tensors = [
        tensor.detach() if index in left_out else tensor
        for index, tensor in enumerate(inputs.of_forward.tensors)
    ]
    wanted, gradient = [tensor for tensor in tensors if tensor.requires_grad], inputs.output_gradient

    def forward() -> Tensor:
        output = attention(*tensors, causal=case.causal, softmax_scale=scale)
        assert isinstance(output, torch.Tensor)
        return output

    if isinstance(case, AttentionTrainingStepCase):
        return lambda: torch.autograd.grad(forward(), wanted, gradient)[0]
    output = forward()
    return lambda: torch.autograd.grad(output, wanted, gradient, retain_graph=True)[0]

"""Backward passes and training steps of attention that come with the lab; imported when they are asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from cudadent42.model.implementations import (
    OUR_PACKAGE,
    Call,
    Implementation,
    Prepare,
    UnsupportedCaseError,
)
from cudadent42.operations.attention import implementations as forward
from cudadent42.operations.attention.implementations import prepare_sdpa
from cudadent42.operations.attention_backward.case import AttentionBackwardCase, AttentionTrainingStepCase
from cudadent42.operations.variants import Variant, Variants, choice, compiled, makes_variants

if TYPE_CHECKING:
    from torch import Tensor

    from cudadent42.operations.attention.inputs import AttentionInputs
    from cudadent42.operations.attention_backward.inputs import BackwardInputs
    from flashmoe_science.gradients import Backward, Forward

PrepareForward = Callable[[AttentionBackwardCase, "AttentionInputs"], Call]

TRAINED = (
    *("pytorch", "cudadent42", "pytorch_flash", "pytorch_cudnn", "pytorch_efficient", "pytorch_math"),
    *("flash_attn", "flash_attn_cute"),
)
"""Of the forward's implementations, those that have a backward pass where they are installed. FlashAttention-3's wheels
have none."""


def prepare_backward(prepare: PrepareForward, case: AttentionBackwardCase, inputs: BackwardInputs) -> Call:
    """The forward pass once, then the gradients of its result as often as they are asked for."""
    import torch

    leaves = inputs.of_forward
    output = prepare(case, leaves)()
    _require_gradient(output)
    wanted, gradient = leaves.tensors, inputs.output_gradient

    def call() -> Tensor:
        gradients: Tensor = torch.autograd.grad(output, wanted, gradient, retain_graph=True)  # type: ignore[assignment]
        return gradients

    return call


def prepare_step(prepare: PrepareForward, case: AttentionBackwardCase, inputs: BackwardInputs) -> Call:
    """Both passes in every call."""
    import torch

    leaves = inputs.of_forward
    once = prepare(case, leaves)
    _require_gradient(once())
    wanted, gradient = leaves.tensors, inputs.output_gradient

    def call() -> Tensor:
        gradients: Tensor = torch.autograd.grad(once(), wanted, gradient)  # type: ignore[assignment]
        return gradients

    return call


def _require_gradient(output: Tensor) -> None:
    if not output.requires_grad:
        raise UnsupportedCaseError("its output has no gradient")


def sdpa_gradients(case: AttentionBackwardCase, inputs: BackwardInputs) -> Tensor:
    """Of PyTorch's SDPA, packed. Without queries or keys they are zeros, as its output is here."""
    from cudadent42.operations.attention_backward.inputs import packed

    if case.seqlen_q == 0 or case.seqlen_k == 0:
        like = inputs.result_like
        return like.new_zeros(like.shape)
    return packed(prepare_backward(prepare_sdpa, case, inputs)())  # type: ignore[arg-type]


def prepare_with(operation: str, prepare: PrepareForward) -> Prepare:
    """What is timed of a forward pass that can be differentiated, for one of the two operations."""
    way = {
        AttentionBackwardCase.operation: prepare_backward,
        AttentionTrainingStepCase.operation: prepare_step,
    }[operation]
    return partial(way, prepare)


@dataclass(frozen=True)
class ChosenBackend:
    """A device's attention with the backward pass, and on a CPU the forward pass too, that somebody has chosen."""

    forward: Forward
    backward: Backward


def _prepare_variant(variant: Variant, case: AttentionBackwardCase, inputs: AttentionInputs) -> Call:
    """The forward pass, recorded with the variant's backward pass."""
    query, key, value, scale = inputs.query, inputs.key, inputs.value, inputs.softmax_scale
    if query.is_cpu:
        cpu, named = variant.module("cpu.attention"), variant.instruction_set()
        backend = ChosenBackend(
            partial(cpu.forward, instruction_set=named), partial(cpu.backward, instruction_set=named)
        )
    else:
        cuda, selection = variant.module("cuda.attention"), _selection(variant)
        asked = variant.module("cuda.attention.gradients.backward").asked
        problem, device = asked(query, key, value, case.causal, scale, None)
        made = compiled(variant, selection, problem, device, choice(variant, selection, problem, device))
        backend = ChosenBackend(cuda.forward, partial(cuda.backward, choice=made))
    call = partial(
        variant.module("autograd").differentiable_attention,
        *(backend, query, key, value),
        causal=case.causal,
        softmax_scale=scale,
    )
    return lambda: call()[0]


def _selection(variant: Variant) -> Any:
    return variant.module("cuda.attention.gradients.select").BACKWARD


def variants_of(operation: str, package: str = OUR_PACKAGE) -> Variants:
    records = f"{package}.configs.attention"
    return Variants(
        {
            "short": importlib.import_module(f"{records}.backward_short").ShortBackward,
            "hopper": importlib.import_module(f"{records}.backward_hopper").HopperBackward,
            "two_pass": importlib.import_module(f"{records}.backward_two_pass").TwoPassBackward,
            "portable": importlib.import_module(f"{records}.backward").PortableBackward,
        },
        "cudadent42[portable,query.block_n=32]",
        lambda variant: prepare_with(operation, partial(_prepare_variant, variant)),
        package,
    )


def implementations(operation: str) -> tuple[Implementation, ...]:
    """Those of the forward pass that can be trained with."""
    return tuple(
        replace(
            item,
            prepare=prepare_with(operation, item.prepare),
            operation=operation,
            variants=makes_variants(partial(variants_of, operation)) if item.variants else None,
        )
        for item in forward.ALL
        if item.name in TRAINED
    )

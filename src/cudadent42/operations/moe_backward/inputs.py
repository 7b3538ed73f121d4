"""A mixture of experts' inputs with a gradient of the output, and which of them are hard to get right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.nn import functional

from cudadent42.base.seeds import derived_seed
from cudadent42.operations.interface import HardInput
from cudadent42.operations.moe import hard_inputs as forward_hard
from cudadent42.operations.moe import inputs as forward
from cudadent42.operations.moe.case import MoeCase
from cudadent42.operations.moe.inputs import MoeInputs, Popularity
from cudadent42.operations.moe_backward.case import MoeBackwardCase, MoeTrainingStepCase

HOT = 20.0
"""Logits that the one popular expert has before the others: beside preferences of size 1, every token takes it."""


@dataclass(frozen=True)
class MoeGradientInputs:
    """`MoeInputs` and output_gradient (tokens, hidden)."""

    forward: MoeInputs
    output_gradient: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return *self.forward.tensors, self.output_gradient

    @property
    def result_like(self) -> Tensor:
        """Of the gradients as ``packed`` puts them one below the other."""
        tokens, hidden = self.forward.hidden_states.shape
        experts, w13_rows, _ = self.forward.w13.shape
        width = max(hidden, self.forward.topk_ids.shape[1])
        rows = 2 * tokens + experts * (w13_rows + self.forward.w2.shape[2])
        if self.forward.biases is not None:
            rows += experts * (-(-w13_rows // width) + 1)
        return self.output_gradient.new_empty(1, 1).expand(rows, width)

    @property
    def buffer_shapes(self) -> tuple[tuple[int, ...], ...]:
        slots = self.forward.topk_ids.numel()
        return (
            *(tuple(tensor.shape) for tensor in self.forward.tensors[:3]),
            (slots, self.forward.w13.shape[1]),
            (slots, self.forward.w2.shape[2]),
            (slots, self.forward.w13.shape[2]),
        )

    @property
    def leaves(self) -> MoeInputs:
        """The same memory, as leaves that gradients are taken of."""
        *floats, ids = self.forward.tensors
        hidden_states, w13, w2, weights = (_leaf(tensor) for tensor in floats)
        biases = self.forward.biases
        return MoeInputs(
            hidden_states,
            w13,
            w2,
            weights,
            ids,
            biases=None if biases is None else (_leaf(biases[0]), _leaf(biases[1])),
            w13_layout=self.forward.w13_layout,
        )


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


def differentiated(inputs: MoeInputs) -> tuple[Tensor, ...]:
    """What gradients are taken of: hidden states, both weights, the routing weights, and biases where there are any."""
    return *inputs.tensors[:4], *(inputs.biases or ())


def packed(gradients: Sequence[Tensor]) -> Tensor:
    """One below the other, each row as long as the hidden size, in the dtype of hidden states.

    A token's gradient; a row of w13; a column of w2; a token's routing weights; an expert's biases, those of w13 in as
    many rows as they take. What is shorter is followed by zeros.
    """
    hidden_states, w13, w2, weights, *biases = gradients
    width = max(hidden_states.shape[1], weights.shape[1])
    parts = (hidden_states, w13.flatten(0, 1), w2.transpose(1, 2).flatten(0, 1), weights, *biases)
    return torch.cat(
        [
            functional.pad(part.to(hidden_states.dtype), (0, -part.shape[1] % width)).view(-1, width)
            for part in parts
        ]
    )


def input_sets(case: MoeBackwardCase, seed: int, count: int, device: str) -> list[MoeGradientInputs]:
    """Tokens, routing and gradients of their own for each set, the same experts for all."""
    made = forward.input_sets(case, seed, count, device, popularity(case.routing))
    return [_with_gradient(inputs, case, seed, index) for index, inputs in enumerate(made)]


def popularity(routing: str) -> Popularity:
    """What one of ``ROUTINGS`` is, in logits; which experts are popular is drawn."""

    def uniform(case: MoeCase, generator: torch.Generator, device: str) -> Tensor:
        return torch.zeros(case.experts, dtype=torch.float32, device=device)

    def zipf(case: MoeCase, generator: torch.Generator, device: str) -> Tensor:
        ranks = 1 + torch.randperm(case.experts, generator=generator, dtype=torch.int64, device=device)
        return -ranks.float().log()

    def hot(case: MoeCase, generator: torch.Generator, device: str) -> Tensor:
        ranks = torch.randperm(case.experts, generator=generator, dtype=torch.int64, device=device)
        return HOT * (ranks == 0).float()

    return {"router": forward.skewed, "uniform": uniform, "zipf": zipf, "hot": hot}[routing]


def _with_gradient(inputs: MoeInputs, case: MoeCase, seed: int, index: int = 0) -> MoeGradientInputs:
    like = inputs.hidden_states
    generator = torch.Generator(device=like.device).manual_seed(
        derived_seed(seed, case.id, index, "gradient")
    )
    gradient = torch.randn(like.shape, generator=generator, dtype=torch.float32, device=like.device)
    return MoeGradientInputs(inputs, gradient.to(like.dtype))


def refresh(case: MoeBackwardCase, inputs: MoeGradientInputs, seed: int) -> tuple[Tensor, ...]:
    """New values in the place of the output's gradient; of tokens and routing, too, where the call has a forward pass.
    What a forward pass that is done has kept belongs to the values that it was given."""
    device = inputs.output_gradient.device
    generator = torch.Generator(device=device).manual_seed(derived_seed(seed, case.id))
    gradient = inputs.output_gradient
    gradient.copy_(
        torch.randn(gradient.shape, generator=generator, dtype=torch.float32, device=device).to(
            gradient.dtype
        )
    )
    if not isinstance(case, MoeTrainingStepCase):
        return (gradient,)
    return *forward.refresh(case, inputs.forward, seed, popularity(case.routing)), gradient


# ---------------------------------------------------------------- hard to get right

Change = Callable[[Tensor], Tensor]

GRADIENTS: dict[str, Change] = {
    "expanded_gradient": lambda gradient: gradient[:1, :1].expand(gradient.shape),
    "transposed_gradient": lambda gradient: gradient.t().contiguous().t(),
    "zero_gradient": torch.zeros_like,
    "large_gradient": lambda gradient: gradient * 2.0**6,
    "small_gradient": lambda gradient: gradient * 2.0**-10,
}
"""What autograd hands to a backward pass: stride 0 after ``sum()``, other layouts, and small and large ones."""

_LEFT_OUT = ("inf_",)
"""Hard inputs of the forward pass with infinities: whether a gradient of one is infinite or NaN depends on how the
activation's derivative is written. NaN spreads the same way in all."""


def hard_inputs(dtype: str) -> tuple[HardInput, ...]:
    """The forward's hard inputs with random gradients of the output, hard gradients, and extreme routing weights."""

    def of_forward(hard: HardInput) -> HardInput:
        assert isinstance(hard.case, MoeCase)
        case = backward_case(hard.case)

        def make(seed: int, device: str) -> MoeGradientInputs:
            inputs = hard.make(seed, device)
            assert isinstance(inputs, MoeInputs)
            return _with_gradient(inputs, case, seed)

        return HardInput(hard.kind, case, make)

    def changed(kind: str, change: Callable[[MoeGradientInputs], MoeGradientInputs]) -> HardInput:
        case = MoeBackwardCase(kind, dtype, 70, hidden=64, intermediate=48, experts=8, top_k=2)
        return HardInput(kind, case, lambda seed, device: change(input_sets(case, seed, 1, device)[0]))

    def with_gradient(kind: str, change: Change) -> HardInput:
        return changed(kind, lambda inputs: replace(inputs, output_gradient=change(inputs.output_gradient)))

    def with_weights(kind: str, factor: float) -> HardInput:
        return changed(
            kind,
            lambda inputs: replace(
                inputs,
                forward=replace(inputs.forward, topk_weights=inputs.forward.topk_weights * factor),
            ),
        )

    usable = [hard for hard in forward_hard.hard_inputs(dtype) if not hard.kind.startswith(_LEFT_OUT)]
    return (
        *(of_forward(hard) for hard in usable),
        *(with_gradient(kind, change) for kind, change in GRADIENTS.items()),
        with_weights("tiny_weights", 2.0**-12),
        with_weights("large_weights", 2.0**7),
    )


def backward_case(case: MoeCase) -> MoeBackwardCase:
    return MoeBackwardCase(**{field.name: getattr(case, field.name) for field in fields(MoeCase)})


def hard_cases(cases: Sequence[MoeBackwardCase], device: str) -> tuple[HardInput, ...]:
    """Hard routings and gradients at the largest timed shape of each layer that the reference does in a moment."""
    most = forward_hard.MOST_HARD_FLOPS[device.partition(":")[0]]
    largest: dict[tuple[object, ...], MoeBackwardCase] = {}
    for case in sorted(cases, key=lambda case: case.tokens):
        if case.flops <= most:
            kind = case.activation, case.bias, case.w13_layout
            largest[case.dtype, case.hidden, case.intermediate, case.experts, kind] = case

    def hard(case: MoeBackwardCase, kind: str) -> HardInput:
        named = replace(case, name=f"{kind}@{case.name}")

        def make(seed: int, device: str) -> MoeGradientInputs:
            (inputs,) = input_sets(named, seed, 1, device)
            if kind in GRADIENTS:
                return replace(inputs, output_gradient=GRADIENTS[kind](inputs.output_gradient))
            ids = torch.full_like(inputs.forward.topk_ids, named.experts - 1)
            return replace(inputs, forward=replace(inputs.forward, topk_ids=ids))

        return HardInput(kind, named, make)

    return tuple(
        hard(case, kind) for case in largest.values() for kind in ("one_expert", "expanded_gradient")
    )

"""Attention's inputs with a gradient of the output, and which of them are hard to get right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from cudadent42.base.seeds import derived_seed
from cudadent42.operations.attention import inputs as forward
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.operations.attention.inputs import AttentionInputs
from cudadent42.operations.attention_backward.case import AttentionBackwardCase, AttentionTrainingStepCase
from cudadent42.operations.interface import HardInput


@dataclass(frozen=True)
class BackwardInputs:
    """query, output_gradient (batch, heads, seqlen_q, head_dim); key, value (batch, kv_heads, seqlen_k, head_dim)."""

    query: Tensor
    key: Tensor
    value: Tensor
    output_gradient: Tensor
    softmax_scale: float | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.query, self.key, self.value, self.output_gradient

    @property
    def result_like(self) -> Tensor:
        """Of the three gradients as ``packed`` puts them one below the other."""
        rows = sum(tensor.numel() // tensor.shape[-1] for tensor in self.tensors[:3])
        return self.query.new_empty(1, 1).expand(rows, self.query.shape[-1])

    @property
    def buffer_shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(tensor.shape) for tensor in self.tensors[:3])

    @property
    def of_forward(self) -> AttentionInputs:
        """The same memory, as leaves that gradients are taken of."""
        query, key, value = (tensor.detach().requires_grad_() for tensor in self.tensors[:3])
        return AttentionInputs(query, key, value, self.softmax_scale)


def packed(gradients: Sequence[Tensor]) -> Tensor:
    """(rows, head_dim): the rows of the gradients of query, key and value, one below the other."""
    return torch.cat([gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients])


def input_sets(case: AttentionBackwardCase, seed: int, count: int, device: str) -> list[BackwardInputs]:
    """``count`` independent sets."""
    return [random_inputs(case, seed, index, device) for index in range(count)]


def random_inputs(case: AttentionBackwardCase, seed: int, index: int, device: str) -> BackwardInputs:
    """Standard normal values, the gradient of the output too."""
    return _with_gradient(forward.random_inputs(case, seed, index, device), case, seed, index)


def _with_gradient(inputs: AttentionInputs, case: AttentionCase, seed: int, index: int = 0) -> BackwardInputs:
    like = inputs.query
    generator = torch.Generator(device=like.device).manual_seed(
        derived_seed(seed, case.id, index, "gradient")
    )
    gradient = torch.randn(like.shape, generator=generator, dtype=torch.float32, device=like.device).to(
        like.dtype
    )
    return BackwardInputs(inputs.query, inputs.key, inputs.value, gradient, inputs.softmax_scale)


def refresh(case: AttentionBackwardCase, inputs: BackwardInputs, seed: int) -> tuple[Tensor, ...]:
    """New values in the place of the output's gradient; of all four where the forward pass is part of the call. What a
    forward pass that is done has kept belongs to the values that it was given."""
    whole = isinstance(case, AttentionTrainingStepCase)
    written = inputs.tensors if whole else (inputs.output_gradient,)
    for index, tensor in enumerate(written):
        forward.write_normal(tensor, derived_seed(seed, case.id, index))
    return written


# ---------------------------------------------------------------- hard to get right

Change = Callable[[Tensor], Tensor]

GRADIENTS: dict[str, Change] = {
    "expanded_gradient": lambda gradient: gradient[:1, :1, :1, :1].expand(gradient.shape),
    "transposed_gradient": lambda gradient: gradient.transpose(1, 2).contiguous().transpose(1, 2),
    "zero_gradient": torch.zeros_like,
    "large_gradient": lambda gradient: gradient * 2.0**10,
    "small_gradient": lambda gradient: gradient * 2.0**-14,
}
"""What autograd hands to a backward pass: stride 0 after ``sum()``, other layouts, and the ends of fp16's range."""

_ON_CPU = ("nan_key_causal", "inf_")
"""Hard inputs of the forward pass that are asked of CPUs alone. The kernels for Hopper let NaN of a key into gradients
of rows of its tile that do not see it (docs/kernels/backward-hopper.md), and in which order a GPU's kernels sum decides
whether a gradient behind an infinity is infinite or NaN."""


_ON_CPU_WITH_A_MASK = ("nan_query",)
"""The same where there is a causal mask: they let NaN of a query into gradients of keys of its tile that it does not
see."""


def hard_inputs(dtype: str) -> tuple[HardInput, ...]:
    """The forward's hard inputs with random gradients of the output, and hard gradients; rows without keys at the head
    dims of every kernel."""

    def of_forward(hard: HardInput) -> HardInput:
        assert isinstance(hard.case, AttentionCase)
        case = backward_case(hard.case)

        def make(seed: int, device: str) -> BackwardInputs:
            inputs = hard.make(seed, device)
            assert isinstance(inputs, AttentionInputs)
            return _with_gradient(inputs, case, seed)

        return HardInput(hard.kind, case, make, only_on="cpu" if hard.kind.startswith(_ON_CPU) else "")

    def with_gradient(kind: str, change: Change) -> HardInput:
        case = AttentionBackwardCase(kind, dtype, 2, 2, 2, 70, 130, 64, kind == "transposed_gradient")

        def make(seed: int, device: str) -> BackwardInputs:
            inputs = random_inputs(case, seed, 0, device)
            return replace(inputs, output_gradient=change(inputs.output_gradient))

        return HardInput(kind, case, make)

    def with_blind_rows(name: str, heads: int, rows: int, keys: int, head_dim: int) -> HardInput:
        case = AttentionBackwardCase(
            f"more_queries_{name}", dtype, 1, heads, heads, rows, keys, head_dim, True
        )
        only_on = "cuda" if case.scores > forward.MOST_HARD_SCORES["cpu"] else ""
        return HardInput(case.name, case, lambda seed, device: random_inputs(case, seed, 0, device), only_on)

    return (
        *(of_forward(hard) for hard in forward.hard_inputs(dtype)),
        *(with_gradient(kind, change) for kind, change in GRADIENTS.items()),
        *(with_blind_rows(*shape) for shape in _BLIND_ROWS),
    )


_BLIND_ROWS = (
    ("128", 2, 290, 170, 128),
    ("256", 2, 290, 170, 256),
    ("80_rows", 1, 8240, 8192, 128),
)
"""Name, heads, rows, keys and head dim. Hopper's kernel takes 80 rows a step from 8,192 keys on."""


def backward_case(case: AttentionCase) -> AttentionBackwardCase:
    return AttentionBackwardCase(**{field.name: getattr(case, field.name) for field in fields(AttentionCase)})


def hard_cases(cases: Sequence[AttentionBackwardCase], device: str) -> tuple[HardInput, ...]:
    """The forward's hard values, and gradients at the ends of the range, at the largest timed shape of each head dim,
    dtype and mask that the float64 reference does in a moment. A small shape may be served by another kernel."""
    most = forward.MOST_HARD_SCORES[device.partition(":")[0]]
    largest: dict[tuple[object, ...], AttentionBackwardCase] = {}
    for case in sorted(cases, key=lambda case: case.scores):
        if 0 < case.scores <= most:
            largest[case.dtype, case.head_dim, case.causal, case.num_heads == case.num_kv_heads] = case

    def hard(case: AttentionBackwardCase, kind: str) -> HardInput:
        named = replace(case, name=f"{case.name}_{kind}")

        def make(seed: int, device: str) -> BackwardInputs:
            if kind not in GRADIENTS:
                changed = forward.AT_TIMED_SHAPES[kind](forward.random_inputs(named, seed, 0, device))
                return _with_gradient(changed, named, seed)
            inputs = random_inputs(named, seed, 0, device)
            return replace(inputs, output_gradient=GRADIENTS[kind](inputs.output_gradient))

        return HardInput(kind, named, make)

    on_cpu = device.startswith("cpu")
    kinds = (
        "expanded_gradient",
        "small_gradient",
        *(kind for kind in forward.AT_TIMED_SHAPES if kind != "nan_key"),
    )
    return tuple(
        hard(case, kind)
        for case in largest.values()
        for kind in kinds
        if on_cpu or not (case.causal and kind in _ON_CPU_WITH_A_MASK)
    )

"""Cases of attention's gradients on the GPU at hand, and the kernels that take them."""

from __future__ import annotations

import dataclasses

import torch
from attention_backward import Backward, backward_case

from flashmoe_science.configs.attention import backward as portable_configs
from flashmoe_science.cuda.attention import gradients
from flashmoe_science.cuda.attention.gradients.backward import _problem
from flashmoe_science.cuda.attention.gradients.problem import GradientKind
from flashmoe_science.cuda.attention.gradients.select import BACKWARD
from flashmoe_science.cuda.attention.problem import strides_of
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.device import device_of
from flashmoe_science.gradients import Gradients, Needs

BF16, FP16 = torch.bfloat16, torch.float16
ALL = Needs(True, True, True)
KINDS = list(GradientKind)
LENGTHS, SHORT = (300, 417), (200, 317)
"""The second for the kernel for short sequences: two heads that share a key have at most 512 rows together."""


def case_of(
    lengths: tuple[int, int] = LENGTHS,
    head_dim: int = 64,
    *,
    heads: tuple[int, int] = (4, 2),
    dtype: torch.dtype = BF16,
    causal: bool = True,
    scale: float | None = None,
    grad_lse: bool = False,
    factor: float = 1.0,
    rows_first: bool = False,
) -> Backward:
    torch.manual_seed(sum(lengths) + head_dim)

    def tensor(heads: int, rows: int) -> torch.Tensor:
        shape = (2, rows, heads, head_dim) if rows_first else (2, heads, rows, head_dim)
        made = torch.randn(shape, device="cuda").to(dtype)
        return made.transpose(1, 2) if rows_first else made

    (seqlen_q, seqlen_k), (h, kv) = lengths, heads
    return backward_case(
        tensor(h, seqlen_q),
        tensor(kv, seqlen_k),
        tensor(kv, seqlen_k),
        tensor(h, seqlen_q) * factor,
        causal=causal,
        scale=scale,
        grad_lse=torch.randn(2, h, seqlen_q, device="cuda") if grad_lse else None,
    )


def backward(case: Backward, needs: Needs = ALL, choice: Choice | None = None) -> Gradients:
    return gradients.backward(
        case.grad_output,
        case.query,
        case.key,
        case.value,
        case.output,
        case.lse,
        case.grad_lse,
        causal=case.causal,
        softmax_scale=case.scale,
        needs=needs,
        choice=choice,
    )


def choices_of(case: Backward, needs: Needs, kind: GradientKind) -> list[Choice]:
    """That of a kernel, if it takes the call; of the portable ones also the one pass that some calls do not take."""
    chosen = choice_of(case, needs, kind)
    if chosen is None or kind is not GradientKind.PORTABLE:
        return [] if chosen is None else [chosen]
    device = device_of(case.query.get_device())
    whole = dataclasses.replace(
        chosen, configuration=portable_configs.configuration(device.architecture, case.query.shape[-1])
    )
    if whole.configuration.single is None:
        return [chosen]
    two = dataclasses.replace(chosen, configuration=dataclasses.replace(whole.configuration, single=None))
    return [whole, two]


def choice_of(case: Backward, needs: Needs, kind: GradientKind) -> Choice | None:
    tensors = (case.query, case.key, case.value, case.output)
    strides = strides_of("grad_output", case.grad_output)
    problem = _problem(tensors, strides, case.causal, case.scale, needs)
    return BACKWARD.modules[kind].choose(problem, device_of(case.query.get_device()))

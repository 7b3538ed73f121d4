"""The gradients of this project's attention with some of them left out, to see what they cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from cudadent42.operations.attention_backward.case import AttentionBackwardCase, AttentionTrainingStepCase
from cudadent42.operations.attention_backward.inputs import BackwardInputs
from cudadent42.operations.interface import WHOLE, Parts

if TYPE_CHECKING:
    from torch import Tensor

    from cudadent42.model.implementations import Call

_LEFT_OUT = {WHOLE: (), "query_gradient": (0,), "key_value_gradients": (1, 2)}
"""Which of query, key and value need no gradient, by the part's name."""


def without(case: AttentionBackwardCase, inputs: BackwardInputs) -> Parts:
    """All gradients, and all but some. None is wrong: what is not asked for is not computed."""
    return Parts({part: _gradients(case, inputs, which) for part, which in _LEFT_OUT.items()})


def _gradients(case: AttentionBackwardCase, inputs: BackwardInputs, left_out: tuple[int, ...]) -> Call:
    from flashmoe_science import flash_attention

    scale = inputs.softmax_scale
    tensors = [
        tensor.detach() if index in left_out else tensor
        for index, tensor in enumerate(inputs.of_forward.tensors)
    ]
    wanted, gradient = [tensor for tensor in tensors if tensor.requires_grad], inputs.output_gradient

    def forward() -> Tensor:
        output = flash_attention(*tensors, causal=case.causal, softmax_scale=scale)
        assert isinstance(output, torch.Tensor)
        return output

    if isinstance(case, AttentionTrainingStepCase):
        return lambda: torch.autograd.grad(forward(), wanted, gradient)[0]
    output = forward()
    return lambda: torch.autograd.grad(output, wanted, gradient, retain_graph=True)[0]

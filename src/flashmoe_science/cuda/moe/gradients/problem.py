"""What a call of the backward pass of a mixture of experts asks for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from flashmoe_science.cuda.moe.problem import MoeProblem
from flashmoe_science.moe_gradients import MoeNeeds

OVERRIDE_VARIABLE = "FLASHMOE_MOE_BACKWARD"
COMPOSED = "composed"
"""What the variable says besides a kernel's name: PyTorch's operations, for which nothing is kept."""


class MoeBackwardKind(Enum):
    """The ways through the backward pass on CUDA."""

    HOPPER = "hopper"
    PORTABLE = "portable"


@dataclass(frozen=True)
class MoeBackwardProblem:
    """One call: shapes and options. All tensors are contiguous."""

    forward: MoeProblem
    """The call that is differentiated."""
    needs: MoeNeeds
    kept: bool
    """What the activation was applied to is there; otherwise it is computed again."""
    accumulates_w13: bool = False
    """The gradient of w13 is added to a float32 buffer."""
    accumulates_w2: bool = False

"""What a mixture-of-experts call asks for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from flashmoe_science.moe_arguments import Activation, W13Layout


class MoeKind(Enum):
    """The ways through a mixture-of-experts layer on CUDA."""

    FEW = "few"
    HOPPER = "hopper"
    PORTABLE = "portable"


@dataclass(frozen=True)
class MoeProblem:
    """One call: shapes and options. All tensors are contiguous.

    Nothing of where the tokens are routed: choices made from it hold for every routing, so that a captured graph may
    be replayed with another.
    """

    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    dtype: torch.dtype
    activation: Activation
    w13_layout: W13Layout
    ids64: bool
    """The expert ids are int64, otherwise int32."""
    keeps: bool = False
    """What the activation is applied to is a second result, for the backward pass."""

    @property
    def slots(self) -> int:
        """Pairs of a token and one of its experts; slot = token * top_k + j."""
        return self.tokens * self.top_k

    @property
    def gated(self) -> bool:
        return self.activation.gated

    @property
    def w13_rows(self) -> int:
        """Rows of one expert's first weight."""
        return self.intermediate * (2 if self.gated else 1)

    @property
    def rows_per_expert(self) -> float:
        """Mean number of slots of an expert."""
        return self.slots / self.experts

"""What a mixture-of-experts call asks for."""

from __future__ import annotations

from collections.abc import Callable
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
    w13_biased: bool = False
    w2_biased: bool = False
    """Biases are there: (experts, rows of the weight), of the weights' dtype."""
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
    def biases(self) -> int:
        """How many tensors of biases there are."""
        return self.w13_biased + self.w2_biased

    @property
    def w13_bias_strides(self) -> tuple[int, int]:
        """Elements from an intermediate column's bias to the next column's, and from a gate's to its up's."""
        if not self.gated:
            return 1, 0
        return (2, 1) if self.w13_layout is W13Layout.INTERLEAVED else (1, self.intermediate)

    @property
    def rows_per_expert(self) -> float:
        """Mean number of slots of an expert."""
        return self.slots / self.experts


def addresses_of_biases(problem: MoeProblem) -> Callable[[tuple[int, ...]], tuple[int, ...]] | None:
    """What makes (w13_bias, w2_bias, ...) of the addresses that a launch gets behind topk_ids, with 0 for a bias that
    is not there; None where there are none.
    """
    if problem.w13_biased and problem.w2_biased:
        return lambda rest: rest
    if problem.w13_biased:
        return lambda rest: (rest[0], 0, *rest[1:])
    if problem.w2_biased:
        return lambda rest: (0, *rest)
    return None

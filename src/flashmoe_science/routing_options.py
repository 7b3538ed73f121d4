"""What of a routing is no tensor, and what a pass with its losses gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from flashmoe_science.moe_arguments import Scores


@dataclass(frozen=True)
class RoutingOptions:
    """As of `flashmoe_science.topk_routing`, but for k."""

    scores: Scores = Scores.SOFTMAX
    renormalize: bool = True
    scaling_factor: float = 1.0
    groups: int = 1
    top_groups: int = 1


class RoutingPass(NamedTuple):
    """The choice and both losses, with the number of slots of each expert."""

    weights: torch.Tensor
    ids: torch.Tensor
    balance: torch.Tensor
    z: torch.Tensor
    counts: torch.Tensor

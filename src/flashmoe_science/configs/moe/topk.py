"""Shapes of the routing kernel (`kernels/cuda/topk_routing.cu`), by number of experts: data."""

from __future__ import annotations

from dataclasses import dataclass

MAX_EXPERTS = 1024
MAX_GROUPS = 32
"""Of experts: a lane holds a group's rank."""
_WARP = 32


@dataclass(frozen=True)
class TopkConfiguration:
    """How the scores of a token are spread over lanes. See `kernels/cuda/topk_routing.cu`."""

    lanes: int
    """Lanes that share a token, a part of a warp."""
    experts_per_lane: int
    warps: int = 4

    @property
    def threads(self) -> int:
        return _WARP * self.warps

    @property
    def experts(self) -> int:
        """The most that it takes."""
        return self.lanes * self.experts_per_lane

    @property
    def tokens_per_block(self) -> int:
        return self.threads // self.lanes

    @property
    def label(self) -> str:
        return f"{self.lanes} lanes with {self.experts_per_lane} experts each, {self.warps} warps"


CONFIGURATIONS = (
    TopkConfiguration(8, 1),
    *(TopkConfiguration(32, experts_per_lane) for experts_per_lane in (1, 2, 4, 8, 16, 32)),
)


def configuration(experts: int) -> TopkConfiguration:
    """The smallest that holds so many experts, at most `MAX_EXPERTS`."""
    return next(candidate for candidate in CONFIGURATIONS if experts <= candidate.experts)

"""Tiles of the Hopper kernel of grouped products (`kernels/cuda/moe_hopper.cu`): data.

docs/kernels/notebooks/moe.md has every variant with its figures.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

INNER = 64
"""Columns of a stage: 128 bytes, what TMA swizzles by."""
WEIGHT_ROWS = 256
"""Of a tile."""
THREADS = 384
_ROW_BYTES = 128


@dataclass(frozen=True)
class MoeHopperConfiguration:
    """One tile shape, for both products."""

    tokens: int
    """Most tokens of a tile."""
    step: int
    """Tiles with fewer tokens are as wide as a multiple of this."""
    stages: int
    cluster: int = 1
    """Blocks that take the same weights at once and load a part of them each, 1 or 2."""

    @property
    def macros(self) -> dict[str, int]:
        return {"TOKENS": self.tokens, "STEP": self.step, "STAGES": self.stages, "CLUSTER": self.cluster}

    @property
    def shared_bytes(self) -> int:
        """Tiles, barriers, and what rounding the start up to 1024 bytes may take."""
        tickets = 2 if self.cluster > 1 else 0
        barriers = 16 * (self.stages + 2 + tickets)
        tiles = 2 * 16 + tickets * 16
        return self.stages * (WEIGHT_ROWS + self.tokens) * _ROW_BYTES + barriers + tiles + 1024


TUNABLE = {"tokens": 1, "step": 1, "stages": 1}
"""See `cuda.choice.Tuned.tunable`."""

WIDE = MoeHopperConfiguration(tokens=192, step=16, stages=4)
PAIRS = replace(WIDE, cluster=2)
NARROW = MoeHopperConfiguration(tokens=64, step=32, stages=5)
_NARROW_UP_TO = 48.0
"""Mean rows of an expert up to which the narrow tile holds nearly every expert's."""


PAIRS_FROM = 512.0
"""Mean rows of an expert from which pairs of blocks are used: whole steps were slower with 256, and not with 1,024."""


def configuration(rows_per_expert: float, *, pairs: bool = False) -> MoeHopperConfiguration:
    """The tile for so many rows of an expert in the mean. `pairs`: whether the products are of those raced in pairs,
    which are those of a gated activation whose forward pass keeps what the backward pass needs.
    """
    if rows_per_expert <= _NARROW_UP_TO:
        return NARROW
    return PAIRS if pairs and rows_per_expert >= PAIRS_FROM else WIDE


def all_configurations() -> tuple[MoeHopperConfiguration, ...]:
    """Everything that `configuration` can return."""
    return WIDE, PAIRS, NARROW

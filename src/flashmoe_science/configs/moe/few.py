"""Tiles of the way through a mixture of experts for few tokens, per architecture and size: data.

Chosen by measurement on an H200 (docs/kernels/moe-few.md), other architectures by analogy: what counts is how much is
in flight.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum

MAX_EXPERTS = 512
MAX_SLOTS = 4096
DIRECT_SLOTS = 32
_SLOT_BYTES = 512
_GROUP_BYTES = 8
_SORTED_BYTES = 2
_TOTALS_BYTES = 128


class FewWay(Enum):
    """How the warps of a block share the work of one product: the kernels `moe_few_*.cu`."""

    SPLIT = "split"
    """They split the inner dimension of the same rows of weights."""
    TILES = "tiles"
    """Each has rows of its own, and tokens are copied once for all of them."""
    COMBINED = "combined"
    """Each has experts of its own for the same columns of the output; of the second product, with the combination."""


@dataclass(frozen=True)
class FewProduct:
    """One product. `few_parameters.cuh` says what fields do."""

    way: FewWay
    m_tiles: int
    """Of 16 weight rows, of a warp at a time."""
    n_tiles: int
    """Of 8 tokens."""
    k_steps: int
    """Of 32 elements, in a stage."""
    stages: int
    warps: int = 8
    parts: int = 1
    """Warps that share an expert in `FewWay.COMBINED`."""

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def columns(self) -> int:
        return 8 * self.n_tiles

    @property
    def unit_tiles(self) -> int:
        """Tiles of an expert that a block works on at a time."""
        return self.m_tiles * (self.warps if self.way is FewWay.TILES else 1)

    @property
    def label(self) -> str:
        parts = f"/{self.parts}" if self.parts > 1 else ""
        size = f"{16 * self.m_tiles}x{self.columns}x{32 * self.k_steps}"
        return f"{self.way.value}{parts} {self.warps} warps x {size} x {self.stages}"

    def shared_bytes(self, max_slots: int, *, direct: bool) -> int:
        """Of a block: ring, what its warps exchange, and routing."""
        weights = self.warps * 2 * self.m_tiles * self.k_steps * _SLOT_BYTES
        tokens = self.n_tiles * self.k_steps * _SLOT_BYTES
        exchanged = 0
        if self.way is not FewWay.TILES:
            tokens *= self.warps
        if self.way is FewWay.SPLIT:
            exchanged = 2 * self.warps * self._tiles_together() * self.n_tiles * _SLOT_BYTES
        elif self.way is FewWay.COMBINED:
            exchanged = self.parts * max_slots * 16 * self.m_tiles * 4
        routing = 0
        if not direct:
            groups = min(max_slots, MAX_EXPERTS + max_slots // self.columns)
            routing = groups * _GROUP_BYTES + max_slots * _SORTED_BYTES + _TOTALS_BYTES
        return self.stages * (weights + tokens) + exchanged + routing

    def _tiles_together(self) -> int:
        """Tiles whose partial sums are exchanged at a time in `FewWay.SPLIT`."""
        most = max(1, min(4 // self.n_tiles, self.m_tiles))
        return next(tiles for tiles in range(most, 0, -1) if self.m_tiles % tiles == 0)


@dataclass(frozen=True)
class FewConfiguration:
    """Both products."""

    up: FewProduct
    down: FewProduct
    max_slots: int
    """tokens * top_k may be as many."""
    direct: bool = False
    """Every slot for itself, without sorting: at most `DIRECT_SLOTS`."""

    @property
    def combined(self) -> bool:
        """The second product combines; otherwise a kernel of its own does."""
        return self.down.way is FewWay.COMBINED

    @property
    def label(self) -> str:
        slots = "direct" if self.direct else f"{self.max_slots} slots"
        return f"{slots}; {self.up.label}; {self.down.label}"

    def shared_bytes(self, product: FewProduct) -> int:
        return product.shared_bytes(self.max_slots, direct=self.direct)


TUNABLE = {
    **{
        f"{product}.{name}": 1
        for product in ("up", "down")
        for name in ("way", "m_tiles", "n_tiles", "k_steps", "stages", "warps", "parts")
    },
    "max_slots": 1,
    "direct": 0,
}
"""See `cuda.choice.Tuned.tunable`."""


@dataclass(frozen=True)
class _Table:
    """What an architecture takes."""

    direct: FewConfiguration
    """Every slot for itself; its parts are set by the number of slots."""
    few_rows: FewConfiguration
    more_rows: FewConfiguration
    most_rows: float = 20.0
    """Rows per expert beyond which other ways are taken."""


_SPLIT, _TILES, _COMBINED = FewWay.SPLIT, FewWay.TILES, FewWay.COMBINED
_FEW_ROWS = 4.0
"""Rows per expert up to which the second product combines."""
_COMBINED_SLOTS = 512

# No two blocks fit a multiprocessor: two of the same kernel would share one while others have none.
_227_KB = _Table(
    direct=FewConfiguration(
        FewProduct(_SPLIT, 2, 1, 2, 4), FewProduct(_COMBINED, 1, 1, 4, 4), DIRECT_SLOTS, direct=True
    ),
    few_rows=FewConfiguration(
        FewProduct(_SPLIT, 2, 1, 2, 4), FewProduct(_COMBINED, 1, 1, 4, 3), _COMBINED_SLOTS
    ),
    more_rows=FewConfiguration(FewProduct(_TILES, 1, 4, 4, 4), FewProduct(_TILES, 1, 4, 4, 4), MAX_SLOTS),
)
_163_KB = _Table(
    direct=FewConfiguration(
        FewProduct(_SPLIT, 2, 1, 2, 3), FewProduct(_COMBINED, 1, 1, 2, 5), DIRECT_SLOTS, direct=True
    ),
    few_rows=FewConfiguration(
        FewProduct(_SPLIT, 2, 1, 2, 3), FewProduct(_COMBINED, 1, 1, 2, 4), _COMBINED_SLOTS
    ),
    more_rows=FewConfiguration(FewProduct(_TILES, 1, 4, 4, 3), FewProduct(_TILES, 1, 4, 4, 3), MAX_SLOTS),
)
_99_KB = _Table(
    direct=FewConfiguration(
        FewProduct(_SPLIT, 2, 1, 1, 4), FewProduct(_COMBINED, 1, 1, 2, 3), DIRECT_SLOTS, direct=True
    ),
    few_rows=FewConfiguration(
        FewProduct(_SPLIT, 2, 1, 1, 3), FewProduct(_COMBINED, 1, 1, 2, 2), _COMBINED_SLOTS
    ),
    more_rows=FewConfiguration(FewProduct(_TILES, 1, 4, 2, 4), FewProduct(_TILES, 1, 4, 2, 4), MAX_SLOTS),
)
_TABLES = {
    "sm_80": _163_KB,
    "sm_86": _99_KB,
    "sm_87": _163_KB,
    "sm_89": _99_KB,
    "sm_90": dataclasses.replace(_227_KB, most_rows=10.0),  # wgmma is as fast from there on
    "sm_100": _227_KB,
    "sm_103": _227_KB,
    "sm_120": _99_KB,
    "sm_121": _99_KB,
}


def tuned_architectures() -> tuple[str, ...]:
    return tuple(_TABLES)


def configuration(architecture: str, tokens: int, top_k: int, experts: int) -> FewConfiguration | None:
    """The one for a problem's shape; None if there are too many tokens. KeyError for an unknown architecture."""
    table = _TABLES[architecture]
    slots, rows = tokens * top_k, tokens * top_k / experts
    if experts > MAX_EXPERTS or slots > MAX_SLOTS or rows > table.most_rows:
        return None
    # One expert is chosen twice, at random, for every 2 * experts pairs of slots.
    if slots <= DIRECT_SLOTS and (tokens == 1 or slots**2 <= 2 * experts):
        return _with_parts(table.direct, slots)
    if rows <= _FEW_ROWS and slots <= _COMBINED_SLOTS:
        return table.few_rows
    return table.more_rows


def all_configurations(architecture: str) -> tuple[FewConfiguration, ...]:
    """Everything that `configuration` can return on an architecture; nothing for one that is not in the table."""
    if architecture not in _TABLES:
        return ()
    table = _TABLES[architecture]
    direct = (_with_parts(table.direct, slots) for slots in (1, 2, 4, 8))
    return tuple(dict.fromkeys((*direct, table.few_rows, table.more_rows)))


def _with_parts(base: FewConfiguration, slots: int) -> FewConfiguration:
    """As many warps to a slot as there are for each."""
    parts = 1
    while parts * 2 * max(slots, 1) <= base.down.warps:
        parts *= 2
    return dataclasses.replace(base, down=dataclasses.replace(base.down, parts=parts))

"""Shapes of the small-shape attention kernel, per architecture, head dimension and number of keys: data.

*Latency*: all keys at once in the registers of a block or a cluster. *Stream*: any number of keys, in passes, split
over warps, a cluster (from sm_90) and the grid, see `configs.small_keys`. Chosen by measurement on an H200
(docs/kernels/small.md), elsewhere by analogy.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

KEY_TILE = 16
HEAD_DIMS = (64, 128, 256)
"""Compiled head dimensions; a tensor's is padded, in registers, to the next of these."""
CLUSTERED = ("sm_90", "sm_100", "sm_103")
"""Architectures with clusters of up to 16 blocks and with programmatic dependent launch."""
CLUSTERS = (1, 2, 3, 4, 5, 6, 8, 16)
"""Blocks that a cluster may have; half the warps each in the largest."""
LARGEST_CLUSTER = 16
SPLIT_CLUSTERS = (1, 2, 4)
"""Blocks of a cluster where there are splits."""
FEW_ROWS = 8
"""Decode: one tile of rows."""
MOST_ARRIVALS = 1 << 10
"""Counters that one launch may have for its splits: one for each warp of a set of query rows."""
_EXACT = (64, 128)  # head dims with latency kernels of their own, without the padding's index arithmetic


@dataclass(frozen=True)
class SmallConfiguration:
    """One kernel of `attention_small.cu`, which says what fields do."""

    head_dim: int
    """Compiled head dimension."""
    padded: bool
    """Takes every head dimension up to `head_dim`, not just that one."""
    row_tiles: int
    """Query rows of a block / 8."""
    warps: int
    key_tiles: int
    """Tiles of 16 keys that a warp holds at a time."""
    cluster: int = 1
    """Blocks that share the keys of one set of rows."""
    single_pass: bool = False
    """All keys are held at once, so there may be at most `keys_per_pass`."""
    dependent: bool = False
    """Starts while the kernel before it in the stream ends (sm_90 and later)."""
    mma_k: int = 16
    splits: int = 1
    """Clusters that share the keys of one set of rows and meet in device memory; one kernel for all above 1."""

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def rows(self) -> int:
        return 8 * self.row_tiles

    @property
    def quads(self) -> int:
        """Groups of 4 values in each of 32 lanes that the output of one set of rows has."""
        return 4 * self.row_tiles * -(-self.head_dim // 64)

    @property
    def keys_per_pass(self) -> int:
        return KEY_TILE * self.key_tiles * self.warps * self.cluster * self.splits

    @property
    def late_values(self) -> bool:
        """Values wait for the registers that keys leave."""
        return self.head_dim > 128 or (self.head_dim > 64 and self.key_tiles > 1)

    @property
    def label(self) -> str:
        passes = "one pass" if self.single_pass else "passes"
        splits = f" x {self.splits} splits" if self.splits > 1 else ""
        return (
            f"head_dim {'up to ' if self.padded else ''}{self.head_dim}, {self.rows} rows, "
            f"{self.warps} warps x {self.cluster} blocks{splits}, {passes} of {self.keys_per_pass} keys"
        )


TUNABLE = {
    "row_tiles": 1,
    "warps": 1,
    "key_tiles": 1,
    "cluster": 1,
    "dependent": 0,
    "mma_k": 1,
    "splits": 1,
}
"""See `cuda.choice.Tuned.tunable`."""


@dataclass(frozen=True)
class RowSlices:
    """The query side of a problem."""

    slices: int
    """Key/value heads of the whole batch."""
    rows: int
    """Query rows that share the keys of one."""

    def blocks(self, rows_per_block: int) -> int:
        return self.slices * -(-self.rows // rows_per_block)


@dataclass(frozen=True)
class _Shape:
    row_tiles: int
    warps: int
    key_tiles: int
    cluster: int = 1
    one_wave: bool = False
    """Only while every multiprocessor gets at most one block."""
    most_waves: float = math.inf
    """With more than `FEW_ROWS` rows, only up to so many blocks for each multiprocessor."""
    fewest_keys: int = 0
    """With more than `FEW_ROWS` rows."""
    full_only: bool = False
    """Not with a causal mask, where the first of many rows wait for the keys of the last."""


# In order of the keys that they hold; the first that holds all keys, and suits, is taken.
_LATENCY: dict[int, tuple[_Shape, ...]] = {
    64: (_Shape(1, 2, 1), _Shape(1, 4, 1), _Shape(1, 4, 2), _Shape(1, 4, 4), _Shape(1, 8, 4)),
    128: (_Shape(1, 2, 1), _Shape(1, 4, 1), _Shape(1, 8, 1)),
    256: (_Shape(1, 2, 1), _Shape(1, 4, 1)),
}
_LATENCY_CLUSTERED: dict[int, tuple[_Shape, ...]] = {
    64: (
        _Shape(1, 2, 1),
        _Shape(1, 4, 1),
        _Shape(1, 2, 1, 4, one_wave=True),
        _Shape(1, 4, 2, most_waves=2.5),
        _Shape(1, 4, 2, 2, one_wave=True),
        _Shape(2, 4, 1, 4, most_waves=1.95),
        _Shape(4, 4, 2, 4, one_wave=True, full_only=True, fewest_keys=257),
        _Shape(2, 4, 2, 4, most_waves=1.85, fewest_keys=257),
    ),
    128: (
        _Shape(1, 2, 1),
        _Shape(1, 4, 1),
        _Shape(2, 4, 1, 4, one_wave=True),
        _Shape(1, 8, 1, most_waves=1),
        _Shape(2, 4, 1, 4, most_waves=1.7, fewest_keys=129),
        _Shape(1, 8, 1, 4, most_waves=1),
    ),
    256: (_Shape(1, 2, 1), _Shape(1, 4, 1), _Shape(1, 4, 1, 4, most_waves=1.7)),
}
# For up to 8 rows, and for more. Static shared memory (48 KB) and registers are what limits them.
_STREAM: dict[int, tuple[_Shape, ...]] = {
    64: (_Shape(1, 8, 2), _Shape(2, 8, 1)),
    128: (_Shape(1, 8, 1), _Shape(2, 4, 1)),
    256: (_Shape(1, 4, 1),),
}
# In clusters of 16, two blocks share a multiprocessor: with 8 warps each, a cluster waits for 16 empty ones.
_STREAM_16: dict[int, tuple[_Shape, ...]] = {
    64: (_Shape(1, 4, 2), _Shape(2, 4, 1)),
    128: (_Shape(1, 4, 2), _Shape(2, 4, 1)),
    256: (_Shape(1, 4, 1),),
}
# For more than 8 rows where blocks of 8 warps would wait for each other: three of these share a multiprocessor.
_STREAM_BESIDE: dict[int, _Shape] = {64: _Shape(2, 4, 1)}
_BESIDE_CLUSTERS = (1, 2, 4)


def latency(
    architecture: str, head_dim: int, keys: int, row_slices: RowSlices, multiprocessors: int, causal: bool
) -> SmallConfiguration | None:
    """The kernel that holds so many keys at once; None if there is none. `architecture` without suffix."""
    compiled = _compiled(head_dim)
    padded = head_dim not in _EXACT
    for shape in _latency_shapes(architecture)[compiled]:
        candidate = _configuration(architecture, compiled, shape, padded=padded, single_pass=True)
        waves = row_slices.blocks(candidate.rows) * candidate.cluster / multiprocessors
        most = 1.0 if shape.one_wave else shape.most_waves if row_slices.rows > FEW_ROWS else math.inf
        suits = waves <= most and not (causal and shape.full_only)
        if row_slices.rows > FEW_ROWS:
            suits = suits and keys >= shape.fewest_keys
        if suits and candidate.keys_per_pass >= keys:
            return candidate
    return None


def stream(architecture: str, head_dim: int, rows: int, cluster: int) -> SmallConfiguration:
    """The kernel for any number of keys; `cluster` is 1 before sm_90."""
    compiled = _compiled(head_dim)
    shapes = (_STREAM_16 if cluster == LARGEST_CLUSTER else _STREAM)[compiled]
    shape = next((shape for shape in shapes if 8 * shape.row_tiles >= rows), shapes[-1])
    whole = dataclasses.replace(shape, cluster=cluster)
    return _configuration(architecture, compiled, whole, padded=True, single_pass=False)


def beside(architecture: str, head_dim: int, rows: int) -> list[SmallConfiguration]:
    """Further kernels for any number of keys, of which several blocks share a multiprocessor."""
    compiled = _compiled(head_dim)
    shape = _STREAM_BESIDE.get(compiled)
    if shape is None or architecture not in CLUSTERED or rows <= FEW_ROWS:
        return []
    return [
        _configuration(
            architecture,
            compiled,
            dataclasses.replace(shape, cluster=cluster),
            padded=True,
            single_pass=False,
        )
        for cluster in _BESIDE_CLUSTERS
    ]


def all_configurations(architecture: str) -> list[SmallConfiguration]:
    """What can be chosen on an architecture: with splits, which are one kernel whatever their number, in two."""
    configurations = []
    for compiled in HEAD_DIMS:
        for padded in (False, True) if compiled in _EXACT else (True,):
            configurations += [
                _configuration(architecture, compiled, shape, padded=padded, single_pass=True)
                for shape in _latency_shapes(architecture)[compiled]
            ]
        configurations += [
            stream(architecture, compiled, 8 * shape.row_tiles, cluster)
            for shape in _STREAM[compiled]
            for cluster in (CLUSTERS if architecture in CLUSTERED else (1,))
        ]
        configurations += beside(architecture, compiled, 16)
        configurations += [
            dataclasses.replace(stream(architecture, compiled, 8 * shape.row_tiles, cluster), splits=2)
            for shape in _STREAM[compiled]
            for cluster in (SPLIT_CLUSTERS if architecture in CLUSTERED else (1,))
        ]
    return list(dict.fromkeys(configurations))


def _compiled(head_dim: int) -> int:
    return next(d for d in HEAD_DIMS if d >= head_dim)


def _latency_shapes(architecture: str) -> dict[int, tuple[_Shape, ...]]:
    return _LATENCY_CLUSTERED if architecture in CLUSTERED else _LATENCY


def _configuration(
    architecture: str, head_dim: int, shape: _Shape, *, padded: bool, single_pass: bool
) -> SmallConfiguration:
    return SmallConfiguration(
        head_dim=head_dim,
        padded=padded,
        row_tiles=shape.row_tiles,
        warps=shape.warps,
        key_tiles=shape.key_tiles,
        cluster=shape.cluster,
        single_pass=single_pass,
        dependent=architecture in CLUSTERED,
        mma_k=8 if architecture == "sm_75" else 16,
    )

"""Time of the small-shape kernel with more than 8 rows; which of its kernels for any number of keys takes the least.

A multiprocessor holds one block of 8 warps, or two or three of 4; beside each other they slow each other down, but less
than one after the other. Clusters without a place begin another turn. Measured on an H200 (docs/kernels/small.md),
keys and values in L2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flashmoe_science.configs.attention.h200 import CLUSTERS_AT_ONCE, MULTIPROCESSORS
from flashmoe_science.configs.attention.small import (
    CLUSTERED,
    CLUSTERS,
    FEW_ROWS,
    KEY_TILE,
    LARGEST_CLUSTER,
    RowSlices,
    SmallConfiguration,
    beside,
    stream,
)

CACHED_BYTES = 50_000_000
"""So much is read from L2 when calls follow each other; more from memory."""
CACHED_RATE = 48_000
"""Bytes per microsecond of one multiprocessor, from L2."""
_ALONE = {**CLUSTERS_AT_ONCE[1], 3: 24, 16: 7}
"""So many clusters have multiprocessors for themselves. Of 3 blocks, some share theirs while others are free."""
_WHOLE_WARPS = 8
"""Of a block that has the registers of a multiprocessor for itself."""
_SLOWER = {
    (64, 1): 1.6,
    (64, 2): 2.45,
    (64, 3): 2.75,
    (128, 1): 1.12,
    (128, 2): 1.58,
    (256, 1): 1.0,
    (256, 2): 1.4,
}
"""By head dim and the blocks on a multiprocessor: time of a pass of 4 warps over that of its bytes at `CACHED_RATE`."""

# Microseconds.
_CALL_US = 2.7
_MERGE_US = 0.3
"""Of the blocks of a cluster."""
_BESIDE_US = 0.5
"""What blocks that share a multiprocessor take longer to begin and to end."""
_TURN_US = 2.2
_WHOLE = 0.6
"""Part of what a pass that is not whole lacks that takes time all the same: its warps without keys wait."""
_WORTH = 1.03
"""More warps are taken for a set of rows for more than this."""


@dataclass(frozen=True)
class Work:
    """What a call asks for, and of which GPU."""

    keys: int
    row_slices: RowSlices
    multiprocessors: int
    seen: float
    """Share of the keys that a row sees in the mean: 1 without a mask, 1/2 under a causal one with as many rows."""


def measured(architecture: str, head_dim: int, work: Work) -> bool:
    """Whether the figures here hold."""
    read = work.row_slices.slices * 4 * head_dim * work.keys
    return architecture in CLUSTERED and work.row_slices.rows > FEW_ROWS and read <= CACHED_BYTES


def fastest(architecture: str, head_dim: int, work: Work) -> SmallConfiguration:
    """The kernel of the least estimated time, without splits."""
    rows = work.row_slices.rows
    candidates = [stream(architecture, head_dim, rows, cluster) for cluster in CLUSTERS]
    candidates += beside(architecture, head_dim, rows)
    candidates.sort(key=_warps)
    useful = [one for one in candidates if _warps(one) * KEY_TILE < 2 * work.keys] or candidates[:1]
    # The largest cluster loses in turns.
    fits = [
        one
        for one in useful
        if one.cluster < LARGEST_CLUSTER or work.row_slices.blocks(one.rows) <= _places(one, work)
    ]
    times = [microseconds(one, work) for one in fits]
    least = min(times)
    return next(one for one, us in zip(fits, times, strict=True) if us <= _WORTH * least)


def microseconds(configuration: SmallConfiguration, work: Work) -> float:
    """Estimated time of a call without splits where calls follow each other."""
    cluster = configuration.cluster
    sets = work.row_slices.blocks(configuration.rows)
    filled = sets / _places(configuration, work)
    further = math.ceil(filled) - 1
    # Under a causal mask blocks end at different times: the next ones start one by one, and few share to the end.
    uneven = 2 * (1 - work.seen)
    read_further = work.seen * ((1 - uneven) * further + uneven * max(0.0, filled - 1))
    sharing = _sharing(configuration, work)
    slower = 1.0
    if configuration.warps < _WHOLE_WARPS:
        alone, shared = (_SLOWER[configuration.head_dim, blocks] for blocks in (1, sharing))
        slower = (1 - work.seen) * alone + work.seen * shared
    keys_of_a_pass = KEY_TILE * configuration.key_tiles * configuration.warps
    exact = work.keys / (keys_of_a_pass * cluster)
    # In a pass that is not whole some warps have nothing to read, and the others are sooner done.
    block_keys = ((1 - _WHOLE) * exact + _WHOLE * math.ceil(exact)) * keys_of_a_pass
    reading = slower * (1 + read_further) * block_keys * 4 * configuration.head_dim / CACHED_RATE
    merge = _MERGE_US if cluster > 1 else 0.0
    together = _BESIDE_US if sharing > 1 else 0.0
    return _CALL_US + merge + together + _TURN_US * further + reading


def _warps(configuration: SmallConfiguration) -> int:
    """That share one set of rows."""
    return configuration.warps * configuration.cluster


def _blocks_of_a_multiprocessor(configuration: SmallConfiguration) -> int:
    """By registers. Of clusters of 16 two are counted at any head dim, as for decode."""
    if configuration.warps >= _WHOLE_WARPS:
        return 1
    return 3 if configuration.head_dim == 64 and configuration.cluster < LARGEST_CLUSTER else 2


def _places(configuration: SmallConfiguration, work: Work) -> int:
    at_once = CLUSTERS_AT_ONCE[_blocks_of_a_multiprocessor(configuration)][configuration.cluster]
    return max(1, at_once * work.multiprocessors // MULTIPROCESSORS)


def _sharing(configuration: SmallConfiguration, work: Work) -> int:
    """Blocks that most multiprocessors have at a time."""
    most = _blocks_of_a_multiprocessor(configuration)
    sets = work.row_slices.blocks(configuration.rows)
    if most == 1 or sets * MULTIPROCESSORS <= _ALONE[configuration.cluster] * work.multiprocessors:
        return 1
    return min(most, max(2, math.ceil(sets * configuration.cluster / work.multiprocessors)))

"""Among how many blocks the small-shape kernel shares the keys of a set of query rows, where registers cannot hold all.

Over a cluster, whose blocks meet in shared memory (from sm_90): it starts and ends sooner. Over the whole grid, which
meets in device memory: it keeps all multiprocessors busy. What takes less is estimated from a few figures of an H200
(docs/kernels/small.md).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from flashmoe_science.configs.attention.h200 import CLUSTERS_AT_ONCE, MULTIPROCESSORS
from flashmoe_science.configs.attention.small import (
    CLUSTERED,
    KEY_TILE,
    LARGEST_CLUSTER,
    MOST_ARRIVALS,
    SPLIT_CLUSTERS,
    SmallConfiguration,
    stream,
)
from flashmoe_science.configs.attention.small_passes import (
    CACHED_BYTES,
    CACHED_RATE,
    Work,
    fastest,
    measured,
    microseconds,
)

_CLUSTERS_AT_ONCE = {**CLUSTERS_AT_ONCE[1], 16: CLUSTERS_AT_ONCE[2][16]}
"""Of those of 16, with half the warps, two share a multiprocessor."""
_HALF_THE_WARPS = 1.7
"""Time of a block of 4 warps against one of 8 for the same keys, measured at head dim 128 in clusters of 16."""
_HALF_THE_WARPS_ALONE = 1.2
"""Of one that has a multiprocessor for itself."""
_WORTH = 1.1
"""A larger cluster is taken for more than this, as it costs a merge and leaves multiprocessors out."""
_WORTH_A_WORKSPACE = 1.02
"""Splits are taken for more than this."""
_WARPS_OF_A_MULTIPROCESSOR = 8
"""What has room there, by registers, of the kernels that go through the keys."""
_MOST_TURNS = 3
_LARGEST_OF_HALF_THE_WARPS = 2
"""Cluster of splits with so few warps; larger ones have not been measured."""

# Microseconds, and bytes per microsecond.
_CLUSTER_US = 2.5
"""A call in clusters without the reading: launch, first load, merge."""
_SPLIT_US = 3.1
"""One whose results meet in device memory."""
_EACH_SPLIT_US = 0.035
_CLUSTER_OF_SPLITS_US = {1: 0.0, 2: 0.2, 4: 0.6}
_ANOTHER_QUAD_US = 1.1
"""A warp combines its quads of the output (32 lanes x 4) one after another."""
_ANOTHER_ROW_TILE_US = 0.4
_ANOTHER_TURN_US = 3.0
"""Blocks that follow others start when those have ended."""
_MEMORY_RATE = 43_000
"""Of one multiprocessor."""
_ALL_MEMORY_RATE = 4_430_000
"""Of all of them."""


@dataclass(frozen=True)
class _Reading:
    """What a call reads, at least once from memory."""

    sets: int
    """Of query rows; each reads `set_bytes`."""
    set_bytes: int
    slices: int
    multiprocessors: int

    def us(self, turns: int, parts: int, slower: float) -> float:
        """Time if each set is read by `parts` blocks, of which a multiprocessor does `turns` one after another.

        Args:
            slower: than a block that has a multiprocessor for itself, and warps enough.
        """
        total = self.slices * self.set_bytes
        own = slower * turns * self.set_bytes / parts
        if total <= CACHED_BYTES:
            return own / CACHED_RATE
        together = _ALL_MEMORY_RATE * self.multiprocessors / MULTIPROCESSORS
        return max(own / _MEMORY_RATE, total / together)


def share_keys(architecture: str, head_dim: int, work: Work) -> SmallConfiguration:
    """The kernel for any number of keys that should be fastest. `architecture` without suffix."""
    passes = measured(architecture, head_dim, work)
    in_cluster = (fastest if passes else _in_cluster)(architecture, head_dim, work)
    sets = work.row_slices.blocks(in_cluster.rows)
    reading = _Reading(sets, 4 * head_dim * work.keys, work.row_slices.slices, work.multiprocessors)
    estimates = [(_split_us(one, reading), one) for one in _over_the_grid(architecture, head_dim, work)]
    if not estimates:
        return in_cluster
    least, over_the_grid = min(estimates, key=lambda estimate: estimate[0])
    within = _cluster_us(in_cluster, reading)
    if passes:  # Splits were only raced where they save something by both estimates.
        within = min(within, microseconds(in_cluster, work))
    if least * _WORTH_A_WORKSPACE < within:
        return over_the_grid
    return in_cluster


def _in_cluster(architecture: str, head_dim: int, work: Work) -> SmallConfiguration:
    """That of the least (times that the GPU must be filled) / (blocks that share the keys); each warp has a tile."""
    if architecture not in CLUSTERED:
        return stream(architecture, head_dim, work.row_slices.rows, 1)
    costed: list[tuple[float, SmallConfiguration]] = []
    for cluster in _CLUSTERS_AT_ONCE:
        configuration = stream(architecture, head_dim, work.row_slices.rows, cluster)
        turns = _turns(work.row_slices.blocks(configuration.rows), cluster, work.multiprocessors)
        if cluster == LARGEST_CLUSTER and turns > 1:
            continue  # in turns they lose: 24.0 us against 20.5 in threes, 32 heads of 4,096 keys
        slower = _HALF_THE_WARPS if cluster == LARGEST_CLUSTER else 1.0
        costed.append((slower * turns / cluster, configuration))
        if cluster * configuration.warps * KEY_TILE >= work.keys:
            break
    least = min(cost for cost, _ in costed)
    return next(configuration for cost, configuration in costed if cost <= _WORTH * least)


def _over_the_grid(architecture: str, head_dim: int, work: Work) -> Iterator[SmallConfiguration]:
    """Those with as many splits as the GPU has room for, once or in a few turns, while each warp has a tile of keys."""
    for cluster in SPLIT_CLUSTERS if architecture in CLUSTERED else (1,):
        one = stream(architecture, head_dim, work.row_slices.rows, cluster)
        sets = work.row_slices.blocks(one.rows)
        if sets * cluster * one.warps > MOST_ARRIVALS:
            continue
        if cluster > _LARGEST_OF_HALF_THE_WARPS and one.warps < _WARPS_OF_A_MULTIPROCESSOR:
            continue
        at_once = _at_once(cluster, work.multiprocessors) * _WARPS_OF_A_MULTIPROCESSOR // one.warps
        most = work.keys // (cluster * one.warps * KEY_TILE)
        for turns in range(1, _MOST_TURNS + 1):
            splits = min(turns * at_once // sets, most)
            if splits > 1:
                yield dataclasses.replace(one, splits=splits)


def _split_us(configuration: SmallConfiguration, reading: _Reading) -> float:
    cluster, splits = configuration.cluster, configuration.splits
    beside = _WARPS_OF_A_MULTIPROCESSOR // configuration.warps
    at_once = _at_once(cluster, reading.multiprocessors) * beside
    turns = math.ceil(reading.sets * splits / at_once)
    quads = math.ceil(configuration.quads / (cluster * configuration.warps))
    end = (
        _CLUSTER_OF_SPLITS_US[cluster]
        + _EACH_SPLIT_US * splits * quads
        + _ANOTHER_QUAD_US * (quads - 1)
        + _ANOTHER_ROW_TILE_US * (configuration.row_tiles - 1)
    )
    return _SPLIT_US + end + _ANOTHER_TURN_US * (turns - 1) + reading.us(turns, splits * cluster, beside)


def _cluster_us(configuration: SmallConfiguration, reading: _Reading) -> float:
    turns = _turns(reading.sets, configuration.cluster, reading.multiprocessors)
    slower = 1.0
    if configuration.cluster == LARGEST_CLUSTER:
        # Few of them read as fast as they can; many wait for each other's loads.
        busy = min(1.0, reading.sets * configuration.cluster / reading.multiprocessors)
        slower += (_HALF_THE_WARPS - 1) * busy
    elif configuration.warps < _WARPS_OF_A_MULTIPROCESSOR:
        slower = _HALF_THE_WARPS_ALONE
    return _CLUSTER_US + reading.us(turns, configuration.cluster, slower)


def _turns(sets: int, cluster: int, multiprocessors: int) -> int:
    return math.ceil(sets / _at_once(cluster, multiprocessors))


def _at_once(cluster: int, multiprocessors: int) -> int:
    return max(1, _CLUSTERS_AT_ONCE[cluster] * multiprocessors // MULTIPROCESSORS)

"""Among how many blocks the small-shape kernel shares the keys of a set of query rows, where registers cannot hold all.

Two ways: over a cluster, whose blocks meet in shared memory (from sm_90), and over the whole grid, whose blocks or
clusters meet in device memory. The first starts and ends sooner, the second keeps all multiprocessors busy whatever the
number of heads. What takes less is estimated from a few figures, measured on an H200 (docs/kernels/small.md); for other
architectures they stand by analogy.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from flashmoe_science.configs.small import (
    CLUSTERED,
    FEW_ROWS,
    KEY_TILE,
    LARGEST_CLUSTER,
    MOST_ARRIVALS,
    SPLIT_CLUSTERS,
    RowSlices,
    SmallConfiguration,
    beside,
    stream,
)

_CLUSTERS_AT_ONCE = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 8: 15, 16: 14}
"""Blocks of a cluster, and how many such clusters run at a time on the 132 multiprocessors of an H200: fewer than by
number, as a cluster must find room in one GPC. (Of those of 16, with half the warps, two share a multiprocessor.)"""
_BESIDE_AT_ONCE = {
    2: {1: 264, 2: 132, 3: 79, 4: 62, 5: 47, 6: 39, 8: 30, 16: 14},
    3: {1: 396, 2: 198, 4: 92},
}
"""The same where two or three blocks share a multiprocessor, as those of 4 warps do by their registers."""
_ALONE = {**_CLUSTERS_AT_ONCE, 3: 24, 16: 7}
"""So many have multiprocessors for themselves; of 3 blocks, some share theirs while others are free."""
_MULTIPROCESSORS = 132
_HALF_THE_WARPS = 1.7
"""Time of a block of 4 warps against one of 8 for the same keys, measured at head dim 128 in clusters of 16."""
_HALF_THE_WARPS_ALONE = 1.2
"""Of one that has a multiprocessor for itself."""
_WORTH = 1.1
"""A larger cluster is taken for more than this, as it costs a merge and leaves multiprocessors out."""
_WORTH_IN_US = 1.03
"""The same, of estimated times."""
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
_STARTED_US = 2.7
"""A call of more than 8 rows without the reading, and what clusters add."""
_MERGED_US = 0.3
_BESIDE_US = 0.5
"""What blocks that share a multiprocessor take longer to begin and to end."""
_TURN_US = 2.2
"""Clusters that follow others start when those have ended."""
_SLOWER = {
    (64, 1): 1.6,
    (64, 2): 2.45,
    (64, 3): 2.75,
    (128, 1): 1.12,
    (128, 2): 1.55,
    (256, 1): 1.0,
    (256, 2): 1.4,
}
"""Time of a pass of 4 warps over that at a multiprocessor's rate, by head dim and blocks there."""
_ANOTHER_QUAD_US = 1.1
"""A warp combines its quads of the output (32 lanes x 4) one after another."""
_ANOTHER_ROW_TILE_US = 0.4
_ANOTHER_TURN_US = 3.0
"""Blocks that follow others start when those have ended."""
_CACHED_BYTES = 50_000_000
"""So much is read from L2 when calls follow each other; more from memory."""
_CACHED_RATE = 48_000
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

    def us(self, turns: float, parts: int, slower: float) -> float:
        """Time if each set is read by `parts` blocks, of which a multiprocessor does `turns` one after another.

        Args:
            slower: than a block that has a multiprocessor for itself, and warps enough.
        """
        total = self.slices * self.set_bytes
        own = slower * turns * self.set_bytes / parts
        if total <= _CACHED_BYTES:
            return own / _CACHED_RATE
        together = _ALL_MEMORY_RATE * self.multiprocessors / _MULTIPROCESSORS
        return max(own / _MEMORY_RATE, total / together)


def share_keys(
    architecture: str,
    head_dim: int,
    keys: int,
    row_slices: RowSlices,
    multiprocessors: int,
    seen: float = 1.0,
) -> SmallConfiguration:
    """The kernel for any number of keys that should be fastest. `architecture` without suffix."""
    read = 4 * head_dim * keys * row_slices.slices
    few = row_slices.rows <= FEW_ROWS or architecture not in CLUSTERED or read > _CACHED_BYTES
    if few:
        in_cluster = _in_cluster(architecture, head_dim, keys, row_slices, multiprocessors)
    else:
        in_cluster = _in_time(architecture, head_dim, keys, row_slices, multiprocessors, seen)
    reading = _Reading(
        row_slices.blocks(in_cluster.rows), 4 * head_dim * keys, row_slices.slices, multiprocessors
    )
    estimates = [
        (_split_us(one, reading), one)
        for one in _over_the_grid(architecture, head_dim, keys, row_slices, multiprocessors)
    ]
    if not estimates:
        return in_cluster
    least, over_the_grid = min(estimates, key=lambda estimate: estimate[0])
    within = _cluster_us(in_cluster, reading)
    if not few:
        within = min(within, passes_us(in_cluster, keys, row_slices, multiprocessors, seen))
    if least * _WORTH_A_WORKSPACE < within:
        return over_the_grid
    return in_cluster


def _in_cluster(
    architecture: str, head_dim: int, keys: int, row_slices: RowSlices, multiprocessors: int
) -> SmallConfiguration:
    """That of the least (times that the GPU must be filled) / (blocks that share the keys); each warp has a tile."""
    if architecture not in CLUSTERED:
        return stream(architecture, head_dim, row_slices.rows, 1)
    found: list[tuple[float, SmallConfiguration]] = []
    for cluster in _CLUSTERS_AT_ONCE:
        configuration = stream(architecture, head_dim, row_slices.rows, cluster)
        turns = _turns(row_slices.blocks(configuration.rows), cluster, multiprocessors)
        if cluster == LARGEST_CLUSTER and turns > 1:
            continue  # in turns they lose: 24.0 us against 20.5 in threes, 32 heads of 4,096 keys
        slower = _HALF_THE_WARPS if cluster == LARGEST_CLUSTER else 1.0
        found.append((slower * turns / cluster, configuration))
        if cluster * configuration.warps * KEY_TILE >= keys:
            break
    least = min(cost for cost, _ in found)
    return next(configuration for cost, configuration in found if cost <= _WORTH * least)


def _in_time(
    architecture: str,
    head_dim: int,
    keys: int,
    row_slices: RowSlices,
    multiprocessors: int,
    seen: float,
) -> SmallConfiguration:
    """That of the least estimated time; each warp has a tile, but in the first."""
    candidates = [stream(architecture, head_dim, row_slices.rows, cluster) for cluster in _CLUSTERS_AT_ONCE]
    candidates += beside(architecture, head_dim, row_slices.rows)
    found: list[tuple[float, SmallConfiguration]] = []
    for one in sorted(candidates, key=lambda one: one.cluster * one.warps):
        sets = row_slices.blocks(one.rows)
        if found and one.cluster * one.warps * KEY_TILE >= 2 * keys:
            break
        if one.cluster == LARGEST_CLUSTER and sets > _places(one, multiprocessors):
            continue
        found.append((passes_us(one, keys, row_slices, multiprocessors, seen), one))
    least = min(us for us, _ in found)
    return next(one for us, one in found if us <= _WORTH_IN_US * least)


def passes_us(
    configuration: SmallConfiguration,
    keys: int,
    row_slices: RowSlices,
    multiprocessors: int,
    seen: float,
) -> float:
    """Estimated time of a call of more than 8 rows without splits.

    Its blocks go through the keys in passes, all that find a place at once, then the next.
    """
    sets = row_slices.blocks(configuration.rows)
    fill = sets / _places(configuration, multiprocessors)
    turns = math.ceil(fill)
    # Under a causal mask blocks end at different times: the next ones start one by one, and less share to the end.
    uneven = 2 * (1 - seen)
    further = (1 - uneven) * (turns - 1) + uneven * max(0.0, fill - 1)
    alone = sets * _MULTIPROCESSORS <= _ALONE[configuration.cluster] * multiprocessors
    sharing = (
        1
        if alone
        else min(_blocks_beside(configuration), math.ceil(sets * configuration.cluster / multiprocessors))
    )
    if not alone and _blocks_beside(configuration) > 1:
        sharing = max(2, sharing)
    slower = 1.0
    if configuration.warps < _WARPS_OF_A_MULTIPROCESSOR:
        size = configuration.head_dim
        slower = (1 - seen) * _SLOWER[size, 1] + seen * _SLOWER[size, sharing]
    own_tiles = configuration.warps * configuration.key_tiles
    passes = math.ceil(keys / (KEY_TILE * own_tiles * configuration.cluster))
    read = passes * KEY_TILE * own_tiles * 4 * configuration.head_dim * configuration.cluster
    reading = _Reading(sets, read, row_slices.slices, multiprocessors)
    return (
        _STARTED_US
        + (_MERGED_US if configuration.cluster > 1 else 0.0)
        + (_BESIDE_US if sharing > 1 else 0.0)
        + _TURN_US * (turns - 1)
        + reading.us(1 + seen * further, configuration.cluster, slower)
    )


def _blocks_beside(configuration: SmallConfiguration) -> int:
    """Blocks of one multiprocessor, by registers."""
    if configuration.warps == _WARPS_OF_A_MULTIPROCESSOR:
        return 1
    return 3 if configuration.head_dim == 64 and configuration.cluster < LARGEST_CLUSTER else 2


def _places(configuration: SmallConfiguration, multiprocessors: int) -> int:
    blocks = _blocks_beside(configuration)
    at_once = (_CLUSTERS_AT_ONCE if blocks == 1 else _BESIDE_AT_ONCE[blocks])[configuration.cluster]
    return max(1, at_once * multiprocessors // _MULTIPROCESSORS)


def _over_the_grid(
    architecture: str, head_dim: int, keys: int, row_slices: RowSlices, multiprocessors: int
) -> Iterator[SmallConfiguration]:
    """Those with as many splits as the GPU has room for, once or in a few turns, while each warp has a tile of keys."""
    for cluster in SPLIT_CLUSTERS if architecture in CLUSTERED else (1,):
        one = stream(architecture, head_dim, row_slices.rows, cluster)
        sets = row_slices.blocks(one.rows)
        if sets * cluster * one.warps > MOST_ARRIVALS:
            continue
        if cluster > _LARGEST_OF_HALF_THE_WARPS and one.warps < _WARPS_OF_A_MULTIPROCESSOR:
            continue
        at_once = _at_once(cluster, multiprocessors) * _WARPS_OF_A_MULTIPROCESSOR // one.warps
        most = keys // (cluster * one.warps * KEY_TILE)
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
    return max(1, _CLUSTERS_AT_ONCE[cluster] * multiprocessors // _MULTIPROCESSORS)

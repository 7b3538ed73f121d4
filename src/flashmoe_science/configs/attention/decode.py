"""Shapes of the decode kernel (`kernels/cuda/attention_decode.cu`): data, and what they take.

A block goes through `warps * key_tiles` tiles of 16 keys at a time. Eight warps have 64 KB of keys and values under
way, more than a multiprocessor of an H200 needs to read as fast as its memory gives. By analogy elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

from flashmoe_science.configs.attention.small import CLUSTERED
from flashmoe_science.jit.limits import limits

KEY_TILE = 16
MOST_DIM = 256
_ROW_TILES = (1, 2, 4)
_DIM_PER_ROWS = {1: 256, 2: 128, 4: 128}
"""The largest dim at which registers hold the output of so many tiles of rows."""
_DIM_PER_ROWS_WITH_MORE = 64
"""For four tiles of rows whose scores have a cap or slopes, or whose keys are looked up one by one."""
_WARPS = (8, 4)
_MORE_WARPS = 12
"""Of a block over FP8 at dims of 65 to 128 with two tiles of rows, where a warp has one tile of keys."""
MOST_QUADS = max(4 * tiles * -(-dim // 64) for tiles, dim in _DIM_PER_ROWS.items())
"""That any configuration has: see `DecodeConfiguration.quads`."""
_CLUSTERS = (8, 4)
"""Blocks of a cluster where there are so many for each set of rows. Not all multiprocessors have room for one."""
SHORT = 2048
"""Keys up to which it pays that a cluster has a set of rows, though multiprocessors are left out: 1.3 times as fast at
1,024 keys of one sequence, 0.95 at 8,192.
"""
FEW = 128
"""Keys of which one block has enough: 8 tiles are read at once, and a cluster takes 0.6 us longer."""
_NONE = -1
_ONE_PASS = 512
"""Keys of which the warps of a block that copies ahead have but a pass or two: it was slower."""
_QUEUES = {
    (False, 64, 1): ((SHORT, 8, 1, 3), (_NONE, 8, 1, 3), (_ONE_PASS, 8, 1, 3)),
    (False, 64, 2): ((SHORT, 8, 1, 3), (SHORT, 8, 2, 2), (_ONE_PASS, 8, 2, 2)),
    (False, 128, 1): ((SHORT, 8, 1, 2), (_ONE_PASS, 8, 1, 2), (_ONE_PASS, 8, 1, 2)),
    (False, 128, 2): ((SHORT, 8, 1, 2), (_ONE_PASS, 8, 1, 2), (_ONE_PASS, 8, 1, 2)),
    (True, 128, 1): ((SHORT, 8, 1, 3), (SHORT, 8, 1, 3), (_ONE_PASS, 16, 1, 2)),
    (True, 128, 2): ((SHORT, 8, 2, 2), (_ONE_PASS, 8, 2, 2), (_ONE_PASS, 8, 2, 2)),
    (True, 128, 4): (None, (SHORT, 8, 1, 2), (_ONE_PASS, 8, 1, 2)),
    (True, 256, 1): ((SHORT, 8, 1, 2), (_ONE_PASS, 8, 1, 2), (_NONE, 8, 1, 2)),
}
"""Where keys and values come by way of shared memory. By whether they are FP8, both dims, and tiles of rows: for sets
of rows up to a quarter of the multiprocessors, up to half, and more. Keys from beyond which that is faster; warps,
tiles of keys, and passes. Timed on an H200: docs/kernels/notebooks/decode.md.
"""
_LENGTHS = tuple(
    range(first, last + 1)
    for first, last in ((0, FEW), (FEW + 1, _ONE_PASS), (_ONE_PASS + 1, SHORT), (SHORT + 1, (1 << 31) - 1))
)
_TEAMS = (4, 2)
"""Blocks of a team: with 4, 1.4 to 3 % less time for 0.5 GB of keys and more, and as much with 8 or for fewer keys."""
MOST_ARRIVALS = 1 << 13
"""Counters that one launch may have: two for each warp of each block of the grid."""


class Pages(IntEnum):
    """How keys are found."""

    PACKED = 0
    """Those of a sequence lie one after another."""
    TILES = 1
    """The 16 of a tile do, in one page: a page is a multiple of 16."""
    ROWS = 2
    """Each key is looked up: any page size."""

    @classmethod
    def of(cls, page_size: int) -> Pages:
        """For tokens of a page; 0: packed."""
        if page_size == 0:
            return cls.PACKED
        return cls.ROWS if page_size % KEY_TILE else cls.TILES


class Cache(IntEnum):
    """What elements of keys and values are."""

    PLAIN = 0
    """The query's type."""
    SCALED_HEADS = 1
    """e4m3, with one scale for each key/value head, or for all."""
    SCALED_KEYS = 2
    """e4m3, with one for each key and head."""


@dataclass(frozen=True)
class DecodeConfiguration:
    """One kernel. See `kernels/cuda/attention_decode.cu` for what the fields do there."""

    head_dim: int
    value_dim: int
    row_tiles: int
    """Query rows of a set / 8."""
    warps: int
    key_tiles: int
    """Tiles of 16 keys that a warp holds at a time."""
    pages: Pages
    score_changes: bool
    """Scores may have a soft cap or slopes."""
    dependent: bool
    """Starts while the kernel before it in the stream ends (sm_90 and later)."""
    mma_k: int = 16
    cache: Cache = Cache.PLAIN
    chunk: bool = False
    """A query sees keys of its own chunk alone."""
    hidden_tiles: bool = False
    """Parts of the keys begin where they are cut, with tiles that a window or a chunk hides: with `Pages.TILES`."""
    tree: bool = False
    """Queries of a sequence are a tree."""
    pairs: bool = False
    """e4m3 is read 16 codes at a time: rows begin at multiples of 16 bytes."""
    queue: int = 0
    """Passes of a warp that shared memory has room for; 0: what it multiplies comes to registers."""
    cluster: int = 1
    """Blocks that may share a set of rows through their shared memory (sm_90 and later)."""
    only: int = 0
    """The `varlen.problem.Only` of its calls."""

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def rows(self) -> int:
        return 8 * self.row_tiles

    @property
    def quads(self) -> int:
        """Groups of 4 values in each of 32 lanes that the output of one set of rows has."""
        return 4 * self.row_tiles * -(-self.value_dim // 64)

    @property
    def late_values(self) -> bool:
        """Values wait for the registers that keys leave; with many rows only on Hopper, as on sm_80 that spills."""
        if self.queue:
            return False
        dim = max(self.head_dim, self.value_dim)
        many_rows = self.dependent and self.row_tiles * dim > 256
        return many_rows or (dim > 128 and (self.pages is Pages.ROWS or self.score_changes))

    @property
    def multiplies_half(self) -> bool:
        """Elements of FP8 are float16 when they are multiplied, whatever the query's type; with four tiles of rows and
        a scale for each key that spills.
        """
        return self.cache is Cache.SCALED_HEADS or (self.cache is Cache.SCALED_KEYS and self.row_tiles < 4)

    @property
    def shared_bytes(self) -> int:
        """Dynamic: queries of two sets, and what the warps of a block leave each other."""
        queries = 2 * self.row_tiles * -(-self.head_dim // 32) * 32 * 16
        results = self.warps * self.quads
        merges = 2 if self.value_dim <= 128 and results <= 64 else 1
        tiles = self.warps * self.key_tiles * self.queue
        row = (1 if self.cache else 2) * (self.head_dim + self.value_dim)
        return queries + merges * results * 32 * 16 + tiles * KEY_TILE * row

    @property
    def gathered_bytes(self) -> int:
        """Static: what the blocks of a cluster send each other."""
        if self.cluster == 1:
            return 0
        return self.cluster * (-(-self.quads // self.cluster) * 32 * 16 + 8 * self.rows) + 8

    @property
    def label(self) -> str:
        dims = f"{self.head_dim}" if self.head_dim == self.value_dim else f"{self.head_dim}/{self.value_dim}"
        return (
            f"head_dim {dims}, {self.rows} rows, {self.warps} warps, keys {self.pages.name.lower()}"
            + (f", {self.cache.name.lower()}" if self.cache else "")
            + (", chunks" if self.chunk else "")
            + (", trees" if self.tree else "")
            + ("", ", sequences of one token", ", longer sequences")[self.only]
            + (f", {self.key_tiles} x {self.queue} tiles copied ahead" if self.queue else "")
            + (f", clusters of {self.cluster}" if self.cluster > 1 else "")
        )


def lengths_like(max_seqlen_k: int) -> range:
    """The bounds on keys with which calls that are otherwise alike have the same configuration."""
    return next((lengths for lengths in _LENGTHS if max_seqlen_k in lengths), _LENGTHS[-1])


def cluster_for(architecture: str, sets: int, most_keys: int, multiprocessors: int) -> int:
    """Blocks of a cluster.

    Args:
        sets: of rows with keys that they share, in the call.
        most_keys: that rows of a sequence see.
    """
    if architecture not in CLUSTERED or 2 * sets > multiprocessors:
        return 1
    if 4 * sets > multiprocessors:
        return 2
    if not FEW < most_keys <= SHORT:
        return 1
    return next((cluster for cluster in _CLUSTERS if sets * cluster <= multiprocessors), 2)


def queued(
    configuration: DecodeConfiguration, architecture: str, sets: int, most_keys: int, multiprocessors: int
) -> DecodeConfiguration:
    """As it is where keys and values come by way of shared memory, if that is faster. Others: see `cluster_for`."""
    has_chunks = configuration.cache is Cache.PLAIN or (
        configuration.cache is Cache.SCALED_HEADS and configuration.pairs
    )
    is_fit = has_chunks and configuration.dependent and configuration.pages is not Pages.ROWS
    dim = configuration.head_dim
    if not is_fit or dim != configuration.value_dim:
        return configuration
    kinds = _QUEUES.get((configuration.cache is not Cache.PLAIN, dim, configuration.row_tiles))
    chosen = kinds and kinds[(4 * sets > multiprocessors) + (2 * sets > multiprocessors)]
    if not chosen or most_keys <= chosen[0]:
        return configuration
    _, warps, key_tiles, queue = chosen
    other = replace(configuration, warps=warps, key_tiles=key_tiles, queue=queue)
    return other if _fits(other, architecture) else configuration


def _fits(configuration: DecodeConfiguration, architecture: str) -> bool:
    shared = configuration.shared_bytes + configuration.gathered_bytes
    # Beside it a few kilobytes of static shared memory.
    return shared + 4096 <= limits(architecture).shared_per_block


def clustered(configuration: DecodeConfiguration, architecture: str, cluster: int) -> DecodeConfiguration:
    """As it is in clusters of so many blocks, if it may be and has room for what these send each other."""
    other = replace(configuration, cluster=cluster)
    return other if may_cluster(configuration) and _fits(other, architecture) else configuration


def may_cluster(configuration: DecodeConfiguration) -> bool:
    """Whether its kernel for clusters keeps what it has in registers."""
    of_trees = configuration.tree and configuration.row_tiles == 4
    return not of_trees and (configuration.cache is not Cache.SCALED_HEADS or configuration.pairs)


def team_for(kv_heads: int, multiprocessors: int) -> int:
    """Blocks that go through the same keys side by side, each for its part of the key/value heads."""
    return next((team for team in _TEAMS if kv_heads % team == 0 and multiprocessors % team == 0), 1)


def most_rows(dim: int, pages: Pages, score_changes: bool) -> int:
    """Packed query rows that go through the keys together; with more, each set of so many reads all keys."""
    return 8 * _row_tiles(dim, pages, score_changes)[-1]


def _row_tiles(dim: int, pages: Pages, score_changes: bool) -> list[int]:
    fitting = [tiles for tiles in _ROW_TILES if dim <= _DIM_PER_ROWS[tiles]]
    if (score_changes or pages is Pages.ROWS) and dim > _DIM_PER_ROWS_WITH_MORE:
        return fitting[:2]
    return fitting


def _key_tiles(dim: int, row_tiles: int, cache: Cache, pairs: bool) -> int:
    """e4m3 takes half of the registers, so more loads are under way."""
    if cache and row_tiles == 1:
        return 4 if dim <= 64 else 2 if dim <= 128 and (pairs or cache is not Cache.SCALED_HEADS) else 1
    return 2 if dim <= 64 and row_tiles <= 2 else 1


def _warps(dim: int, row_tiles: int, cache: Cache) -> tuple[int, ...]:
    """By preference; the first that fits is taken."""
    return (
        (_MORE_WARPS, *_WARPS)
        if cache is Cache.SCALED_HEADS and row_tiles == 2 and 64 < dim <= 128
        else _WARPS
    )


def configuration(
    architecture: str,
    head_dim: int,
    value_dim: int,
    rows: int,
    pages: Pages,
    score_changes: bool,
    cache: Cache = Cache.PLAIN,
    *,
    pairs: bool = False,
) -> DecodeConfiguration:
    """The kernel for so many packed rows (query tokens x heads that share keys). `architecture` without suffix."""
    dim = max(head_dim, value_dim)
    fitting = _row_tiles(dim, pages, score_changes)
    row_tiles = next((tiles for tiles in fitting if 8 * tiles >= rows), fitting[-1])
    candidates = (
        DecodeConfiguration(
            head_dim=head_dim,
            value_dim=value_dim,
            row_tiles=tiles,
            warps=warps,
            key_tiles=_key_tiles(dim, tiles, cache, pairs),
            pages=pages,
            score_changes=score_changes,
            dependent=architecture in CLUSTERED,
            mma_k=8 if architecture == "sm_75" else 16,
            cache=cache,
            pairs=pairs,
        )
        for tiles in reversed([tiles for tiles in fitting if tiles <= row_tiles])
        for warps in _warps(dim, tiles, cache)
    )
    return next(candidate for candidate in candidates if _fits(candidate, architecture))

"""Tiles of the portable kernels of attention backward, per architecture and head dimension: data.

A warp owns 32 rows or keys where its accumulators leave room, so that each fragment it reads serves twice as many
products. The pass over keys holds two accumulators: above head_dim 64 they leave room for 16 keys, or two warps hold
one each (`KeyValueTile.roles`). All were measured on sm_90 alone (docs/kernels/backward-portable.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from flashmoe_science.configs.ablation import Ablation

HEAD_DIMS = (32, 64, 96, 128, 192, 256)
"""Head dimensions that are compiled; a tensor's is padded, in shared memory, to the next of these."""
STATISTICS_THREADS = 128
_STAGES = 2
_MOST_CHUNK = 32
"""Keys whose scores are held at a time, with a window and a cap."""
_Ints = tuple[int, ...]


def _row_bytes(head_dim: int) -> int:
    return (head_dim + 31) // 32 * 64


@dataclass(frozen=True)
class ScoreFeatures:
    """What a kernel is compiled for. What it is not compiled for costs nothing."""

    window: bool = False
    """Rows see keys from one on, too."""
    softcap: bool = False

    @property
    def macros(self) -> dict[str, int]:
        return {name.upper(): 1 for name, has in vars(self).items() if has}


PLAIN = ScoreFeatures()


@dataclass(frozen=True)
class QueryTile:
    """The pass over queries. `attention_backward_query.cu` says what fields do."""

    head_dim: int
    """Compiled head dimension, a multiple of 16."""
    block_m: int
    """Query rows per block."""
    block_n: int
    """Keys per step."""
    chunk: int
    """Keys whose scores are held at a time."""
    warps: int
    register_steps: int = field(default=0, kw_only=True)
    """How many 16-wide slices of the query and of the output's gradient stay in registers."""
    mma_k: int = field(default=16, kw_only=True)
    """8 on sm_75, which has no asynchronous copies, either."""
    features: ScoreFeatures = field(default=PLAIN, kw_only=True)
    ablation: Ablation = field(default=Ablation.NONE, kw_only=True)

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def shared_bytes(self) -> int:
        rows = 2 * self.block_m + 2 * _STAGES * self.block_n
        return rows * _row_bytes(self.head_dim) + 8 * self.block_m

    @property
    def macros(self) -> dict[str, int]:
        return {
            "HEAD_DIM": self.head_dim,
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "CHUNK": self.chunk,
            "WARPS": self.warps,
            "REGISTER_STEPS": self.register_steps,
            "NATIVE_CP_ASYNC": int(self.mma_k == 16),
            "MMA_K": self.mma_k,
            **self.features.macros,
            **self.ablation.macros,
        }


@dataclass(frozen=True)
class KeyValueTile:
    """The pass over keys. `attention_backward_key_value.cu` says what fields do."""

    head_dim: int
    """Compiled head dimension, a multiple of 16."""
    block_n: int
    """Keys per block."""
    block_m: int
    """Query rows per step."""
    chunk: int
    """Query rows whose scores are held at a time."""
    warps: int
    roles: int = 1
    """2: one warp makes the gradient of the values, another that of the same keys."""
    queries: bool = field(default=False, kw_only=True)
    """The gradient of queries, too, so that there is no pass over queries."""
    mma_k: int = field(default=16, kw_only=True)
    """8 on sm_75, which has no asynchronous copies, either."""
    features: ScoreFeatures = field(default=PLAIN, kw_only=True)
    ablation: Ablation = field(default=Ablation.NONE, kw_only=True)

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def shared_bytes(self) -> int:
        rows = 2 * self.block_n + 2 * _STAGES * self.block_m
        statistics = 2 * _STAGES * self.block_m * 4
        groups, chunks = self.warps // self.roles, self.block_m // self.chunk
        exchange = groups * chunks * (self.block_n // groups * self.chunk * 4 + 16) if self.roles == 2 else 0
        of_queries = 2 * self.block_n * _row_bytes(self.block_m) + 64 if self.queries else 0
        return rows * _row_bytes(self.head_dim) + statistics + exchange + 16 + of_queries

    @property
    def macros(self) -> dict[str, int]:
        return {
            "HEAD_DIM": self.head_dim,
            "BLOCK_N": self.block_n,
            "BLOCK_M": self.block_m,
            "CHUNK": self.chunk,
            "WARPS": self.warps,
            "ROLES": self.roles,
            "QUERIES": int(self.queries),
            "NATIVE_CP_ASYNC": int(self.mma_k == 16),
            "MMA_K": self.mma_k,
            **self.features.macros,
            **self.ablation.macros,
        }


@dataclass(frozen=True)
class PortableBackward:
    """How the passes are configured for one call."""

    query: QueryTile
    key_value: KeyValueTile
    single: KeyValueTile | None = None
    """Of the pass that makes the query's gradient, too, if it and another are asked for."""
    least_keys: int = 0
    """With which that pass was faster."""

    def with_features(self, features: ScoreFeatures) -> PortableBackward:
        """The two passes: one pass takes none. With both, operands in registers and long chunks spill on sm_100."""
        query = replace(self.query, features=features)
        if features.window and features.softcap:
            query = replace(query, register_steps=0, chunk=min(query.chunk, _MOST_CHUNK))
        return PortableBackward(query, replace(self.key_value, features=features))

    def with_ablation(self, ablation: Ablation) -> PortableBackward:
        return replace(
            self,
            query=replace(self.query, ablation=ablation),
            key_value=replace(self.key_value, ablation=ablation),
            single=None if self.single is None else replace(self.single, ablation=ablation),
        )

    @property
    def key_tiles(self) -> tuple[KeyValueTile, ...]:
        return (self.key_value,) if self.single is None else (self.key_value, self.single)

    @property
    def label(self) -> str:
        query, keys = self.query, self.key_tiles[-1]
        of_query = f"queries {query.block_m}x{query.block_n} with {query.warps} warps, "
        return (
            f"head_dim {query.head_dim}, {'' if keys.queries else of_query}"
            f"keys {keys.block_n}x{keys.block_m} with {keys.warps} warps"
            f"{' in two roles' if keys.roles == 2 else ''}{', one pass' if keys.queries else ''}"
        )


def _tiles(
    head_dim: int,
    query: _Ints,
    keys: _Ints,
    single: _Ints | None = None,
    least_keys: int = 0,
    *,
    mma_k: int = 16,
) -> PortableBackward:
    """Each as far as the fields of its tile are given in order; of the query's the last is 1 for operands in registers.

    ``single`` None: it was not faster, or does not fit.
    """
    return PortableBackward(
        QueryTile(head_dim, *query[:-1], register_steps=query[-1] * head_dim // 16, mma_k=mma_k),
        KeyValueTile(head_dim, *keys, mma_k=mma_k),
        None if single is None else KeyValueTile(head_dim, *single, mma_k=mma_k, queries=True),
        least_keys,
    )


def _table(*tiles: PortableBackward) -> dict[int, PortableBackward]:
    return {each.query.head_dim: each for each in tiles}


_SM_90 = _table(
    _tiles(32, (64, 64, 32, 2, 1), (64, 64, 64, 4), (128, 64, 32, 4)),
    _tiles(64, (64, 64, 32, 2, 1), (64, 64, 32, 2), (128, 64, 16, 4), 768),
    _tiles(96, (64, 64, 32, 2, 0), (64, 64, 32, 4)),
    _tiles(128, (64, 64, 64, 4, 1), (64, 64, 32, 4), (128, 64, 32, 8, 2)),
    _tiles(192, (64, 32, 32, 4, 0), (64, 32, 32, 8, 2)),
    _tiles(256, (128, 32, 32, 8, 0), (32, 32, 32, 4, 2), (64, 32, 32, 8, 2), 2048),
)
_SM_80 = _SM_90 | _table(
    _tiles(64, (64, 64, 32, 2, 1), (64, 64, 32, 2)),
    _tiles(128, (64, 32, 32, 4, 1), (64, 64, 32, 4), (128, 32, 32, 8, 2), 2048),
    _tiles(256, (64, 32, 32, 4, 0), (32, 32, 32, 4, 2), (64, 32, 32, 8, 2), 2048),
)
_SM_86 = _SM_90 | _table(  # 99 KB
    _tiles(128, (64, 32, 32, 4, 1), (64, 32, 32, 4), (64, 32, 32, 4, 2), 2048),
    _tiles(192, (64, 32, 32, 4, 0), (32, 32, 32, 4, 2)),
    _tiles(256, (64, 16, 16, 4, 0), (32, 16, 16, 4, 2)),
)
_SM_120 = _SM_86 | _table(  # the same, but the compiler needs more registers
    _tiles(128, (64, 32, 32, 4, 1), (64, 32, 32, 4), (64, 32, 16, 4, 2), 2048),
)
_SM_75 = _table(  # 64 KB, no cp.async
    _tiles(32, (64, 32, 32, 4, 0), (64, 32, 32, 4), mma_k=8),
    _tiles(64, (64, 32, 32, 4, 0), (64, 32, 32, 4), mma_k=8),
    _tiles(96, (64, 32, 16, 4, 0), (64, 16, 16, 4), mma_k=8),
    _tiles(128, (32, 32, 16, 2, 0), (64, 16, 16, 4), mma_k=8),
    _tiles(192, (32, 16, 16, 2, 0), (32, 16, 16, 4, 2), mma_k=8),
    _tiles(256, (16, 16, 16, 1, 0), (16, 16, 16, 2, 2), mma_k=8),
)
_TABLES = {
    "sm_75": _SM_75,
    "sm_80": _SM_80,
    "sm_86": _SM_86,
    "sm_87": _SM_80,
    "sm_89": _SM_86,
    "sm_90": _SM_90,
    "sm_100": _SM_90,
    "sm_103": _SM_90,
    "sm_120": _SM_120,
    "sm_121": _SM_120,
}


def tuned_architectures() -> tuple[str, ...]:
    return tuple(_TABLES)


def compiled_head_dim(head_dim: int) -> int:
    """The smallest compiled head dimension that holds this one (at most 256)."""
    return next(size for size in HEAD_DIMS if size >= head_dim)


def configuration(architecture: str, head_dim: int) -> PortableBackward:
    """`architecture` without suffix; KeyError if not in the table."""
    return _TABLES[architecture][compiled_head_dim(head_dim)]


def all_configurations(architecture: str) -> tuple[PortableBackward, ...]:
    """Everything that `configuration` can return on an architecture."""
    return tuple(_TABLES[architecture].values())

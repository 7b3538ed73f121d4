"""Tiles of the portable kernels of attention backward, per architecture and head dimension: data.

A warp owns 32 rows or keys where its accumulators leave room, so that each fragment it reads serves twice as many
products. The pass over keys holds two accumulators: above head_dim 64 they leave room for 16 keys, or two warps hold
one each (`KeyValueTile.roles`). All were measured on sm_90 alone (docs/kernels/backward-portable.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from flashmoe_science.configs.ablation import Ablation

HEAD_DIMS = (32, 64, 96, 128, 192, 256)
"""Head dimensions that are compiled; a tensor's is padded, in shared memory, to the next of these."""
STATISTICS_THREADS = 128
_STAGES_OF_KEYS = 2


def _row_bytes(head_dim: int) -> int:
    return (head_dim + 31) // 32 * 64


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
    register_steps: int = 0
    """How many 16-wide slices of the query and of the output's gradient stay in registers."""
    min_blocks: int = 0
    """Blocks per multiprocessor that the compiler must leave registers for; 0 leaves it to the compiler."""
    cp_async: bool = True
    mma_k: int = 16
    ablation: Ablation = Ablation.NONE

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def shared_bytes(self) -> int:
        rows = 2 * self.block_m + 2 * _STAGES_OF_KEYS * self.block_n
        return rows * _row_bytes(self.head_dim) + 8 * self.block_m

    @property
    def macros(self) -> dict[str, int]:
        return {
            "HEAD_DIM": self.head_dim,
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "CHUNK": self.chunk,
            "WARPS": self.warps,
            "MIN_BLOCKS": self.min_blocks,
            "REGISTER_STEPS": self.register_steps,
            "NATIVE_CP_ASYNC": int(self.cp_async),
            "MMA_K": self.mma_k,
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
    roles: int
    """2: one warp makes the gradient of the values, another that of the same keys."""
    stages: int = 2
    """Of query rows."""
    register_steps: int = 0
    """How many 16-wide slices of keys and values stay in registers."""
    min_blocks: int = 0
    """Blocks per multiprocessor that the compiler must leave registers for; 0 leaves it to the compiler."""
    queries: bool = False
    """The gradient of queries, too, so that there is no pass over queries."""
    cp_async: bool = True
    mma_k: int = 16
    ablation: Ablation = Ablation.NONE

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def shared_bytes(self) -> int:
        rows = 2 * self.block_n + 2 * self.stages * self.block_m
        statistics = 2 * self.stages * self.block_m * 4
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
            "STAGES": self.stages,
            "QUERIES": int(self.queries),
            "MIN_BLOCKS": self.min_blocks,
            "REGISTER_STEPS": self.register_steps,
            "NATIVE_CP_ASYNC": int(self.cp_async),
            "MMA_K": self.mma_k,
            **self.ablation.macros,
        }


@dataclass(frozen=True)
class PortableBackward:
    """How the passes are configured for one call."""

    query: QueryTile
    key_value: KeyValueTile
    single: KeyValueTile | None = None
    """Of the pass that makes all three gradients, where it is taken if all are asked for."""

    @property
    def label(self) -> str:
        query, keys = self.query, self.key_value
        if self.single is not None:
            one = self.single
            roles = " in two roles" if one.roles == 2 else ""
            return f"head_dim {one.head_dim}, keys {one.block_n}x{one.block_m} with {one.warps} warps{roles}, one pass"
        return (
            f"head_dim {query.head_dim}, queries {query.block_m}x{query.block_n} with {query.warps} warps, "
            f"keys {keys.block_n}x{keys.block_m} with {keys.warps} warps"
            f"{' in two roles' if keys.roles == 2 else ''}"
        )


@dataclass(frozen=True)
class _Query:
    block_m: int
    block_n: int
    chunk: int
    warps: int
    in_registers: bool = False


@dataclass(frozen=True)
class _KeyValue:
    block_n: int
    block_m: int
    chunk: int
    warps: int
    roles: int = 1
    in_registers: bool = False


@dataclass(frozen=True)
class _Tiles:
    """Of one compiled head dimension."""

    query: _Query
    key_value: _KeyValue
    single: _KeyValue | None = None
    """Of the pass that makes all three gradients; None: it was not faster, or does not fit."""


_Table = dict[int, _Tiles]  # by compiled head dimension

_SM_90: _Table = {
    32: _Tiles(_Query(64, 64, 32, 2, True), _KeyValue(64, 64, 64, 4), _KeyValue(128, 64, 32, 4)),
    64: _Tiles(_Query(64, 64, 32, 2, True), _KeyValue(64, 64, 32, 2), _KeyValue(128, 64, 16, 4)),
    96: _Tiles(_Query(64, 64, 32, 2), _KeyValue(64, 64, 32, 4)),
    128: _Tiles(_Query(64, 64, 64, 4, True), _KeyValue(64, 64, 32, 4), _KeyValue(128, 64, 32, 8, 2)),
    192: _Tiles(_Query(64, 32, 32, 4), _KeyValue(64, 32, 32, 8, 2)),
    256: _Tiles(_Query(128, 32, 32, 8), _KeyValue(32, 32, 32, 4, 2), _KeyValue(64, 32, 32, 8, 2)),
}
_SM_80: _Table = {
    **_SM_90,
    64: _Tiles(_Query(64, 64, 32, 2, True), _KeyValue(64, 64, 32, 2), _KeyValue(256, 64, 16, 8)),
    128: _Tiles(_Query(64, 32, 32, 4, True), _KeyValue(64, 64, 32, 4), _KeyValue(128, 32, 32, 8, 2)),
    256: _Tiles(_Query(64, 32, 32, 4), _KeyValue(32, 32, 32, 4, 2), _KeyValue(64, 32, 32, 8, 2)),
}
# 99 KB.
_SM_86: _Table = {
    **_SM_90,
    128: _Tiles(_Query(64, 32, 32, 4, True), _KeyValue(64, 32, 32, 4), _KeyValue(64, 32, 32, 4, 2)),
    192: _Tiles(_Query(64, 32, 32, 4), _KeyValue(32, 32, 32, 4, 2)),
    256: _Tiles(_Query(64, 16, 16, 4), _KeyValue(32, 16, 16, 4, 2)),
}
_SM_120: _Table = {  # the same, but the compiler needs more registers
    **_SM_86,
    128: _Tiles(_Query(64, 32, 32, 4, True), _KeyValue(64, 32, 32, 4), _KeyValue(64, 32, 16, 4, 2)),
}
# 64 KB, no cp.async.
_SM_75: _Table = {
    32: _Tiles(_Query(64, 32, 32, 4), _KeyValue(64, 32, 32, 4)),
    64: _Tiles(_Query(64, 32, 32, 4), _KeyValue(64, 32, 32, 4)),
    96: _Tiles(_Query(64, 32, 16, 4), _KeyValue(64, 16, 16, 4)),
    128: _Tiles(_Query(32, 32, 16, 2), _KeyValue(64, 16, 16, 4)),
    192: _Tiles(_Query(32, 16, 16, 2), _KeyValue(32, 16, 16, 4, 2)),
    256: _Tiles(_Query(16, 16, 16, 1), _KeyValue(16, 16, 16, 2, 2)),
}
_TABLES: dict[str, _Table] = {
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
    compiled = compiled_head_dim(head_dim)
    tiles = _TABLES[architecture][compiled]
    turing = architecture == "sm_75"
    mma_k = 8 if turing else 16

    def of_keys(keys: _KeyValue) -> KeyValueTile:
        return KeyValueTile(
            head_dim=compiled,
            block_n=keys.block_n,
            block_m=keys.block_m,
            chunk=keys.chunk,
            warps=keys.warps,
            roles=keys.roles,
            register_steps=compiled // 16 if keys.in_registers else 0,
            queries=keys is tiles.single,
            cp_async=not turing,
            mma_k=mma_k,
        )

    query = tiles.query
    return PortableBackward(
        QueryTile(
            head_dim=compiled,
            block_m=query.block_m,
            block_n=query.block_n,
            chunk=query.chunk,
            warps=query.warps,
            register_steps=compiled // 16 if query.in_registers else 0,
            cp_async=not turing,
            mma_k=mma_k,
        ),
        of_keys(tiles.key_value),
        None if tiles.single is None else of_keys(tiles.single),
    )


def all_configurations(architecture: str) -> tuple[PortableBackward, ...]:
    """Everything that `configuration` can return on an architecture."""
    return tuple(configuration(architecture, head_dim) for head_dim in HEAD_DIMS)

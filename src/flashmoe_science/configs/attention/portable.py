"""Tiles of the portable attention kernel, per architecture and head dimension: data.

32 rows a warp where registers allow it, four warps, two blocks per multiprocessor. Shared memory holds
(block_m + 4 block_n) x head_dim x 2 bytes: the queries, and two stages of keys and values. Those of sm_90 were
measured (docs/kernels/portable.md), the others follow from registers and shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashmoe_science.configs.ablation import Ablation

HEAD_DIMS = (32, 64, 80, 96, 128, 160, 192, 224, 256)
"""Head dimensions that are compiled; a tensor's is padded, in shared memory, to the next of these."""


@dataclass(frozen=True)
class PortableConfiguration:
    """One tile shape of `attention_portable.cu`, which says what fields do."""

    head_dim: int
    """Compiled head dimension, a multiple of 16."""
    block_m: int
    """Query rows per block."""
    block_n: int
    """Keys per step."""
    warps: int
    query_steps: int
    """How many 16-wide slices of the query stay in registers."""
    min_blocks: int = 0
    """Blocks per multiprocessor that the compiler must leave registers for; 0 leaves it to the compiler."""
    overlap: bool = False
    """Exponentials of one block of keys overlap the scores of the next."""
    cp_async: bool = True
    mma_k: int = 16
    ablation: Ablation = Ablation.NONE

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def shared_bytes(self) -> int:
        row_bytes = (self.head_dim + 31) // 32 * 64
        return (self.block_m + 4 * self.block_n) * row_bytes

    @property
    def label(self) -> str:
        extras = f", {self.min_blocks} blocks" if self.min_blocks else ""
        extras += (", overlap" if self.overlap else "") + ("" if self.cp_async else ", no cp.async")
        extras += "" if self.ablation is Ablation.NONE else f", without {self.ablation.name.lower()}"
        return (
            f"head_dim {self.head_dim}, tile {self.block_m}x{self.block_n}, {self.warps} warps, "
            f"query slices in registers {self.query_steps}{extras}"
        )


TUNABLE = {
    "block_m": 1,
    "block_n": 1,
    "warps": 1,
    "query_steps": 0,
    "min_blocks": 0,
    "overlap": 0,
    "cp_async": 0,
    "mma_k": 1,
}
"""See `cuda.choice.Tuned.tunable`."""


@dataclass(frozen=True)
class _Tile:
    block_m: int
    block_n: int
    warps: int
    query_in_registers: bool
    overlap: bool = False
    min_blocks: int = 0


@dataclass(frozen=True)
class _ByKeys:
    """Tiles for many rows, each with the number of keys from which on it is best; the first is from 0."""

    full: tuple[tuple[int, _Tile], ...]
    causal: tuple[tuple[int, _Tile], ...]


def _always(tile: _Tile) -> _ByKeys:
    return _ByKeys(full=((0, tile),), causal=((0, tile),))


# (largest head_dim, tiles for many rows, tile for few rows)
_Rows = tuple[tuple[int, _ByKeys, _Tile], ...]

_SM_90_64 = _Tile(128, 64, 4, True)
# Overlapping the exponentials costs registers, hence the odd width; it pays once the loop over keys is long. Under
# a causal mask the short tile computes fewer masked scores.
_SM_90_64_LONG = _Tile(128, 48, 4, True, overlap=True)
_SM_90_64_SHORT = _Tile(64, 64, 2, True)
_SM_90: _Rows = (
    (32, _always(_SM_90_64), _Tile(64, 64, 4, True, overlap=True)),
    (
        64,
        _ByKeys(
            full=((0, _SM_90_64), (2048, _SM_90_64_LONG)),
            causal=((0, _SM_90_64_SHORT), (2048, _SM_90_64), (8192, _SM_90_64_LONG)),
        ),
        _Tile(64, 64, 4, True, overlap=True),
    ),
    (96, _always(_Tile(128, 64, 4, False)), _Tile(64, 64, 4, True)),
    (128, _always(_Tile(128, 64, 4, False)), _Tile(64, 64, 4, True)),
    (192, _always(_Tile(128, 64, 8, False)), _Tile(64, 64, 4, False)),
    (256, _always(_Tile(128, 64, 8, False)), _Tile(64, 32, 4, False)),
)
# As sm_90, but the compiler runs out of registers at 128x64.
_SM_100: _Rows = tuple(
    (most, _always(_Tile(128, 48, 4, False)), few) if most == 128 else (most, many, few)
    for most, many, few in _SM_90
)
_SM_80: _Rows = (
    (32, _always(_Tile(128, 64, 4, True)), _Tile(64, 64, 4, True, min_blocks=4)),
    (64, _always(_Tile(128, 64, 4, True)), _Tile(64, 64, 4, True)),
    (96, _always(_Tile(128, 64, 4, False)), _Tile(64, 64, 4, True)),
    (128, _always(_Tile(128, 32, 4, False)), _Tile(64, 32, 4, True)),
    (192, _always(_Tile(64, 32, 4, False)), _Tile(64, 32, 4, False)),
    (256, _always(_Tile(128, 32, 8, False)), _Tile(64, 32, 4, False)),
)
# 99 KB: at these tensor rates 16 rows per warp are enough to keep shared memory ahead of the tensor cores.
_SM_86: _Rows = (
    (32, _always(_Tile(128, 64, 4, True)), _Tile(64, 64, 4, True, min_blocks=4)),
    (64, _always(_Tile(128, 64, 4, True)), _Tile(64, 64, 4, True)),
    (96, _always(_Tile(64, 32, 4, True)), _Tile(64, 32, 4, True)),
    (128, _always(_Tile(64, 32, 4, True)), _Tile(64, 32, 4, True)),
    (192, _always(_Tile(64, 32, 4, False)), _Tile(64, 32, 4, False)),
    (256, _always(_Tile(64, 32, 4, False)), _Tile(64, 32, 4, False)),
)
_SM_75: _Rows = (
    (64, _always(_Tile(64, 32, 4, True)), _Tile(64, 32, 4, True)),
    (128, _always(_Tile(64, 32, 4, True)), _Tile(64, 32, 4, True)),
    (192, _always(_Tile(64, 16, 4, False)), _Tile(64, 16, 4, False)),
    (256, _always(_Tile(64, 16, 4, False)), _Tile(64, 16, 4, False)),
)
_TILES: dict[str, _Rows] = {
    "sm_75": _SM_75,
    "sm_80": _SM_80,
    "sm_86": _SM_86,
    "sm_87": _SM_80,
    "sm_89": _SM_86,
    "sm_90": _SM_90,
    "sm_100": _SM_100,
    "sm_103": _SM_100,
    "sm_120": _SM_86,
    "sm_121": _SM_86,
}


def tuned_architectures() -> tuple[str, ...]:
    return tuple(_TILES)


def tall(architecture: str, head_dim: int, causal: bool, seqlen_k: int) -> PortableConfiguration:
    """The tile for queries with many rows. `architecture` without suffix; KeyError if not in the table."""
    many, _ = _row(architecture, head_dim)
    by_keys = many.causal if causal else many.full
    return _configuration(architecture, head_dim, [tile for least, tile in by_keys if least <= seqlen_k][-1])


def short(architecture: str, head_dim: int) -> PortableConfiguration:
    """The tile with fewer rows, for problems that would leave multiprocessors without work."""
    return _configuration(architecture, head_dim, _row(architecture, head_dim)[1])


def all_configurations(architecture: str) -> tuple[PortableConfiguration, ...]:
    """Everything that `tall` and `short` can return on an architecture."""
    configurations = []
    for head_dim in HEAD_DIMS:
        many, few = _row(architecture, head_dim)
        tiles = [tile for _, tile in (*many.full, *many.causal)]
        configurations += [_configuration(architecture, head_dim, tile) for tile in (*tiles, few)]
    return tuple(dict.fromkeys(configurations))


def compiled_head_dim(head_dim: int) -> int:
    """The smallest compiled head dimension that holds this one (at most 256)."""
    return next(size for size in HEAD_DIMS if size >= head_dim)


def _row(architecture: str, head_dim: int) -> tuple[_ByKeys, _Tile]:
    compiled = compiled_head_dim(head_dim)
    return next((many, few) for most, many, few in _TILES[architecture] if most >= compiled)


def _configuration(architecture: str, head_dim: int, tile: _Tile) -> PortableConfiguration:
    compiled = compiled_head_dim(head_dim)
    return PortableConfiguration(
        head_dim=compiled,
        block_m=tile.block_m,
        block_n=tile.block_n,
        warps=tile.warps,
        query_steps=compiled // 16 if tile.query_in_registers else 0,
        min_blocks=tile.min_blocks,
        overlap=tile.overlap,
        cp_async=architecture != "sm_75",
        mma_k=8 if architecture == "sm_75" else 16,
    )

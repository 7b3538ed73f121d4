"""Tiles of the kernel of attention over sequences of any lengths, per architecture and head dimension: data.

They are those of the portable kernel (`configs.attention.portable`), from whose parts it is made, without its overlap:
tall ones for prompts, short ones where few rows would leave multiprocessors without work.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashmoe_science.configs.attention.portable import (
    HEAD_DIMS,
    PortableConfiguration,
    compiled_head_dim,
    short,
    tall,
)

ARCHITECTURES = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")
MAX_HEAD_DIM = HEAD_DIMS[-1]
_STAGES = 2
_BLOCK_N = {("sm_90", 128): 48}
"""Of tall tiles, by architecture and head dimension: at the portable kernel's 64 the compiler runs out of registers."""
_PAGED_BLOCK_N = {(architecture, 64): 48 for architecture in ("sm_86", "sm_89", "sm_120", "sm_121")}
"""The same with pages, whose table would leave room for one block of 64 keys in place of two."""


@dataclass(frozen=True)
class Features:
    """What a kernel is compiled for. What it is not compiled for costs nothing."""

    paged: bool = False
    same_strides: bool = True
    """Key and value lie in their pages in the same way: one place is looked up for both. Only looked at where paged."""
    packed_heads: bool = False
    """The query heads of a key/value head share a tile."""
    left_window: bool = False
    softcap: bool = False
    alibi: bool = False
    chunk: bool = False
    """Rows see keys of their own chunk alone: with `left_window`."""
    tree: bool = False
    """Rows have a bit for each of the keys of their sequence's own queries: without `left_window`."""
    only: int = 0
    """The `varlen.problem.Only` of its calls."""

    @property
    def macros(self) -> dict[str, int]:
        return {
            "PAGED": int(self.paged),
            "SAME_STRIDES": int(self.same_strides),
            "PACKED_HEADS": int(self.packed_heads),
            "LEFT_WINDOW": int(self.left_window),
            "SOFTCAP": int(self.softcap),
            "ALIBI": int(self.alibi),
            **({"CHUNK": 1} if self.chunk else {}),
            **({"TREE": 1} if self.tree else {}),
            **({"ONLY": self.only} if self.only else {}),
        }


@dataclass(frozen=True)
class VarlenConfiguration:
    """One tile shape of `attention_varlen.cu`, which says what fields do."""

    head_dim: int
    """Compiled head dimension, a multiple of 16, at least the value's."""
    value_dim: int
    """Compiled dimension of values, a multiple of 16."""
    block_m: int
    """Rows per block: of one head, or of all heads that share keys."""
    block_n: int
    """Keys per step."""
    warps: int
    query_steps: int
    """How many 16-wide slices of the query stay in registers."""
    features: Features

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def shared_bytes(self) -> int:
        """Dynamic; up to 2 KB of lookups come to it."""
        key_row, value_row = (-(-dimension // 32) * 64 for dimension in (self.head_dim, self.value_dim))
        return self.block_m * key_row + _STAGES * self.block_n * (key_row + value_row)

    @property
    def label(self) -> str:
        on = [name.lower() for name, value in self.features.macros.items() if value]
        return (
            f"head_dim {self.head_dim}, value_dim {self.value_dim}, tile {self.block_m}x{self.block_n}, "
            f"{self.warps} warps" + "".join(f", {name}" for name in on)
        )


@dataclass(frozen=True)
class Tiles:
    """For one problem."""

    tall: VarlenConfiguration
    short: VarlenConfiguration


def tiles(architecture: str, head_dim: int, value_dim: int, features: Features) -> Tiles:
    """`architecture` without suffix; KeyError if not in the table. Dimensions up to `MAX_HEAD_DIM`."""
    compiled = compiled_head_dim(max(head_dim, value_dim))
    value = compiled_head_dim(value_dim)

    def configuration(tile: PortableConfiguration, block_n: int) -> VarlenConfiguration:
        return VarlenConfiguration(
            head_dim=compiled,
            value_dim=value,
            block_m=tile.block_m,
            block_n=block_n,
            warps=tile.warps,
            query_steps=tile.query_steps,
            features=features,
        )

    narrower = {**_BLOCK_N, **_PAGED_BLOCK_N} if features.paged else _BLOCK_N
    many = tall(architecture, compiled, causal=False, seqlen_k=0)
    few = short(architecture, compiled)
    return Tiles(
        tall=configuration(many, narrower.get((architecture, compiled), many.block_n)),
        short=configuration(few, few.block_n),
    )

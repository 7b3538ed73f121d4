"""Shapes of the Hopper kernel for prompts beside decode steps (`kernels/cuda/attention_mixed_hopper.cu`): data."""

from __future__ import annotations

from dataclasses import dataclass

from flashmoe_science.configs.attention import decode_hopper
from flashmoe_science.configs.attention import hopper_varlen as prompts
from flashmoe_science.configs.attention.decode_hopper import DecodeHopperConfiguration
from flashmoe_science.configs.attention.hopper_varlen import Extent, HopperFeatures, HopperVarlenConfiguration

FEW_QUERIES = 8
"""Query tokens of a decode step, if their heads' rows are at most `PRODUCT_ROWS`; more where rows are left."""
_ROW_TILES = (1, 2, 4, 8)
_STAGES = 2
"""Tiles of keys, and of values, of decode steps: one for each warpgroup."""


@dataclass(frozen=True)
class MixedHopperConfiguration:
    """One kernel."""

    prompts: HopperVarlenConfiguration
    few: DecodeHopperConfiguration
    """Of decode steps; with the prompts' number of keys in a tile."""

    @property
    def threads(self) -> int:
        return self.few.threads

    @property
    def shared_bytes(self) -> int:
        return max(self.prompts.shared_bytes, self.few.shared_bytes)


def configuration(
    head_dim: int, value_dim: int, group: int, features: HopperFeatures
) -> MixedHopperConfiguration:
    """The kernel.

    Args:
        group: query heads that share keys, at most `decode_hopper.PRODUCT_ROWS`.
    """
    tile = prompts.configuration(head_dim, value_dim, features, Extent(1, 1, 1, 1))
    rows = min(FEW_QUERIES * group, decode_hopper.PRODUCT_ROWS)
    few = DecodeHopperConfiguration(
        head_dim,
        value_dim,
        row_tiles=next(tiles for tiles in _ROW_TILES if 8 * tiles >= rows),
        stages=_STAGES,
        box_rows=features.page_rows or tile.block_n,
        paged=features.page_rows > 0,
        softcap=features.softcap,
        chunk=features.chunk,
        tile_keys=tile.block_n,
    )
    return MixedHopperConfiguration(tile, few)

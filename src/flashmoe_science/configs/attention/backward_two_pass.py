"""Tiles of the two-pass Hopper kernels of attention backward: data."""

from __future__ import annotations

from dataclasses import dataclass, field

from flashmoe_science.configs.ablation import Ablation

HEAD_DIMS = (192, 256)
"""Head dimensions that are compiled; TMA pads a tensor's to the next of these."""
LEAST_HEAD_DIM = 129
"""Smaller ones take the kernel with one pass."""
ROWS = 64
"""Of queries or keys in a tile."""
KEY_STEP_STAGES = 2
"""Of queries and their output gradients, in the pass over keys."""
QUERY_ROWS = 128
"""Per block of the pass over queries."""
LANES = 32
"""That share a row where statistics are prepared, eight elements each."""
_STATISTIC_BYTES = 4 * ROWS
_EXCHANGE_BYTES = 4 * ROWS * ROWS
_ALIGNMENT = 1024
_SECTION_BYTES = 24 << 20
"""What a section's heads read again and again; half of an H200's L2."""


@dataclass(frozen=True)
class TwoPassBackward:
    """See `kernels/cuda/attention_backward_two_pass_key_value.cu` and `..._query.cu`."""

    head_dim: int
    """Compiled head dimension."""
    causal: bool
    ablation: Ablation = field(default=Ablation.NONE, kw_only=True)

    @property
    def threads(self) -> int:
        return 3 * 128

    @property
    def _tile_bytes(self) -> int:
        return ROWS * 2 * self.head_dim

    @property
    def key_value_shared_bytes(self) -> int:
        """Keys, values; rings of queries, output gradients, probabilities and statistics; barriers."""
        stage = 2 * self._tile_bytes + _EXCHANGE_BYTES + 2 * _STATISTIC_BYTES + 3 * 16
        return 2 * self._tile_bytes + KEY_STEP_STAGES * stage + 16 + _ALIGNMENT

    @property
    def value_stages(self) -> int:
        """Of the pass over queries: as many as there is room for."""
        return 2 if self.head_dim <= HEAD_DIMS[0] else 1

    @property
    def query_shared_bytes(self) -> int:
        """Queries and output gradients of both consumers; rings of keys and values; barriers."""
        buffers = 2 + self.value_stages
        return (2 * 2 + buffers) * self._tile_bytes + (2 + buffers) * 16 + _ALIGNMENT


def configuration(head_dim: int, causal: bool) -> TwoPassBackward | None:
    """None if the head dimension is larger than those that are compiled, or small enough for one pass."""
    if head_dim < LEAST_HEAD_DIM:
        return None
    compiled = next((size for size in HEAD_DIMS if size >= head_dim), None)
    return None if compiled is None else TwoPassBackward(compiled, causal)


def all_configurations() -> tuple[TwoPassBackward, ...]:
    return tuple(TwoPassBackward(head_dim, causal) for head_dim in HEAD_DIMS for causal in (False, True))


def heads_per_section(rows: float, tile: TwoPassBackward, heads: int) -> int:
    """How many of the heads are worked on side by side, in sections of about the same size.

    One is best without a mask. Under a causal one the last head's long blocks would end the grid. Measured on an H200
    (docs/kernels/backward-two-pass.md).

    Args:
        rows: of a head, that its blocks read again and again, of two tensors.
        heads: in all.
    """
    if not tile.causal:
        return 1
    most = max(1, round(_SECTION_BYTES / (rows * tile.head_dim * 4)))
    return -(-heads // -(-heads // most))

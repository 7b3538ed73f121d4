"""Tiles of the portable kernels of attention backward, per architecture and head dimension: data."""

from __future__ import annotations

from dataclasses import dataclass

from flashmoe_science.configs.ablation import Ablation

_STAGES_OF_KEYS = 2
STATISTICS_THREADS = 128


def _row_bytes(head_dim: int) -> int:
    return (head_dim + 31) // 32 * 64


@dataclass(frozen=True)
class QueryTile:
    """The pass over queries. See `kernels/cuda/attention_backward_query.cu` for what the fields do there."""

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
    """The pass over keys. See `kernels/cuda/attention_backward_key_value.cu` for what the fields do there."""

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
        return rows * _row_bytes(self.head_dim) + statistics + exchange

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
            "MIN_BLOCKS": self.min_blocks,
            "REGISTER_STEPS": self.register_steps,
            "NATIVE_CP_ASYNC": int(self.cp_async),
            "MMA_K": self.mma_k,
            **self.ablation.macros,
        }

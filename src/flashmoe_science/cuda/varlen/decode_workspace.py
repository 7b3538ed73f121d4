"""Where blocks of the decode kernel leave each other parts of a result: workspace, and counters of who has arrived."""

from __future__ import annotations

import threading

import torch

from flashmoe_science.configs.attention import decode as configs
from flashmoe_science.configs.attention import decode_hopper
from flashmoe_science.configs.attention.decode import DecodeConfiguration
from flashmoe_science.configs.attention.decode_hopper import DecodeHopperConfiguration
from flashmoe_science.cuda.kept import kept
from flashmoe_science.cuda.repeat import Allocate
from flashmoe_science.cuda.varlen.kind import packed_rows
from flashmoe_science.errors import InputError
from flashmoe_science.varlen.problem import Problem, Sizes

_PARTIAL_BYTES = 4 * (4 * 32 + 2 * 4)
"""Of a quad in the kernel's `Partial`: four sums for each lane, two statistics for each of four rows."""

_MOST_WORKSPACE = 1 << 30


class _Workspaces(threading.local):
    """Of this thread, by device and stream: what launches leave there is read by themselves alone."""

    def __init__(self) -> None:
        self.of_stream: dict[tuple[int, int], torch.Tensor] = {}


_workspaces = _Workspaces()


def shared_workspace(allocate: Allocate, device: int, stream: int, grid: int) -> torch.Tensor:
    """That of all launches without `split_keys` that this thread makes on a stream, the current one of its device.

    One for all problems: strides are part of a problem, and those of a cache that grows are others at each step.
    """
    workspace = _workspaces.of_stream.get((device, stream))
    if workspace is None:
        size = 2 * grid * max(configs.MOST_QUADS, decode_hopper.MOST_QUADS) * _PARTIAL_BYTES + _taken_bytes(
            grid
        )
        workspace = kept(lambda: allocate((size,), (1,), torch.uint8))
        _workspaces.of_stream[device, stream] = workspace
    return workspace


def _taken_bytes(grid: int) -> int:
    """Behind the results: which of a warp's parts of a set are taken."""
    return 4 * grid * decode_hopper.WARPS


def arrival_counters(grid: int, configuration: DecodeConfiguration | DecodeHopperConfiguration) -> int:
    """Of a launch: for each warp of a block where pieces meet in groups, and where groups do."""
    return 2 * grid * configuration.warps


def workspace_bytes(
    problem: Problem, sizes: Sizes, configuration: DecodeConfiguration | DecodeHopperConfiguration, grid: int
) -> int:
    """What blocks leave each other: two results each. With `split_keys` one for each piece of each set of rows.

    Raises InputError where pieces are so many that these take more than a gigabyte.
    """
    slot = configuration.quads * _PARTIAL_BYTES
    if not problem.split_keys:
        return 2 * grid * slot + _taken_bytes(grid)
    rows = packed_rows(problem, sizes)
    sets = sizes.batch * problem.num_kv_heads * -(-rows // configuration.rows)
    pieces = sets * (-(-sizes.max_seqlen_k // problem.split_keys) + 1)
    if pieces * slot > _MOST_WORKSPACE:
        raise InputError(
            f"split_keys={problem.split_keys} cuts {sizes.batch} sequences of up to {sizes.max_seqlen_k} keys into so "
            f"many parts that their results take {pieces * slot >> 20} MiB; expected at most {_MOST_WORKSPACE >> 20}: "
            "give a larger split_keys, or closer bounds"
        )
    return pieces * slot

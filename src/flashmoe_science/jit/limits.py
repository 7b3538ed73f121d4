"""What one multiprocessor of each NVIDIA architecture holds, and how many blocks of a kernel that leaves room
for.

Figures are those of the CUDA programming guide's table "Technical Specifications per Compute Capability" and
of its occupancy calculator (allocation granularities).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from flashmoe_science.errors import BuildError, DeviceError

WARP = 32
MAX_REGISTERS_PER_THREAD = 255
MAX_THREADS_PER_BLOCK = 1024
_REGISTERS_PER_SM = 65536
_REGISTER_UNIT = 256  # registers are given out to a warp in multiples of this
_WARP_UNIT = 4  # and a multiprocessor holds a multiple of this many warps, one per scheduler
_SHARED_UNIT = 128


@dataclass(frozen=True)
class Limits:
    """Per multiprocessor and per block. Shared memory in bytes."""

    shared_per_block: int
    """The most that one block can have, by opting in."""
    shared_per_sm: int
    threads_per_sm: int
    blocks_per_sm: int
    shared_reserved: int = 1024
    """What the system keeps for itself of every block's shared memory, outside of `shared_per_block`."""
    bfloat16: bool = True
    """The tensor cores take bfloat16."""
    cp_async: bool = True
    """Asynchronous copies from global to shared memory."""


_KB = 1024
LIMITS: dict[str, Limits] = {
    "sm_75": Limits(64 * _KB, 64 * _KB, 1024, 16, shared_reserved=0, bfloat16=False, cp_async=False),
    "sm_80": Limits(163 * _KB, 164 * _KB, 2048, 32),
    "sm_86": Limits(99 * _KB, 100 * _KB, 1536, 16),
    "sm_87": Limits(163 * _KB, 164 * _KB, 1536, 16),
    "sm_89": Limits(99 * _KB, 100 * _KB, 1536, 24),
    "sm_90": Limits(227 * _KB, 228 * _KB, 2048, 32),
    "sm_100": Limits(227 * _KB, 228 * _KB, 2048, 32),
    "sm_103": Limits(227 * _KB, 228 * _KB, 2048, 32),
    "sm_120": Limits(99 * _KB, 100 * _KB, 1536, 24),
    "sm_121": Limits(99 * _KB, 100 * _KB, 1536, 24),
}

_NAME = re.compile(r"(sm_\d+)[af]?")


@dataclass(frozen=True)
class Occupancy:
    blocks_per_sm: int
    fraction: float
    """Resident warps over the most that the multiprocessor can hold, 0 to 1."""


def base_architecture(architecture: str) -> str:
    """``sm_90`` for ``sm_90a``.

    Raises:
        DeviceError: it is no architecture's name, or one that nothing is known about.
    """
    match = _NAME.fullmatch(architecture)
    if match is None or match[1] not in LIMITS:
        names = ", ".join(LIMITS)
        raise DeviceError(
            f"unknown GPU architecture {architecture!r}; expected one of {names} (with a or f appended)"
        )
    return match[1]


def limits(architecture: str) -> Limits:
    """Limits of an architecture such as ``sm_90`` or ``sm_90a``; DeviceError if it is unknown."""
    return LIMITS[base_architecture(architecture)]


def overlaps(architecture: str) -> bool:
    """Whether a kernel may start while the one before it still runs: programmatic dependent launch, since sm_90."""
    return int(base_architecture(architecture).removeprefix("sm_")) >= 90


def device_architecture(major: int, minor: int) -> str:
    """Name of a device's architecture, e.g. ``sm_90`` for compute capability 9.0.

    A minor revision that is not in the table counts as the next lower one of its generation, whose code it
    runs.

    Raises:
        DeviceError: the generation is older than sm_75 or unknown.
    """
    for lower in range(minor, -1, -1):
        if f"sm_{major}{lower}" in LIMITS:
            return f"sm_{major}{lower}"
    raise DeviceError(
        f"compute capability {major}.{minor} is not supported: the CUDA kernels need 7.5 or later "
        f"({', '.join(LIMITS)}); use CPU tensors or torch's scaled_dot_product_attention"
    )


def check_block(label: str, architecture: str, threads: int, shared_bytes: int) -> None:
    """Raise BuildError, naming what is too big, unless a block of this size fits the architecture."""
    limit = limits(architecture)
    problems = []
    if shared_bytes > limit.shared_per_block:
        problems.append(
            f"{shared_bytes:,} bytes of shared memory per block, "
            f"and {architecture} has {limit.shared_per_block:,} (take smaller tiles)"
        )
    if threads > MAX_THREADS_PER_BLOCK:
        problems.append(
            f"{threads} threads per block, and the most is {MAX_THREADS_PER_BLOCK} (take fewer warps)"
        )
    if problems:
        raise BuildError(f"{label} does not fit: it needs {'; '.join(problems)}")


def occupancy(architecture: str, threads: int, registers_per_thread: int, shared_bytes: int) -> Occupancy:
    """How many blocks run on one multiprocessor at a time; zero where not even one fits.

    Args:
        shared_bytes: static and dynamic shared memory of one block.
    """
    limit = limits(architecture)
    warps = _round_up(threads, WARP) // WARP
    by_threads = limit.threads_per_sm // (warps * WARP)
    per_warp = max(_round_up(registers_per_thread * WARP, _REGISTER_UNIT), _REGISTER_UNIT)
    warps_by_registers = _REGISTERS_PER_SM // per_warp // _WARP_UNIT * _WARP_UNIT
    by_registers = warps_by_registers // warps
    by_shared = limit.shared_per_sm // max(_round_up(shared_bytes + limit.shared_reserved, _SHARED_UNIT), 1)
    blocks = min(limit.blocks_per_sm, by_threads, by_registers, by_shared)
    if shared_bytes > limit.shared_per_block or threads > MAX_THREADS_PER_BLOCK:
        blocks = 0
    if registers_per_thread > MAX_REGISTERS_PER_THREAD:
        blocks = 0
    return Occupancy(blocks, blocks * warps * WARP / limit.threads_per_sm)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit

"""Which kernel a call takes: the one place where that is decided."""

from __future__ import annotations

import os
from types import ModuleType
from typing import cast

from flashmoe_science.cuda import hopper, portable, small
from flashmoe_science.cuda.problem import Choice, Device, KernelKind, KernelModule, Problem
from flashmoe_science.errors import DeviceError, InputError

OVERRIDE_VARIABLE = "FLASHMOE_CUDA_KERNEL"
"""Environment variable that names the kernel (see `KernelKind`) that every call must take; read at a shape's
first call.
"""

_MODULES: dict[KernelKind, ModuleType] = {
    KernelKind.SMALL: small,
    KernelKind.HOPPER: hopper,
    KernelKind.PORTABLE: portable,
}
_PREFERENCE = (KernelKind.SMALL, KernelKind.HOPPER, KernelKind.PORTABLE)
"""The first kernel that takes a problem gets it."""
_PREFERENCE_FOR_FEW_TILES = (KernelKind.SMALL, KernelKind.PORTABLE, KernelKind.HOPPER)
_FEW_TILES_ROWS = 64
_FEW_TILES_KEYS = 256
_FEW_TILES_HEAD_DIM = 64


def module(kind: KernelKind) -> KernelModule:
    return cast("KernelModule", _MODULES[kind])


def select(problem: Problem, device: Device) -> Choice:
    """The kernel and configuration for a problem.

    Raises:
        InputError: $FLASHMOE_CUDA_KERNEL names no kernel, or one that cannot take this problem.
        DeviceError: no kernel can.
    """
    named = os.environ.get(OVERRIDE_VARIABLE)
    for kind in _preference(problem, device) if not named else (_named(named),):
        choice = module(kind).choose(problem, device)
        if choice is not None:
            return choice
    what = f"{problem.dtype} with head_dim {problem.head_dim} on {device.architecture}"
    if named:
        raise InputError(
            f"the kernel {named!r} that {OVERRIDE_VARIABLE} asks for cannot take {what}; unset it"
        )
    raise DeviceError(f"no CUDA kernel takes {what}; use float16, or torch's scaled_dot_product_attention")


def _preference(problem: Problem, device: Device) -> tuple[KernelKind, ...]:
    """Up to head dim 64, tiles of 64 rows that all find a place at once and see few keys are done by the portable
    kernel before the Hopper kernel has set up its pipeline (H200: 4.2 against 4.8 us at 64 heads of 128 rows; at 8
    heads of 512 rows and keys, or at head dim 128, it is the other way round).
    """
    tiles = problem.batch * problem.num_heads * -(-problem.seqlen_q // _FEW_TILES_ROWS)
    few = (
        problem.head_dim <= _FEW_TILES_HEAD_DIM
        and problem.seqlen_k <= _FEW_TILES_KEYS
        and tiles <= device.multiprocessors
    )
    return _PREFERENCE_FOR_FEW_TILES if few else _PREFERENCE


def _named(name: str) -> KernelKind:
    try:
        return KernelKind(name)
    except ValueError:
        known = ", ".join(kind.value for kind in KernelKind)
        raise InputError(f"{OVERRIDE_VARIABLE}={name!r} names no kernel; known are {known}") from None

"""Which kernel a call takes: the one place where that is decided."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import cast

import torch

from flashmoe_science.cuda.attention import hopper, portable, small
from flashmoe_science.cuda.attention.problem import Choice, KernelKind, KernelModule, LaunchPlan, Problem
from flashmoe_science.cuda.device import Device
from flashmoe_science.errors import InputError, KernelDefectError, NoKernelError
from flashmoe_science.jit.nvrtc import CudaKernel

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
        NoKernelError: no kernel can.
    """
    named = os.environ.get(OVERRIDE_VARIABLE)
    found = next(_choices(problem, device, named), None)
    if found is not None:
        return found
    what = f"{problem.dtype} with head_dim {problem.head_dim} on {device.architecture}"
    if named:
        raise InputError(
            f"the kernel {named!r} that {OVERRIDE_VARIABLE} asks for cannot take {what}; unset it"
        )
    raise NoKernelError(f"no CUDA kernel takes {what}; use float16, or torch's scaled_dot_product_attention")


def compiled(choice: Choice, dtype: torch.dtype, architecture: str) -> CudaKernel:
    """What is compiled for a choice on an architecture."""
    if choice.kernel is KernelKind.HOPPER:
        return hopper.kernel(choice.configuration, dtype)
    if choice.kernel is KernelKind.PORTABLE:
        return portable.kernel(choice.configuration, dtype, architecture)
    return small.kernel(choice.configuration, dtype, architecture)


def plan(problem: Problem, device: Device, choice: Choice | None = None) -> LaunchPlan:
    """The launch plan of `select`'s kernel, or of `choice`. The device is current.

    A kernel that this compiler spills registers of and the like is passed over, with a warning, for the next one
    that it does not; if there is none, the portable kernel is taken as it is. Not if `choice` or
    $FLASHMOE_CUDA_KERNEL asks for that kernel.

    Raises:
        KernelDefectError: the kernel that was asked for has such a defect.
        InputError, NoKernelError: see `select`.
        BuildError, DeviceError: see `driver.load`.
    """
    if choice is None and not os.environ.get(OVERRIDE_VARIABLE):
        for candidate in _choices(problem, device, None):
            try:
                return module(candidate.kernel).plan(problem, candidate.configuration, device)
            except KernelDefectError as defect:
                warnings.warn(f"{defect}; taking another kernel", RuntimeWarning, stacklevel=2)
        last = portable.choose(problem, device)
        if last is not None:
            return portable.plan(problem, last.configuration, device, allow_defects=True)
    chosen = select(problem, device) if choice is None else choice
    return module(chosen.kernel).plan(problem, chosen.configuration, device)


def _choices(problem: Problem, device: Device, named: str | None) -> Iterator[Choice]:
    """What the kernels that take the problem would use, the preferred one first."""
    for kind in _preference(problem, device) if not named else (_named(named),):
        choice = module(kind).choose(problem, device)
        if choice is not None:
            yield choice


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

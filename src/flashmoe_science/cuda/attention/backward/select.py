"""Which kernel a call of attention backward takes: the one place where that is decided."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import cast

from flashmoe_science.cuda.attention.backward import portable
from flashmoe_science.cuda.attention.backward.problem import (
    BackwardChoice,
    BackwardKind,
    BackwardModule,
    BackwardPlan,
    BackwardProblem,
)
from flashmoe_science.cuda.device import Device
from flashmoe_science.errors import InputError, KernelDefectError, NoKernelError
from flashmoe_science.jit.nvrtc import CudaKernel

OVERRIDE_VARIABLE = "FLASHMOE_CUDA_BACKWARD"
"""Environment variable that names the kernel (see `BackwardKind`) that every call must take; read at a shape's first call."""

_MODULES: dict[BackwardKind, ModuleType] = {BackwardKind.PORTABLE: portable}
_PREFERENCE = (BackwardKind.PORTABLE,)
"""The first kernel that takes a problem gets it."""


def module(kind: BackwardKind) -> BackwardModule:
    return cast("BackwardModule", _MODULES[kind])


def kernels(architecture: str) -> list[CudaKernel]:
    """Everything that a call can lead to on an architecture."""
    return [kernel for kind in BackwardKind for kernel in module(kind).kernels(architecture)]


def select(problem: BackwardProblem, device: Device) -> BackwardChoice:
    """The kernel and configuration for a problem.

    Raises:
        InputError: $FLASHMOE_CUDA_BACKWARD names no kernel, or one that cannot take this problem.
        NoKernelError: no kernel can.
    """
    named = os.environ.get(OVERRIDE_VARIABLE)
    chosen = next(_choices(problem, device, named), None)
    if chosen is not None:
        return chosen
    what = f"{problem.dtype} with head_dim {problem.head_dim} on {device.architecture}"
    if named:
        raise InputError(
            f"the kernel {named!r} that {OVERRIDE_VARIABLE} asks for cannot take {what}; unset it"
        )
    raise NoKernelError(
        f"no CUDA kernel takes the backward pass of {what}; use float16, or torch's scaled_dot_product_attention"
    )


def plan(problem: BackwardProblem, device: Device, choice: BackwardChoice | None = None) -> BackwardPlan:
    """The plan of `select`'s kernel, or of `choice`. The device is current.

    A kernel that this compiler spills registers of and the like is passed over, with a warning, for the next one
    that it does not; if there is none, the portable kernels are taken as they are. Not if `choice` or
    $FLASHMOE_CUDA_BACKWARD asks for that kernel.

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


def _choices(problem: BackwardProblem, device: Device, named: str | None) -> Iterator[BackwardChoice]:
    """What the kernels that take the problem would use, the preferred one first."""
    for kind in _PREFERENCE if not named else (_named(named),):
        choice = module(kind).choose(problem, device)
        if choice is not None:
            yield choice


def _named(name: str) -> BackwardKind:
    try:
        return BackwardKind(name)
    except ValueError:
        known = ", ".join(kind.value for kind in BackwardKind)
        raise InputError(f"{OVERRIDE_VARIABLE}={name!r} names no kernel; known are {known}") from None

"""Which way a mixture-of-experts call takes: the one place where that is decided."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import cast

from flashmoe_science.cuda.device import Device
from flashmoe_science.cuda.moe import few, hopper, portable, topk
from flashmoe_science.cuda.moe.problem import MoeChoice, MoeKind, MoeModule, MoePlan, MoeProblem
from flashmoe_science.errors import InputError, KernelDefectError, NoKernelError
from flashmoe_science.jit.nvrtc import CudaKernel

OVERRIDE_VARIABLE = "FLASHMOE_MOE_KERNEL"
"""Environment variable that names the way (see `MoeKind`) that every call must take; read at a shape's first call."""

_MODULES: dict[MoeKind, ModuleType] = {
    MoeKind.FEW: few,
    MoeKind.HOPPER: hopper,
    MoeKind.PORTABLE: portable,
}
"""In order of preference: the first that takes a problem gets it."""


def module(kind: MoeKind) -> MoeModule:
    return cast("MoeModule", _MODULES[kind])


def kernels(architecture: str) -> list[CudaKernel]:
    """Everything that a call could take on an architecture, and the router's kernel; each kernel once."""
    found = [kernel for kind in _MODULES for kernel in module(kind).kernels(architecture)]
    found += topk.kernels(architecture)
    return list({kernel.label + kernel.architecture: kernel for kernel in found}.values())


def select(problem: MoeProblem, device: Device) -> MoeChoice:
    """The way and configuration for a problem, from its shapes alone.

    Raises:
        InputError: $FLASHMOE_MOE_KERNEL names none, or one that cannot take this problem.
        NoKernelError: there is none.
    """
    named = os.environ.get(OVERRIDE_VARIABLE)
    found = next(_choices(problem, device, named), None)
    if found is not None:
        return found
    what = (
        f"{problem.dtype} with {problem.experts} experts, hidden size {problem.hidden} and intermediate size "
        f"{problem.intermediate} on {device.architecture}"
    )
    if named:
        raise InputError(f"{named!r}, which {OVERRIDE_VARIABLE} asks for, cannot take {what}; unset it")
    raise NoKernelError(f"no mixture-of-experts kernel takes {what}; use torch.nn.functional.grouped_mm")


def plan(problem: MoeProblem, device: Device, choice: MoeChoice | None = None) -> MoePlan:
    """The plan of `select`'s choice, or of `choice`. The device is current.

    A kernel that this compiler spills registers of and the like is passed over, with a warning, for the next way that
    takes the problem; if all have such defects, the last is taken as it is. Not if `choice` or $FLASHMOE_MOE_KERNEL
    asks for that kernel.

    Raises:
        KernelDefectError: a kernel that was asked for has such a defect.
        InputError, NoKernelError: see `select`.
        BuildError, DeviceError: see `driver.load`.
    """
    if choice is None and not os.environ.get(OVERRIDE_VARIABLE):
        last: MoeChoice | None = None
        for candidate in _choices(problem, device, None):
            last = candidate
            try:
                return module(candidate.kind).plan(problem, candidate.configuration, device)
            except KernelDefectError as defect:
                warnings.warn(f"{defect}; taking another kernel", RuntimeWarning, stacklevel=2)
        if last is not None:
            return module(last.kind).plan(problem, last.configuration, device, allow_defects=True)
    chosen = select(problem, device) if choice is None else choice
    return module(chosen.kind).plan(problem, chosen.configuration, device)


def _choices(problem: MoeProblem, device: Device, named: str | None) -> Iterator[MoeChoice]:
    """What takes the problem, the preferred first."""
    for kind in _MODULES if not named else (_named(named),):
        choice = module(kind).choose(problem, device)
        if choice is not None:
            yield choice


def _named(name: str) -> MoeKind:
    known = {kind.value: kind for kind in _MODULES}
    if name not in known:
        raise InputError(f"{OVERRIDE_VARIABLE}={name!r} names no kernel; known are {', '.join(known)}")
    return known[name]

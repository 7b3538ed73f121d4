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


def module(kind: KernelKind) -> KernelModule:
    return cast("KernelModule", _MODULES[kind])


def select(problem: Problem, device: Device) -> Choice:
    """The kernel and configuration for a problem.

    Raises:
        InputError: $FLASHMOE_CUDA_KERNEL names no kernel, or one that cannot take this problem.
        DeviceError: no kernel can.
    """
    named = os.environ.get(OVERRIDE_VARIABLE)
    for kind in _PREFERENCE if not named else (_named(named),):
        choice = module(kind).choose(problem, device)
        if choice is not None:
            return choice
    what = f"{problem.dtype} with head_dim {problem.head_dim} on {device.architecture}"
    if named:
        raise InputError(
            f"the kernel {named!r} that {OVERRIDE_VARIABLE} asks for cannot take {what}; unset it"
        )
    raise DeviceError(f"no CUDA kernel takes {what}; use float16, or torch's scaled_dot_product_attention")


def _named(name: str) -> KernelKind:
    try:
        return KernelKind(name)
    except ValueError:
        known = ", ".join(kind.value for kind in KernelKind)
        raise InputError(f"{OVERRIDE_VARIABLE}={name!r} names no kernel; known are {known}") from None

"""The CUDA backend: choose a kernel and its configuration, compile it if need be, launch it.

A folder an operation (`attention`, `moe`, `varlen`); what they share, and what is one kernel, stands beside them.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from typing import TYPE_CHECKING

from flashmoe_science.jit.limits import base_architecture

if TYPE_CHECKING:
    from flashmoe_science.jit.nvrtc import CudaKernel


def kernels(architectures: Iterable[str]) -> list[CudaKernel]:
    """What is compiled ahead of time for these (``sm_90``, ``sm_90a``), each kernel once.

    It is what the functions called ``kernels`` of all modules below this one give: see `choice.KernelModule`. No list
    names them. A step of several kernels' calls, which none takes by itself, has no function of that name.

    Raises:
        DeviceError: an architecture that nothing is known about.
    """
    names = dict.fromkeys(base_architecture(name) for name in architectures)
    modules = [
        importlib.import_module(module.name) for module in pkgutil.walk_packages(__path__, f"{__name__}.")
    ]
    listed = [module.kernels for module in modules if hasattr(module, "kernels")]
    built = [kernel for name in names for of_module in listed for kernel in of_module(name)]
    return list({(kernel.architecture, kernel.label): kernel for kernel in built}.values())

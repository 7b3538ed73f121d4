"""Kernels as compute-sanitizer's racecheck understands them: see `kernels/cuda/racecheck.cuh`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from flashmoe_science.jit import nvrtc
from flashmoe_science.jit.nvrtc import CudaKernel


def compile_for_racecheck(*makers: tuple[Any, str]) -> None:
    """Has what these functions make compiled that way, if racecheck is the tool that SANITIZER names.

    Args:
        makers: a module and the name of its function that makes a `CudaKernel`.
    """
    if os.environ.get("SANITIZER") != "racecheck":
        return
    nvrtc._refuse_defects = lambda *arguments: None  # the slower way may spill
    for module, name in makers:
        setattr(module, name, _for_racecheck(getattr(module, name)))


def _for_racecheck(make: Callable[..., CudaKernel]) -> Callable[..., CudaKernel]:
    def kernel(*arguments: Any) -> CudaKernel:
        usual = make(*arguments)
        return replace(usual, macros={**usual.macros, "RACECHECK": 1})

    return kernel

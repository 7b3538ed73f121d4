"""The build stage: the kernels that a run needs, compiled or cached, and what they use of the device."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from cudadent42.cases import Case, Operation
from cudadent42.errors import MachineNotReadyError, UsageError
from cudadent42.operations import definition
from cudadent42.preflight.definitions import parse_device
from cudadent42.preflight.runner import chosen_device, gather
from cudadent42.records import BuildFailure, BuildReport, Plan
from flashmoe_science.errors import BuildError, DeviceError
from flashmoe_science.jit.cache import CompileCache, default_cache
from flashmoe_science.jit.limits import device_architecture
from flashmoe_science.jit.records import KernelBuild

if TYPE_CHECKING:
    from flashmoe_science.jit.nvrtc import CudaKernel

OURS = "cudadent42"
"""The implementation whose kernels this project compiles."""

OnProgress = Callable[[int, int, str], None]
"""Told the number of kernels that are done, of all, and the name of one that is being worked on."""

_ARCHITECTURE = re.compile(r"sm_\d{2,3}[af]?")


def build_for(plan: Plan, on_progress: OnProgress) -> BuildReport:
    """The kernels that the plan's cases can lead to on its device; none where our implementation is not raced.

    What adversarial inputs of other shapes need besides is compiled at its first use in verification.
    """
    if OURS not in plan.implementations:
        return BuildReport(())
    return build(plan.device, (), on_progress, plan.cases)


def build(
    device: str, architectures: Sequence[str], on_progress: OnProgress, cases: Sequence[Case] = ()
) -> BuildReport:
    """Build for ``cpu``, for ``cuda:N``, or for named CUDA architectures, which need not be present.

    Given ``cases``, only what they can lead to.

    A kernel that does not compile is a failure in the report. Raises UsageError for architectures that do not
    fit, MachineNotReadyError where something that compiling needs is missing.
    """
    if device == "cpu" and architectures:
        raise UsageError("--arch names CUDA architectures; give --device cuda with it")
    for name in architectures:
        if not _ARCHITECTURE.fullmatch(name):
            raise UsageError(f"--arch {name!r}: expected a CUDA architecture such as sm_80 or sm_90a")
    try:
        if device == "cpu":
            built = _build_cpu(on_progress, cases)
        else:
            built = _build_cuda(architectures or (_architecture(device),), on_progress, cases)
    except DeviceError as error:
        raise MachineNotReadyError(str(error)) from error
    return BuildReport(
        kernels=tuple(item for item in built if isinstance(item, KernelBuild)),
        failures=tuple(item for item in built if isinstance(item, BuildFailure)),
    )


def _operations(cases: Sequence[Case]) -> list[Operation]:
    """Those of the cases; all without any."""
    return list(dict.fromkeys(case.operation for case in cases)) or list(Operation)


def _build_cpu(on_progress: OnProgress, cases: Sequence[Case]) -> list[KernelBuild | BuildFailure]:
    from flashmoe_science import cpu

    names = list(dict.fromkeys(name for item in _operations(cases) for name in definition(item).cpu_kernels))
    built: list[KernelBuild | BuildFailure] = []
    for name in names:
        on_progress(len(built), len(names), f"the CPU kernel {name}, about 10 s at first use")
        try:
            built += cpu.build((name,))
        except BuildError as error:
            built.append(BuildFailure(name, platform.machine(), str(error), error.log))
    return built


def _build_cuda(
    architectures: Sequence[str], on_progress: OnProgress, cases: Sequence[Case]
) -> list[KernelBuild | BuildFailure]:
    from flashmoe_science.jit.nvrtc import compile_kernel

    cache = default_cache()

    def attempt(kernel: CudaKernel) -> KernelBuild | BuildFailure:
        try:
            return compile_kernel(kernel, cache)
        except BuildError as error:
            return BuildFailure(kernel.label, kernel.architecture, str(error), error.log)

    # NVRTC compiles in threads of its caller and without Python's lock.
    wanted = []
    for operation in _operations(cases):
        known = definition(operation)
        kernels = known.cuda_kernels(architectures)
        own = [case for case in cases if case.operation is operation]
        wanted += known.needed(kernels, own) if own else kernels
    built = []
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for kernel, result in zip(wanted, pool.map(attempt, wanted), strict=True):
            built.append(result)
            on_progress(len(built), len(wanted), f"{kernel.function} for {kernel.architecture}")
    return built


def _architecture(device: str) -> str:
    """The architecture to compile for on this machine's GPU."""
    context = gather(device, Path("runs"))
    if context.gpu_index >= len(context.gpu.gpus):
        raise MachineNotReadyError(
            f"there is no GPU for --device {device}; name an architecture with --arch, such as sm_90a"
        )
    major, minor = map(int, context.gpu.gpus[context.gpu_index].compute_capability.split("."))
    return device_architecture(major, minor)


def choose_device(text: str, offline: bool) -> str:
    """``cpu``, ``cuda`` or ``cuda:N`` for what the command line says; ``offline`` where no GPU is needed."""
    device = parse_device(text)
    if device == "auto":
        return "cuda" if offline else chosen_device(gather("auto", Path("runs")))
    return device


def open_cache() -> CompileCache:
    """The compile cache. Raises MachineNotReadyError where it cannot be used."""
    try:
        return default_cache()
    except DeviceError as error:
        raise MachineNotReadyError(str(error)) from error

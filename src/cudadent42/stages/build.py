"""The build stage: the kernels that a run needs, compiled or cached, and what they use of the device."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from cudadent42.base.compile_cache import Cleared, empty_cache
from cudadent42.base.errors import MachineNotReadyError, UsageError
from cudadent42.model.cases import Case
from cudadent42.model.device_names import parse_device
from cudadent42.model.implementations import OURS, is_kernel_file, is_ours, plug_in_file, split_variant
from cudadent42.model.records import BuildFailure, BuildReport, Plan
from cudadent42.native.build import build_file
from cudadent42.operations import definition, names
from cudadent42.preflight.runner import chosen_device, gather
from cudadent42.sandbox.launch import Sandbox
from flashmoe_science.errors import BuildError, DeviceError
from flashmoe_science.jit.cache import CompileCache, default_cache
from flashmoe_science.jit.limits import base_architecture, device_architecture
from flashmoe_science.jit.records import KernelBuild

if TYPE_CHECKING:
    from flashmoe_science.jit.host import InstructionSet
    from flashmoe_science.jit.nvrtc import CudaKernel

OnProgress = Callable[[int, int, str], None]
"""Told the number of kernels that are done, of all, and the name of one that is being worked on."""

_ARCHITECTURE = re.compile(r"sm_\d{2,3}[af]?")


def build_for(plan: Plan, on_progress: OnProgress, sandbox: Sandbox | None = None) -> BuildReport:
    """The kernels of its implementations that the plan's cases can lead to on its device.

    What adversarial inputs of other shapes need besides is compiled at its first use in verification. ``sandbox``
    confines the compilers of other people's files.
    """
    return build(plan.device, (), on_progress, plan.cases, plan.implementations, sandbox)


def build(
    device: str,
    architectures: Sequence[str],
    on_progress: OnProgress,
    cases: Sequence[Case] = (),
    implementations: Sequence[str] = (OURS,),
    sandbox: Sandbox | None = None,
) -> BuildReport:
    """Build for ``cpu``, for ``cuda:N``, or for named CUDA architectures, which need not be present.

    Given ``cases``, only what they can lead to. Of the ``implementations`` this project's and kernel files have
    something to compile; variants for CUDA compile when they are verified, as what they are depends on the GPU.

    A kernel that does not compile is a failure in the report. Raises UsageError for architectures that do not
    fit, MachineNotReadyError where something that compiling needs is missing.
    """
    if device == "cpu" and architectures:
        raise UsageError("--arch names CUDA architectures; give --device cuda with it")
    for name in architectures:
        if not _ARCHITECTURE.fullmatch(name):
            raise UsageError(f"--arch {name!r}: expected a CUDA architecture such as sm_80 or sm_90a")
    kernel_files = [name for name in implementations if is_kernel_file(name)]
    built: list[KernelBuild | BuildFailure] = []
    try:
        if device != "cpu" and not architectures and (OURS in implementations or kernel_files):
            architectures = (_architecture(device),)
        if device == "cpu":
            built += _build_cpu(on_progress, cases, _instruction_sets(implementations))
        elif OURS in implementations:
            built += _build_cuda(architectures, on_progress, cases)
        for done, name in enumerate(kernel_files):
            on_progress(done, len(kernel_files), name)
            built += build_file(name, device.partition(":")[0], architectures, cases, sandbox)
    except DeviceError as error:
        raise MachineNotReadyError(str(error)) from error
    return BuildReport(
        kernels=tuple(item for item in built if isinstance(item, KernelBuild)),
        failures=tuple(item for item in built if isinstance(item, BuildFailure)),
    )


def check_architectures(architectures: Sequence[str], implementations: Sequence[str]) -> None:
    """Raises UsageError where this project's kernels are asked for on one that nothing is known about."""
    if OURS not in implementations:
        return
    for name in architectures:
        try:
            base_architecture(name)
        except DeviceError as error:
            raise UsageError(f"--arch {name!r}: {error}") from error


def buildable(names: Sequence[str]) -> tuple[str, ...]:
    """Whose kernels the build command compiles; this project's without any names.

    Raises UsageError for a name that has no kernels of its own.
    """
    for name in names:
        if is_kernel_file(name):
            plug_in_file(name)
        elif name != OURS:
            raise UsageError(
                f"--implementation: {name!r} has nothing to compile; expected {OURS} or a kernel's .toml"
            )
    return tuple(names) or (OURS,)


def _operations(cases: Sequence[Case]) -> list[str]:
    """Those of the cases; all without any."""
    return list(dict.fromkeys(case.operation for case in cases)) or list(names())


def _instruction_sets(implementations: Sequence[str]) -> list[InstructionSet]:
    """What this project's CPU kernels are compiled for: the one that calls take first, then those of variants."""
    from flashmoe_science.jit.host import InstructionSet, choose_instruction_set

    chosen = [choose_instruction_set()] if OURS in implementations else []
    variants = [split_variant(name)[1] for name in implementations if name != OURS and is_ours(name)]
    return list(dict.fromkeys([*chosen, *map(InstructionSet, variants)]))


def _build_cpu(
    on_progress: OnProgress, cases: Sequence[Case], instruction_sets: Sequence[InstructionSet]
) -> list[KernelBuild | BuildFailure]:
    from flashmoe_science.cpu.library import SOURCES, features_besides
    from flashmoe_science.cpu.moe_quantized import further_features
    from flashmoe_science.jit import host

    names = list(dict.fromkeys(name for item in _operations(cases) for name in definition(item).cpu_kernels))
    bits = sorted({getattr(case, "weight_bits", 0) for case in cases} - {0})
    kernels = [*((name, 0) for name in names), *(("moe_forward", each) for each in bits)]
    built: list[KernelBuild | BuildFailure] = []
    wanted = [(each, *kernel) for each in instruction_sets for kernel in kernels]
    for instruction_set, name, width in wanted:
        on_progress(len(built), len(wanted), f"the CPU kernel {name}, about 10 s at first use")
        macros = {"WEIGHT_BITS": width} if width else {}
        further = (*features_besides(name, instruction_set), *further_features(instruction_set, width))
        source = SOURCES / f"{name}.cpp"
        try:
            built.append(host.build(source, name, instruction_set, macros=macros, further_features=further))
        except BuildError as error:
            built.append(BuildFailure(name, platform.machine(), str(error), error.log))
    return built


def _build_cuda(
    architectures: Sequence[str], on_progress: OnProgress, cases: Sequence[Case]
) -> list[KernelBuild | BuildFailure]:
    from cudadent42.operations import cuda_kernels
    from flashmoe_science.jit.nvrtc import compile_kernel

    cache = default_cache()

    def attempt(kernel: CudaKernel) -> KernelBuild | BuildFailure:
        try:
            return compile_kernel(kernel, cache)
        except BuildError as error:
            return BuildFailure(kernel.label, kernel.architecture, str(error), error.log)

    # NVRTC compiles in threads of its caller and without Python's lock.
    each: list[CudaKernel] = []
    for operation in _operations(cases):
        operation_definition = definition(operation)
        kernels = operation_definition.cuda_kernels(architectures)
        own = [case for case in cases if case.operation == operation]
        each += operation_definition.needed(kernels, own) if own else kernels
    if not cases:
        each += cuda_kernels.kernels(architectures)  # what belongs to no operation, too
    # Operations share kernels: gradients need the forward pass too.
    wanted = list({(kernel.label, kernel.architecture): kernel for kernel in each}.values())
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


def emptied_cache() -> tuple[Path, Cleared]:
    """The compile cache's directory and what was removed from it. Raises MachineNotReadyError where it cannot be."""
    try:
        return empty_cache()
    except DeviceError as error:
        raise MachineNotReadyError(str(error)) from error

"""The build stage of versions, in the worker's process: their own Python compiles their own kernels.

All versions share the cache of compiled kernels, which is keyed by content: what two of them have in common is built
once, and what an earlier race has built is not built again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

from cudadent42.base.errors import MachineNotReadyError, UsageError
from cudadent42.base.serialise import decode, encode
from cudadent42.model.events import BUILDING, Doing, Event, KernelBuilt, KernelFailed, Message, Progress
from cudadent42.model.implementations import is_kernel_file, split_variant, why_not
from cudadent42.model.records import BuildFailure, Plan, Version
from cudadent42.native.build import build_file
from cudadent42.operations import definition
from cudadent42.versions.loading import import_module
from cudadent42.versions.version import implementation, kernel_file, package
from flashmoe_science.jit.limits import device_architecture
from flashmoe_science.jit.records import KernelBuild


def build_versions(
    plan: Plan, *, emit: Callable[[Event], None], mark: Callable[[Doing], None], barred: Collection[str]
) -> None:
    """Build what each version needs on the plan's device; an event for every kernel.

    ``barred`` are versions whose build took a worker along. A Python file of somebody else's tree builds its kernels at
    its first call; that it can be imported, and has what is raced, is asked here.
    """
    for index, (name, version) in enumerate(plan.versions.items()):
        emit(Progress("build", index, len(plan.versions), version.revision, index / len(plan.versions)))
        if name in barred:
            continue
        mark(Doing(index, name, name, BUILDING))
        if is_kernel_file(version.entry):
            _build_file(name, version, plan, emit)
            continue
        try:
            made = implementation(name, plan.operation, plan.versions)  # importing it is part of building it
            if reason := why_not(made, plan.device):
                raise UsageError(reason)
            own = package(name, plan.versions)
            if own is None:
                continue
            errors = import_module(f"{own.__name__}.errors", version.revision)
        except UsageError as error:
            emit(KernelFailed(BuildFailure(name, plan.device, str(error))))
            continue
        try:
            for built in _builds(own, version, plan):
                emit(KernelBuilt(decode(KernelBuild, encode(built))))
        except (AttributeError, TypeError, ValueError) as error:
            emit(
                Message(
                    f"{name} cannot be built beforehand ({type(error).__name__}: {error}); "
                    "its kernels are compiled at their first call"
                )
            )
        except errors.DeviceError as error:
            raise MachineNotReadyError(f"{name}: {error}") from error
        except errors.BuildError as error:
            failure = BuildFailure(name, plan.device, str(error), str(getattr(error, "log", "")))
            emit(KernelFailed(failure))


def _build_file(name: str, version: Version, plan: Plan, emit: Callable[[Event], None]) -> None:
    """The kernels of a TOML file; one that makes no sense is a version that does not build."""
    device = plan.device.partition(":")[0]
    architectures = (_architecture(plan),) if device == "cuda" else ()
    try:
        builds = build_file(str(kernel_file(version)), device, architectures, plan.cases)
    except UsageError as error:
        builds = [BuildFailure(name, plan.device, str(error))]
    for built in builds:
        emit(KernelFailed(built) if isinstance(built, BuildFailure) else KernelBuilt(built))


def _architecture(plan: Plan) -> str:
    import torch

    return device_architecture(*torch.cuda.get_device_capability(plan.device))


def _builds(own: ModuleType, version: Version, plan: Plan) -> Iterator[Any]:
    """Kernel builds of the version, as records of its own."""
    backend = import_module(f"{own.__name__}.{plan.device.partition(':')[0]}", own.__name__)
    if plan.device == "cpu":
        yield from backend.build(*_of_variant(own, version, plan))
        return
    if version.entry:
        return  # what a variant is depends on the GPU and the case: it compiles when it is verified
    compile_kernel = import_module(f"{own.__name__}.jit.nvrtc", own.__name__).compile_kernel
    cache = import_module(f"{own.__name__}.jit.cache", own.__name__).default_cache()
    kernels = definition(plan.operation).needed(backend.kernels((_architecture(plan),)), plan.cases)
    # NVRTC compiles in threads of its caller and without Python's lock.
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        yield from pool.map(lambda kernel: compile_kernel(kernel, cache), kernels)


def _of_variant(own: ModuleType, version: Version, plan: Plan) -> tuple[Any, ...]:
    """The kernels of a CPU variant and its instruction set; nothing for those that calls take."""
    _, named = split_variant(version.entry)
    if named is None:
        return ()
    host = import_module(f"{own.__name__}.jit.host", own.__name__)
    return definition(plan.operation).cpu_kernels, host.InstructionSet(named)

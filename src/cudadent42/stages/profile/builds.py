"""Which of a run's compiled kernels is the profiled one, and what it is made of."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cudadent42.model.cases import Case
from cudadent42.operations import definition
from cudadent42.profiles.quantities import main_launch
from cudadent42.profiles.records import Launch, Profile
from cudadent42.stages.profile import sass
from flashmoe_science.errors import BuildError, DeviceError, InputError
from flashmoe_science.jit.limits import device_architecture
from flashmoe_science.jit.records import KernelBuild

if TYPE_CHECKING:
    from flashmoe_science.cuda.device import Device
    from flashmoe_science.jit.nvrtc import CudaKernel

_VERSION = re.compile(r"(\d+)\.(\d+).*")


def profiled_build(
    builds: Sequence[KernelBuild], profile: Profile, case: Case, device: Device | None
) -> tuple[KernelBuild | None, str]:
    """The build that was profiled, or why it is not known.

    It is the one that the case leads to on the device, by the choice that this source makes, if it has the name,
    threads, registers and shared memory of the profiled launch. Otherwise it is the only one that has them.
    """
    mine = [build for build in builds if build.resources is not None]
    if not mine:
        return None, "no kernel of this project was compiled for it"
    main = main_launch(profile)
    fitting = mine if main is None else [build for build in mine if _fits(build, main)]
    if not fitting:
        return None, f"none of the {len(mine)} compiled kernels has the shape of the launch"
    try:
        chosen = None if device is None else definition(case.operation).compiled(case, device)
    except (DeviceError, InputError, BuildError) as error:
        return None, f"which kernel the case takes cannot be told: {error}"
    if chosen is not None:
        fitting = [build for build in fitting if _is(build, chosen)] or (fitting if main is not None else [])
    if not fitting:
        return None, "none of the compiled kernels is the one that this source takes for the case"
    if len({build.key for build in fitting}) > 1:
        return None, f"{len(fitting)} of the compiled kernels fit"
    return fitting[0], ""


def _fits(build: KernelBuild, launch: Launch) -> bool:
    table = build.resources
    return (
        table is not None
        and build.recipe.kernel == launch.kernel
        and table.threads_per_block == launch.block_threads
        and table.registers_per_thread == launch.registers
        and table.static_shared_bytes + table.dynamic_shared_bytes == launch.shared_bytes
    )


def _is(build: KernelBuild, kernel: CudaKernel) -> bool:
    return build.recipe.kernel == kernel.function and build.recipe.configuration == dict(kernel.macros)


def device_of_run(facts: Mapping[str, object]) -> Device | None:
    """The GPU of ``MachineReport.facts``, as far as choosing a kernel depends on it; None where they do not say."""
    from flashmoe_science.cuda.device import Device

    capability, compiler = str(facts.get("gpu_compute_capability") or ""), str(facts.get("nvrtc") or "")
    multiprocessors = facts.get("gpu_multiprocessors")
    versions = _VERSION.fullmatch(capability), _VERSION.fullmatch(compiler)
    if versions[0] is None or versions[1] is None or not isinstance(multiprocessors, int):
        return None
    try:
        architecture = device_architecture(int(versions[0][1]), int(versions[0][2]))
    except DeviceError:
        return None
    # The size of L2 decides the order of the work, not the kernel.
    return Device(0, architecture, multiprocessors, 0, (int(versions[1][1]), int(versions[1][2])))


def with_build(profile: Profile, build: KernelBuild | None) -> Profile:
    """With the resource table and the instructions of a build, as far as they can be had here."""
    if build is None or build.resources is None:
        return profile
    counts = sass.count(build.artifact) if build.artifact.is_file() else None
    notes = profile.notes
    if counts is None and not build.artifact.is_file():
        notes = (*notes, "the compiled kernel is not on this machine, so its instructions are not counted")
    elif counts is None and sass.find() is None:
        notes = (*notes, sass.MISSING)
    return replace(profile, resources=build.resources, instructions=counts or {}, notes=notes)

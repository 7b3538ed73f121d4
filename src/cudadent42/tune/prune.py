"""What leaves before anything runs: arms that do not compile, spill, or do not fit, and arms of equal machine code.

Needs no GPU: NVRTC's report says what a kernel takes of a target that is not there.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from cudadent42.base.errors import UnwritableError, UsageError
from cudadent42.model.cases import Case
from cudadent42.model.implementations import UnsupportedCaseError
from cudadent42.native.build import build_file, code_of
from cudadent42.operations import definition, numerics
from cudadent42.tune.space import DEFAULT, Arm, Space
from flashmoe_science.errors import BuildError, NoRoomError
from flashmoe_science.jit.records import KernelBuild, Resources

if TYPE_CHECKING:
    from flashmoe_science.cuda.device import Device

LAUNCH_DECIDES = frozenset(("portable", "hopper"))
"""The library's kernels whose launches follow from code, threads and shared memory alone. Of others, only equal
configurations count as the same arm."""


@dataclass(frozen=True)
class Target:
    """What arms are compiled for."""

    device: str
    """``cpu`` or ``cuda``."""
    architecture: str = ""
    """Of CUDA: ``sm_90``."""
    gpu: str = ""
    """A name of `flashmoe_science.cuda.device.GPUS`; of the library's kernels alone, where this machine has no GPU."""


@dataclass(frozen=True)
class CompiledArm:
    """What compiling an arm said, by ``Case.id``."""

    arm: str
    code: dict[str, str] = field(default_factory=dict)
    """Digest of the machine code and of the launch that a case gets."""
    refused: dict[str, str] = field(default_factory=dict)
    """Why the arm is not raced on a case."""
    resources: dict[str, str] = field(default_factory=dict)
    """``128 registers, 48 KiB``."""


def compile_arm(
    space: Space, arm: Arm, implementation: str, cases: Sequence[Case], target: Target
) -> CompiledArm:
    """Compile an arm for every case. Defects of the default are its own: it is what there is.

    What an arm of the library's that is raced takes to be verified is compiled too, into the cache: here as many are
    compiled at once as there are processors, there one by one while a GPU waits.
    """
    compiled = (
        _library(implementation, cases, target) if space.of_library else _file(implementation, cases, target)
    )
    code: dict[str, str] = {}
    refused: dict[str, str] = {}
    resources: dict[str, str] = {}
    for case in cases:
        result = compiled(case)
        if isinstance(result, str):
            refused[case.id] = result
            continue
        reason = "" if arm.name == DEFAULT else _defect(result.resources)
        if reason:
            refused[case.id] = reason
        else:
            code[case.id] = result.digest
        if result.resources:
            resources[case.id] = "; ".join(map(_said, result.resources))
    if code and space.of_library:
        compile_to_verify(implementation, cases, target)
    return CompiledArm(arm.name, code, refused, resources)


@dataclass(frozen=True)
class _Code:
    digest: str
    resources: tuple[Resources, ...] = ()


Compiled = Callable[[Case], _Code | str]
"""The code of a case, or why there is none."""


def _file(implementation: str, cases: Sequence[Case], target: Target) -> Compiled:
    """All that the cases need of a kernel's file, compiled in one process."""
    architectures = (target.architecture,) if target.architecture else ()
    built = build_file(implementation, target.device, architectures, cases)

    def code(case: Case) -> _Code | str:
        own = code_of(Path(implementation), case, target.architecture, built)
        if isinstance(own, str):
            return _short(own)
        build, launch = own
        digest = _digest(build.artifact.read_bytes(), launch)
        return _Code(digest, () if build.resources is None else (build.resources,))

    return code


def _library(implementation: str, cases: Sequence[Case], target: Target) -> Compiled:
    from flashmoe_science.jit.nvrtc import CudaKernel, compile_kernel

    if target.device == "cpu":
        raise UsageError("the library's CPU kernels have nothing to tune; name a GPU, or a kernel in a file")
    device = _device(target)
    compiled: dict[tuple[str | int, ...], tuple[KernelBuild, bytes]] = {}

    def build_of(kernel: CudaKernel) -> tuple[KernelBuild, bytes]:
        """Most cases of an arm take the same few kernels."""
        launch = kernel.threads_per_block, kernel.dynamic_shared_bytes, kernel.cluster_blocks
        key = (kernel.source, kernel.label, *launch)
        if key not in compiled:
            build = compile_kernel(kernel, allow_defects=True)
            compiled[key] = build, build.artifact.read_bytes()
        return compiled[key]

    def code(case: Case) -> _Code | str:
        try:
            configured = definition(case.operation).configured(implementation, case, device)
            built = [build_of(kernel) for kernel in configured.kernels]
        except NoRoomError as error:
            raise UnwritableError(str(error)) from error
        except (UnsupportedCaseError, BuildError) as error:
            return _short(str(error))
        choice = configured.choice
        own = "" if choice.kernel.value in LAUNCH_DECIDES else repr(choice.configuration)
        parts = [(text, _launch(build)) for build, text in built]
        digest = _digest(
            b"".join(text for text, _ in parts), repr((choice.kernel.value, own, [b for _, b in parts]))
        )
        return _Code(digest, tuple(build.resources for build, _ in built if build.resources))

    return code


def compile_to_verify(implementation: str, cases: Sequence[Case], target: Target) -> int:
    """Into the cache, the kernels that a library's arm takes on the adversarial inputs of the cases' dtypes, which have
    sizes and activations of their own; how many there are. What does not compile is said where it is verified."""
    from flashmoe_science.jit.nvrtc import CudaKernel, compile_kernel

    device = _device(target)
    kernels: dict[str, CudaKernel] = {}
    for dtype in dict.fromkeys(case.dtype for case in cases):
        for hard in numerics(cases[0]).hard_inputs(dtype):
            if not hard.asked_on("cuda"):
                continue
            with suppress(UnsupportedCaseError, BuildError):
                configured = definition(hard.case.operation).configured(implementation, hard.case, device)
                kernels |= {kernel.label: kernel for kernel in configured.kernels}
    for kernel in kernels.values():
        with suppress(BuildError):
            compile_kernel(kernel, allow_defects=True)
    return len(kernels)


def _device(target: Target) -> Device:
    from flashmoe_science.cuda.device import GPUS, device_of

    return GPUS[target.gpu] if target.gpu else device_of(0)


_LABEL = re.compile(r"^\w+\[[^\]]*\] ")


def _short(reason: str) -> str:
    """Its first line, without the kernel's label: the arm's name says that, and equal reasons are counted together."""
    return _LABEL.sub("it ", reason.splitlines()[0])


def _launch(build: KernelBuild) -> tuple[int, int]:
    resources = build.resources
    return (resources.threads_per_block, resources.dynamic_shared_bytes) if resources else (0, 0)


def _digest(code: bytes, launch: str) -> str:
    return hashlib.sha256(hashlib.sha256(code).digest() + launch.encode()).hexdigest()


def _defect(resources: Sequence[Resources]) -> str:
    """What makes a kernel slower than it should be, as the end of a sentence about it; empty where nothing does."""
    spilt = sum(each.spill_store_bytes + each.spill_load_bytes for each in resources)
    if spilt:
        return f"spills {spilt} bytes of registers"
    stack = max((each.stack_bytes for each in resources), default=0)
    return f"has a stack frame of {stack} bytes" if stack else ""


def _said(resources: Resources) -> str:
    shared = resources.static_shared_bytes + resources.dynamic_shared_bytes
    return f"{resources.registers_per_thread} registers, {shared / 1024:.0f} KiB"


def representatives(compiled: Sequence[CompiledArm], case: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """The arms that are raced on a case (``Case.id``), and why the others are not.

    Of arms with equal code the first stands for all: the default, where it is among them.
    """
    first: dict[str, str] = {}
    out: dict[str, str] = {}
    for item in compiled:
        digest = item.code.get(case)
        if digest is None:
            out[item.arm] = item.refused.get(case, "it was not compiled")
        elif digest in first:
            out[item.arm] = f"the same machine code as {first[digest]}"
        else:
            first[digest] = item.arm
    return tuple(first.values()), out

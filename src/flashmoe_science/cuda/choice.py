"""Which kernel of an operation takes a call: what the choice has in common for all operations."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

import torch

from flashmoe_science.cuda.device import Device
from flashmoe_science.cuda.launch import LaunchPlan
from flashmoe_science.errors import (
    BuildError,
    DeviceError,
    InputError,
    KernelDefectError,
    NoKernelError,
)
from flashmoe_science.jit.nvrtc import CudaKernel, sources_digest
from flashmoe_science.tuned.configuration import changed, typed
from flashmoe_science.tuned.lookup import TunedEntry, lookup, warn_unusable

_UNFIT = (InputError, ArithmeticError)
"""What a configuration raises that makes no sense: tiles that do not divide each other, by an ArithmeticError."""

P = TypeVar("P")
P_contra = TypeVar("P_contra", contravariant=True)


def asked_for(variable: str, choices: Sequence[str], default: str) -> str:
    """What a variable of the environment names, of several choices; the default where it is empty.

    Raises:
        InputError: it names something else.
    """
    named = os.environ.get(variable) or default
    if named not in choices:
        raise InputError(f"{variable}={named!r}; expected one of {', '.join(choices)}")
    return named


@dataclass(frozen=True)
class Choice:
    """Which kernel a problem takes, and how it is configured."""

    kernel: Enum
    """A member of the operation's own enumeration of its kernels."""
    configuration: Any
    """What the kernel's module takes, e.g. `configs.attention.portable.PortableConfiguration`."""
    reason: str = ""


class KernelModule(Protocol[P_contra]):
    """What the module of one kernel provides. To add a kernel: such a module, a member of the operation's enumeration
    of kernels, and a line in its `select`.
    """

    def choose(self, problem: P_contra, device: Device) -> Choice | None:
        """The configuration for a problem; None if this kernel cannot or should not take it."""
        ...

    def why_not(self, problem: P_contra, device: Device) -> str | None:
        """Why `choose` gives nothing for a problem, as the end of a sentence about the kernel; None if it does."""
        ...

    def kernels(self, architecture: str) -> list[CudaKernel]:
        """Everything that `choose` can lead to on an architecture, for building ahead of time."""
        ...

    def check(self, problem: P_contra, configuration: Any) -> None:
        """InputError unless the kernel can do the problem in this configuration, whether or not `choose` would."""
        ...

    def plan(
        self, problem: P_contra, configuration: Any, device: Device, *, allow_defects: bool = False
    ) -> LaunchPlan:
        """Check, compile (or find) what it needs, load it, and prepare the launch. The device is current.

        KernelDefectError, unless they are allowed, if a kernel spills and the like: see `jit.nvrtc.compile_kernel`.
        """
        ...


@dataclass(frozen=True)
class Refusal:
    """Why a kernel does not take a problem."""

    kernel: Enum
    reason: str


def not_preferred(taken: Enum, why: str = "is preferred") -> str:
    """The reason of a kernel that could take the problem which another one is taken for."""
    return f"it could, but {taken.value} {why} for this problem"


DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
"""What the kernels compute with, as tables name it."""


@dataclass(frozen=True)
class Tuned(Generic[P]):
    """How tables of tuned configurations speak of an operation's kernels and problems."""

    operation: str
    """In ``attention.portable``."""
    configurations: Mapping[Enum, type]
    """Of the kernels that a table may configure."""
    tunable: Mapping[Enum, Mapping[str, int]]
    """The fields of each that a table may set, and the least value of those that are numbers."""
    sources: Mapping[Enum, tuple[str, ...]]
    """What they are compiled from, below the folder of the kernels."""
    fields: Callable[[P], Mapping[str, int | bool | str]]
    """A problem, by the names that regions use."""
    declined: Mapping[Enum, Callable[[P, Device], Any]] = field(default_factory=dict)
    """How kernels that leave some problems to faster ones would do them."""

    def names(self) -> dict[str, Enum]:
        """The kernels, as tables name them."""
        return {f"{self.operation}.{kind.value}": kind for kind in self.configurations}

    def digest(self, name: str) -> str:
        """Of what the kernel of that name is compiled from."""
        return sources_digest(self.sources[self.names()[name]])


@dataclass(frozen=True)
class Selection(Generic[P]):
    """The kernels of one operation, and the choice among them."""

    modules: Mapping[Enum, KernelModule[P]]
    """In order of preference: the first that takes a problem gets it. The last that does is taken even if this compiler
    makes all of them with defects.
    """
    override_variable: str
    """Environment variable that names the kernel that every call must take; read at a shape's first call."""
    noun: str
    """E.g. ``CUDA kernel``."""
    describe: Callable[[P], str]
    """A problem, in an error message."""
    instead: str
    """What to use where there is no kernel."""
    preference: Callable[[P, Device], Sequence[Enum]] | None = None
    """Another order for some problems."""
    tuned: Tuned[P] | None = None
    """How tables of tuned configurations speak of it; None: none is asked."""

    def kernels(self, architecture: str) -> list[CudaKernel]:
        """Everything that a call could take on an architecture, each kernel once."""
        built = [kernel for module in self.modules.values() for kernel in module.kernels(architecture)]
        return list({kernel.label + kernel.architecture: kernel for kernel in built}.values())

    def select(self, problem: P, device: Device) -> Choice:
        """The kernel and configuration for a problem.

        Raises:
            InputError: the override variable names no kernel, or one that cannot take this problem.
            NoKernelError: no kernel can.
        """
        named = os.environ.get(self.override_variable)
        first = next(self._choices(problem, device, named), None)
        if first is not None:
            return first
        what = f"{self.describe(problem)} on {device.architecture}"
        if named:
            raise InputError(
                f"the kernel {named!r} that {self.override_variable} asks for cannot take {what}; unset it"
            )
        raise NoKernelError(f"no {self.noun} takes {what}; use {self.instead}")

    def others(self, problem: P, device: Device, choice: Choice) -> list[Refusal]:
        """Why every kernel but that of `choice`, which is `select`'s, does not take a problem."""
        named = os.environ.get(self.override_variable)
        order = list(self._order(problem, device))
        refusals = []
        for index, kind in enumerate(order):
            if kind is choice.kernel:
                continue
            reason = f"{self.override_variable} asks for another" if named else None
            if reason is None:
                reason = self.modules[kind].why_not(problem, device)
            if reason is None:
                preferred = index > order.index(choice.kernel)
                reason = not_preferred(
                    choice.kernel, "is preferred" if preferred else "was tuned and is faster"
                )
            refusals.append(Refusal(kind, reason))
        return refusals

    def plan(self, problem: P, device: Device, choice: Choice | None = None) -> LaunchPlan:
        """The launch plan of `select`'s kernel, or of `choice`. The device is current.

        A tuned configuration that does not build or cannot be launched is passed over, with one warning. A kernel that
        this compiler spills registers of and the like is passed over, with a warning, for the next one
        that it does not; if there is none, the last is taken as it is. Not if `choice` or the override variable asks
        for that kernel.

        Raises:
            KernelDefectError: the kernel that was asked for has such a defect.
            InputError, NoKernelError: see `select`.
            BuildError, DeviceError: see `driver.load`.
        """
        if choice is None and not os.environ.get(self.override_variable):
            for entry, candidate in self._tuned(problem, device):
                try:
                    return self.modules[candidate.kernel].plan(problem, candidate.configuration, device)
                except (*_UNFIT, BuildError, DeviceError) as error:
                    warn_unusable(entry, _in_a_line(error))
            candidates = list(self._usual(problem, device, None))
            for candidate in candidates:
                try:
                    return self.modules[candidate.kernel].plan(problem, candidate.configuration, device)
                except KernelDefectError as defect:
                    warnings.warn(f"{defect}; taking another kernel", RuntimeWarning, stacklevel=2)
            if candidates:
                order = list(self.modules)
                last = max(candidates, key=lambda candidate: order.index(candidate.kernel))
                module = self.modules[last.kernel]
                return module.plan(problem, last.configuration, device, allow_defects=True)
        chosen = self.select(problem, device) if choice is None else choice
        return self.modules[chosen.kernel].plan(problem, chosen.configuration, device)

    def _choices(self, problem: P, device: Device, named: str | None) -> Iterator[Choice]:
        """What the kernels that take the problem would use, the preferred one first."""
        if not named:
            yield from (tuned for _, tuned in self._tuned(problem, device))
        yield from self._usual(problem, device, named)

    def _usual(self, problem: P, device: Device, named: str | None) -> Iterator[Choice]:
        """The same without what tables have."""
        for kind in self._order(problem, device) if not named else (self._named(named),):
            choice = self.modules[kind].choose(problem, device)
            if choice is not None:
                yield choice

    def _tuned(self, problem: P, device: Device) -> Iterator[tuple[TunedEntry, Choice]]:
        """What tables have for the problem. What its kernel cannot do now is passed over, with one warning.

        An entry that the usual choice has caught up with ends the list: it is the usual choice that is wanted.
        """
        if self.tuned is None or not device.name:
            return
        names = self.tuned.names()
        for entry in lookup(
            tuple(names), self.tuned.digest, device.name, device.multiprocessors, self.tuned.fields(problem)
        ):
            kind = names[entry.entry.kernel]
            try:
                configuration = self._configured(self.tuned, kind, problem, device, entry)
            except _UNFIT as error:
                warn_unusable(entry, _in_a_line(error))
                continue
            usual = next(self._usual(problem, device, None), None)
            if usual is not None and (usual.kernel, usual.configuration) == (kind, configuration):
                return
            yield entry, Choice(kind, configuration, entry.reason)

    def _configured(
        self, tuned: Tuned[P], kind: Enum, problem: P, device: Device, entry: TunedEntry
    ) -> object:
        """The kernel's configuration with an entry's settings. Raises InputError where it cannot do the problem."""
        module = self.modules[kind]
        settings = typed(tuned.configurations[kind], entry.entry.settings, tuned.tunable[kind])
        usual = module.choose(problem, device)
        if usual is not None:
            configuration = usual.configuration
        elif kind in tuned.declined:
            configuration = tuned.declined[kind](problem, device)
        else:
            raise InputError(f"the {kind.value} kernel does not take it: {module.why_not(problem, device)}")
        configuration = changed(configuration, settings)
        module.check(problem, configuration)
        return configuration

    def _order(self, problem: P, device: Device) -> Sequence[Enum]:
        return tuple(self.modules) if self.preference is None else self.preference(problem, device)

    def _named(self, name: str) -> Enum:
        kinds = {kind.value: kind for kind in self.modules}
        if name not in kinds:
            raise InputError(
                f"{self.override_variable}={name!r} names no kernel; expected one of {', '.join(kinds)}"
            )
        return kinds[name]


def _in_a_line(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return (
        lines[0]
        if isinstance(error, (InputError, BuildError, DeviceError))
        else f"arithmetic fails: {lines[0]}"
    )

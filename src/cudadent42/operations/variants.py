"""Variants of this project's kernels: implementations whose names say in brackets which kernel a call takes, and how it
is configured.

``cudadent42[portable]`` is the CUDA kernel of that name (the values of the operation's enumeration of kernels) as it is
configured for the case, ``cudadent42[portable,block_n=48,overlap=yes]`` the same with two fields of its configuration
set, and ``cudadent42[avx2]`` the CPU kernel for that instruction set. Nothing here imports torch before a case is
prepared.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from cudadent42.base.errors import UsageError
from cudadent42.base.toml import did_you_mean
from cudadent42.model.implementations import (
    OUR_PACKAGE,
    OURS,
    Implementation,
    Prepare,
    UnsupportedCaseError,
    Varies,
    split_variant,
)

if TYPE_CHECKING:
    from flashmoe_science.cuda.choice import Choice, Selection
    from flashmoe_science.cuda.device import Device

P = TypeVar("P")

COMPILING_S = 120.0
"""The first call of a variant compiles its kernels."""

_NOT_SET = "ablation"
"""The field of a configuration that makes results wrong on purpose."""
_TRUTH = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}


@dataclass(frozen=True)
class Variant:
    """What brackets say."""

    kernel: str
    """The CUDA kernel's name, or the CPU's instruction set."""
    changes: Mapping[str, object]
    """Fields of the CUDA kernel's configuration, a dot before those of a part of it: ``up.stages``."""
    package: str = OUR_PACKAGE
    """Whose kernels they are: this one's, or those of a version of it under its private name."""

    def module(self, name: str) -> Any:
        """``name`` in the package. Raises ImportError where a version has none of that name."""
        return importlib.import_module(f"{self.package}.{name}")

    def instruction_set(self) -> Any:
        """Of a CPU kernel, as its package has it."""
        return self.module("jit.host").InstructionSet(self.kernel)


@dataclass(frozen=True)
class Variants:
    """The variants of one operation."""

    configurations: Mapping[str, type]
    """Of the CUDA kernels by name: the records whose fields can be set."""
    example: str
    """A name that sets a field."""
    prepare: Callable[[Variant], Prepare]
    package: str = OUR_PACKAGE

    def implementation(self, base: Implementation, name: str) -> Implementation:
        """The variant of ``base`` whose full name this is. Raises UsageError, which names the variants there are."""
        variant = self.parse(name)
        _, text = split_variant(name)
        on_cpu = variant.kernel in _instruction_sets(self.package) and not variant.changes
        on_cuda = variant.kernel in self.configurations
        return replace(
            base,
            name=name,
            description=f"{base.description}, {text}",
            devices=("cpu",) * on_cpu + ("cuda",) * on_cuda,
            prepare=self.prepare(variant),
            unavailable=lambda device: _missing(variant.kernel) if device == "cpu" else None,
            compiling_s=COMPILING_S,
            variants=None,
        )

    def words(self) -> str:
        """Which there are."""
        return (
            f"On CUDA: {', '.join(self.configurations)}, and fields of their configurations, as in {self.example}. "
            f"On CPU: {', '.join(_instruction_sets(self.package))}"
        )

    def parse(self, name: str) -> Variant:
        """What the brackets of a full name say. Raises UsageError, which names the variants there are."""
        _, text = split_variant(name)
        assert text is not None
        kernel, *assignments = text.split(",")
        names = (*self.configurations, *_instruction_sets(self.package))
        if kernel not in names:
            raise UsageError(
                f"{name!r}: there is no variant {kernel!r}{did_you_mean(kernel, names)}. {self.words()}"
            )
        if assignments and kernel not in self.configurations:
            raise UsageError(
                f"{name!r}: the CPU kernel has nothing to set; expected {split_variant(name)[0]}[{kernel}]"
            )
        changes: dict[str, object] = {}
        for assignment in assignments:
            field, _, value = assignment.partition("=")
            kinds = settable(self.configurations[kernel])
            if field not in kinds:
                raise UsageError(
                    f"{name!r}: the {kernel} kernel has no field {field!r}{did_you_mean(field, kinds)}; "
                    f"it has {', '.join(kinds)}"
                )
            changes[field] = _value(name, field, value, kinds[field])
        return Variant(kernel, changes, self.package)


def configurations(folder: str, **records: str) -> dict[str, type]:
    """The records of kernels by the kernel's name, each in the module of that name below ``folder``."""
    return {
        kernel: getattr(importlib.import_module(f"{folder}.{kernel}"), record)
        for kernel, record in records.items()
    }


@cache
def settable(configuration: type) -> Mapping[str, type]:
    """Type by name of the fields that can be set, those of its parts behind the part's name and a dot."""
    hints = get_type_hints(configuration)
    types: dict[str, type] = {}
    for field in fields(configuration):
        kind = hints[field.name]
        if is_dataclass(kind):
            assert isinstance(kind, type)
            types |= {f"{field.name}.{inner}": each for inner, each in settable(kind).items()}
        elif field.name != _NOT_SET:
            types[field.name] = kind
    return MappingProxyType(types)


def _value(name: str, field: str, text: str, kind: type) -> object:
    if kind is bool:
        if text in _TRUTH:
            return _TRUTH[text]
        expected = "yes or no"
    elif issubclass(kind, Enum):
        values = {str(member.value): member for member in kind}
        if text in values:
            return values[text]
        expected = ", ".join(values)
    else:
        if text.isascii() and text.isdigit() and len(text) < 10:
            return int(text)
        expected = "a whole number, 0 or more"
    raise UsageError(f"{name!r}: {field} is {text!r}; expected {expected}")


def choice(
    variant: Variant,
    selection: Selection[P],
    problem: P,
    device: Device,
    declined: Mapping[Any, Callable[[P, Device], Any]] | None = None,
) -> Choice:
    """What the variant is for a problem.

    ``declined``: how kernels that leave some problems to faster ones would do them. Raises UnsupportedCaseError for a
    problem that the kernel cannot take.
    """
    from flashmoe_science.tuned.configuration import changed

    kind = next(each for each in selection.modules if each.value == variant.kernel)
    module = selection.modules[kind]
    usual = module.choose(problem, device)
    if usual is not None:
        configuration = usual.configuration
    elif kind in (declined or {}):
        configuration = (declined or {})[kind](problem, device)
    else:
        raise UnsupportedCaseError(
            f"the {kind.value} kernel does not take it: {module.why_not(problem, device)}"
        )
    made: Choice = variant.module("cuda.choice").Choice(
        kind, changed(configuration, variant.changes), "asked for by its name"
    )
    return made


def chosen(
    name: str,
    variants: Variants,
    variant_choice: Callable[[Variant, P, Device], Choice],
    selection: Selection[P],
    problem: P,
    device: Device,
) -> Choice:
    """What the implementation of that name, ours or a variant of it, takes for a problem. Raises what `choice` and the
    kernel's check raise."""
    if name == OURS:
        return selection.select(problem, device)
    made = variant_choice(variants.parse(name), problem, device)
    selection.modules[made.kernel].check(problem, made.configuration)
    return made


def compiled(variant: Variant, selection: Selection[P], problem: P, device: Device, made: Choice) -> Choice:
    """The choice, compiled and loaded. Raises UnsupportedCaseError where it does not compile as it should: registers
    spilt, too much shared memory."""
    variant.module("cuda.driver").make_context_current(device.index)
    try:
        selection.plan(problem, device, made)
    except variant.module("errors").BuildError as error:
        raise UnsupportedCaseError(f"it does not build: {str(error).splitlines()[0]}") from error
    return made


def makes_variants(variants_of: Callable[[str], Variants]) -> Varies:
    """`Implementation.variants`, given an operation's variants in a package."""

    def implementation(base: Implementation, name: str, package: str = OUR_PACKAGE) -> Implementation:
        return variants_of(package).implementation(base, name)

    return implementation


@cache
def _instruction_sets(package: str) -> tuple[str, ...]:
    return tuple(each.value for each in importlib.import_module(f"{package}.jit.host").InstructionSet)


def _missing(name: str) -> str | None:
    """What this CPU lacks of an instruction set."""
    from flashmoe_science.jit.host import InstructionSet, cpu_features

    missing = sorted(set(InstructionSet(name).features) - cpu_features())
    return f"the CPU lacks {', '.join(missing)}" if missing else None

"""What an implementation is, and how a plug-in is named. Which ones there are is `cudadent42.registry`'s to know.

A plug-in is ``path/to/file.py:callable``, called as its operation says (docs/your-own-kernel.md), a kernel's
``path/to/file.toml`` (`cudadent42.native`), or an ``Implementation`` published under the entry-point group
``cudadent42.implementations``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from cudadent42.base import parcels
from cudadent42.base.errors import UsageError
from cudadent42.base.reading import expanded
from cudadent42.model.cases import DEFAULT_OPERATION
from flashmoe_science.errors import InputError, NoKernelError

if TYPE_CHECKING:
    from torch import Tensor

Call = Callable[[], "Tensor"]

Prepare = Callable[[Any, Any], Call]
"""From a case and its inputs, of the types of one operation, to a call."""

OURS = "cudadent42"
"""The implementation whose kernels this project compiles."""

OUR_PACKAGE = "flashmoe_science"
"""Where they are."""

ENTRY_POINT_GROUP = "cudadent42.implementations"


class UnsupportedCaseError(Exception):
    """An implementation says that it does not do this case; the case is skipped for it, with the reason."""


NOT_DONE = (UnsupportedCaseError, NotImplementedError, InputError, NoKernelError)
"""What says that a case is not done, rather than done wrongly. The last two are those of this project's kernels,
named here and not translated call by call, because that would be timed with them."""


def _available(device: str) -> str | None:
    return None


@dataclass(frozen=True)
class Planned:
    """A call, with what is done once for all layers of a step before it and its like, such as reading lengths on the
    host. Its `Prepare` has done that once; the stage bench times the call without it, and it alone."""

    call: Call
    plan: Callable[[], Any]
    """May be repeated: leaves what the call needs as it was. What it returns is looked at by nobody."""

    def __call__(self) -> Tensor:
        return self.call()


def unplanned(call: Call) -> Call:
    """What is timed as a call."""
    return call.call if isinstance(call, Planned) else call


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation."""

    name: str
    description: str
    devices: tuple[str, ...]
    """Device types: ``cpu``, ``cuda``."""
    prepare: Prepare
    """Does what a user does once, outside the timed call (layout views, plans), and returns the call. The
    call takes nothing and returns a new tensor of the result's shape. Where a part of it is done at each step, it
    returns `Planned`. Raises ``UnsupportedCaseError``."""
    unavailable: Callable[[str], str | None] = _available
    """The reason why it cannot run on a device of this name, or None."""
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    """Entered outside the clock, around preparation and calls: global switches such as a backend's choice."""
    strict: bool = True
    """Whether adversarial inputs are asked of it too. Not of PyTorch's backends and the peers: they are other
    people's work with conventions of their own, verified on the cases that are timed."""
    operation: str = DEFAULT_OPERATION
    """Its name."""
    copies_inputs: bool = False
    """Whether ``prepare`` copies values of its inputs, into a layout of the implementation's own: it is then prepared
    again when they change. Heard of those only that come with the lab."""
    compiling_s: float = 0.0
    """How long its first call on a case may be silent beyond other calls: it compiles, or tries out configurations."""
    peer: str = ""
    """Whose work it runs, where it says so itself, such as PyTorch's; of those that are ``strict`` nobody else may."""
    variants: Varies | None = None
    """Those whose names have brackets; None for none."""


class Varies(Protocol):
    """The variants of an implementation."""

    def __call__(self, base: Implementation, name: str, package: str = OUR_PACKAGE) -> Implementation:
        """The variant of ``base`` with this full name, ``name[variant]``. Its kernels are those of ``package``,
        which may be a version of ours. Raises UsageError, naming those there are."""


def split_variant(name: str) -> tuple[str, str | None]:
    """What stands before the brackets of a name and what stands in them, or None."""
    base, bracket, rest = name.partition("[")
    return (base, rest[:-1]) if bracket and rest.endswith("]") else (name, None)


def named(name: str, available: Mapping[str, Implementation]) -> Implementation | None:
    """The implementation of a name, or the variant of one; None where there is none.

    Raises UsageError for a variant that its implementation does not have.
    """
    base, variant = split_variant(name)
    if variant is None or base not in available:
        return available.get(name)
    implementation = available[base]
    if implementation.variants is None:
        raise UsageError(f"{name!r}: {base} has no variants; name it without brackets")
    return implementation.variants(implementation, name)


OUR_FUNCTIONS = ("flash_attention", "fused_moe", "attention_varlen")
"""Of this project's kernels, those that a baseline of a plan may be."""


def import_our_functions() -> None:
    """Each comes with its module, a quarter of a second for all."""
    kernels = importlib.import_module(OUR_PACKAGE)
    for name in OUR_FUNCTIONS:
        getattr(kernels, name)


def is_ours(name: str) -> bool:
    """Whether this project compiles its kernels: `OURS` or a variant of it."""
    return split_variant(name)[0] == OURS


def is_our_variant(name: str) -> bool:
    """Whether this names one of this project's kernels in brackets."""
    return is_ours(name) and name != OURS


def are_forms_of_one(name: str, other: str) -> bool:
    """Whether two names are of one implementation: variants in brackets, and `OURS` with an option, as in
    ``cudadent42_recompute``."""
    return _without_form(name) == _without_form(other)


def _without_form(name: str) -> str:
    base, _ = split_variant(name)
    return OURS if base.startswith(f"{OURS}_") else base


def why_not(implementation: Implementation, device: str) -> str | None:
    """The reason why ``implementation`` cannot run on ``device``, or None."""
    kind = device.partition(":")[0]
    if kind not in implementation.devices:
        return f"{implementation.name} runs on {', '.join(implementation.devices)}, not on {kind}"
    return implementation.unavailable(device)


def is_plug_in(name: str) -> bool:
    return ".py:" in name or is_kernel_file(name)


def is_kernel_file(name: str) -> bool:
    """Whether this is a plug-in whose loading runs nothing of the user's."""
    return name.endswith(".toml")


def path_text_of(spec: str) -> str:
    """The path of a plug-in, as its name has it."""
    return spec if is_kernel_file(spec) else spec.rpartition(":")[0]


def file_path(path_text: str) -> Path:
    """The file that a plan's path stands for on this machine. Raises UsageError where what was sent is not whole."""
    return parcels.path_of(path_text) or expanded(path_text)


def plug_in_file(spec: str) -> Path:
    """The file of a plug-in, or what was sent here for it. Raises UsageError where there is none; does not run it."""
    path_text = path_text_of(spec)
    path = file_path(path_text)
    if not path.is_file():
        raise UsageError(
            f"there is no file {path_text!r}; expected path/to/file.py:callable or path/to/kernel.toml"
        )
    return path

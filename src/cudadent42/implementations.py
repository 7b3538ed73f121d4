"""What can be raced: PyTorch, its separate backends, this project's kernels, peers, and plug-ins.

A plug-in is ``path/to/file.py:callable``, called as its operation says (docs/your-own-kernel.md), a kernel's
``path/to/file.toml`` (`cudadent42.native`), or an ``Implementation`` published under the entry-point group
``cudadent42.implementations``.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

from cudadent42.cases import Operation
from cudadent42.errors import UsageError
from cudadent42.records import Version
from flashmoe_science.errors import InputError, NoKernelError

if TYPE_CHECKING:
    from torch import Tensor

Call = Callable[[], "Tensor"]

Prepare = Callable[[Any, Any], Call]
"""From a case and its inputs, of the types of one operation, to a call."""

_NO_VERSIONS: Mapping[str, Version] = MappingProxyType({})

ENTRY_POINT_GROUP = "cudadent42.implementations"


class UnsupportedCaseError(Exception):
    """An implementation says that it does not do this case; the case is skipped for it, with the reason."""


NOT_DONE = (UnsupportedCaseError, NotImplementedError, InputError, NoKernelError)
"""What says that a case is not done, rather than done wrongly. The last two are those of this project's kernels,
named here and not translated call by call, because that would be timed with them."""


def _available(device: str) -> str | None:
    return None


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation."""

    name: str
    description: str
    devices: tuple[str, ...]
    """Device types: ``cpu``, ``cuda``."""
    prepare: Prepare
    """Does what a user does once, outside the timed call (layout views, plans), and returns the call. The
    call takes nothing and returns a new tensor of the result's shape. Raises ``UnsupportedCaseError``."""
    unavailable: Callable[[str], str | None] = _available
    """The reason why it cannot run on a device of this name, or None."""
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    """Entered outside the clock, around preparation and calls: global switches such as a backend's choice."""
    strict: bool = True
    """Whether adversarial inputs are asked of it too. Not of PyTorch's backends and the peers: they are other
    people's work with conventions of their own, verified on the cases that are timed."""
    operation: Operation = Operation.ATTENTION
    compiling_s: float = 0.0
    """How long its first call on a case may be silent beyond other calls: it compiles, or tries out configurations."""


def why_not(implementation: Implementation, device: str) -> str | None:
    """The reason why ``implementation`` cannot run on ``device``, or None."""
    kind = device.partition(":")[0]
    if kind not in implementation.devices:
        return f"{implementation.name} runs on {', '.join(implementation.devices)}, not on {kind}"
    return implementation.unavailable(device)


def registry(operation: Operation) -> dict[str, Implementation]:
    """Every implementation of an operation by name, the built-in ones first. Peers may be unavailable here."""
    from cudadent42.operations import definition

    known = {item.name: item for item in definition(operation).implementations()}
    for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        published = point.load()
        if not isinstance(published, Implementation):
            raise UsageError(
                f"entry point {point.name!r} of {ENTRY_POINT_GROUP} is a {type(published).__name__}; "
                "expected a cudadent42.implementations.Implementation"
            )
        if published.operation is operation:
            known.setdefault(published.name, published)
    return known


def get(name: str, operation: Operation, versions: Mapping[str, Version] = _NO_VERSIONS) -> Implementation:
    """The implementation called ``name``, or the plug-in that ``path.py:callable`` or ``path.toml`` names.

    ``versions`` are those of the plan: names of states of a source tree.
    """
    if name in versions:
        from cudadent42.race.version import implementation

        return implementation(name, operation, versions)
    if is_kernel_file(name):
        from cudadent42.native.implementation import load as load_kernel

        return load_kernel(name, operation)
    if is_plug_in(name):
        return load(name, operation)
    known = registry(operation)
    if name not in known:
        raise UsageError(
            f"unknown implementation {name!r} of {operation.value}; known are {', '.join(known)}, "
            "path/to/file.py:callable or path/to/kernel.toml"
        )
    return known[name]


def is_strict(name: str, operation: Operation, versions: Mapping[str, Version] = _NO_VERSIONS) -> bool:
    """``Implementation.strict`` of a name, without importing a plug-in."""
    return name in versions or is_plug_in(name) or get(name, operation).strict


def is_plug_in(name: str) -> bool:
    return ".py:" in name or is_kernel_file(name)


def is_kernel_file(name: str) -> bool:
    """Whether this is a plug-in whose loading runs nothing of the user's."""
    return name.endswith(".toml")


def plug_in_file(spec: str) -> Path:
    """The file of a plug-in. Raises UsageError where there is none; does not run it."""
    path_text = spec if is_kernel_file(spec) else spec.rpartition(":")[0]
    path = Path(path_text).expanduser()
    if not path.is_file():
        raise UsageError(f"no file {path_text!r}; expected path/to/file.py:callable or path/to/kernel.toml")
    return path


def load(spec: str, operation: Operation) -> Implementation:
    """The plug-in that ``path/to/file.py:callable`` names. Runs the file."""
    from cudadent42.operations import definition

    path = plug_in_file(spec)
    path_text, _, attribute = spec.rpartition(":")
    module = _module(path.resolve())
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UsageError(f"{path_text} has no callable {attribute!r}; expected path/to/file.py:callable")
    return Implementation(
        spec,
        f"{attribute} of {path.name}",
        ("cpu", "cuda"),
        definition(operation).plug_in(function),
        operation=operation,
    )


def _module(path: Path) -> ModuleType:
    name = f"cudadent42_plug_in_{path.stem}_{abs(hash(path)):x}"
    if name in sys.modules:
        return sys.modules[name]
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise UsageError(f"cannot import {path}; expected a Python file")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise UsageError(f"{path.name} failed on import: {type(error).__name__}: {error}") from error
    return module

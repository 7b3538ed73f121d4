"""What can be raced: PyTorch, its separate backends, this project's kernels, peers, plug-ins, and states of a tree."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType, ModuleType

from cudadent42.base import extensions, parcels
from cudadent42.base.errors import UsageError
from cudadent42.base.paths import real_path
from cudadent42.base.source_imports import SourceLoader, make_importable
from cudadent42.model.events import LOADING, Doing, Mark
from cudadent42.model.implementations import (
    ENTRY_POINT_GROUP,
    Implementation,
    is_kernel_file,
    is_plug_in,
    named,
    plug_in_file,
    why_not,
)
from cudadent42.model.records import Plan, Version
from cudadent42.operations import definition

MOST_PEER_CHARACTERS = 40
"""Of the name of whose work an implementation says that it runs: the sentence that may be quoted repeats it."""

_NO_VERSIONS: Mapping[str, Version] = MappingProxyType({})


def registry(operation: str) -> dict[str, Implementation]:
    """Every implementation of an operation by name, the built-in ones first. Peers may be unavailable here."""
    by_name = {item.name: item for item in definition(operation).implementations()}
    for point in extensions.points(ENTRY_POINT_GROUP):
        published = point.load()
        if not isinstance(published, Implementation):
            raise UsageError(
                f"entry point {point.name!r} of {ENTRY_POINT_GROUP} is a {type(published).__name__}; "
                "expected a cudadent42.model.implementations.Implementation"
            )
        _limited(published.peer, published.name)
        if published.operation == operation:
            by_name.setdefault(published.name, published)
    return by_name


def get(name: str, operation: str, versions: Mapping[str, Version] = _NO_VERSIONS) -> Implementation:
    """The implementation called ``name``, its variant in brackets, or the plug-in that ``path.py:callable`` or
    ``path.toml`` names.

    ``versions`` are those of the plan: names of states of a source tree.
    """
    if name in versions:
        from cudadent42.versions.version import implementation

        return implementation(name, operation, versions)
    if is_kernel_file(name):
        from cudadent42.native.implementation import load as load_kernel

        return load_kernel(name, operation)
    if is_plug_in(name):
        return load(name, operation)
    by_name = registry(operation)
    by_that_name = named(name, by_name)
    if by_that_name is None:
        raise UsageError(
            f"unknown implementation {name!r} of {operation}; expected one of {', '.join(by_name)}, "
            "path/to/file.py:callable or path/to/kernel.toml"
        )
    return by_that_name


def is_strict(name: str, operation: str, versions: Mapping[str, Version] = _NO_VERSIONS) -> bool:
    """``Implementation.strict`` of a name, without importing a plug-in."""
    return name in versions or is_plug_in(name) or get(name, operation).strict


def load(spec: str, operation: str) -> Implementation:
    """The plug-in that ``path/to/file.py:callable`` names. Runs the file."""
    path = plug_in_file(spec)
    sent = parcels.folder()
    was_sent = sent is not None and sent in path.parents
    # Here a file finds modules beside it where a command was typed beside it; elsewhere, what was sent along.
    if was_sent:
        make_importable(path.parent)
    path_text, _, attribute = spec.rpartition(":")
    module = _module(real_path(path), from_source=was_sent)
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UsageError(f"{path_text} has no callable {attribute!r}; expected path/to/file.py:callable")
    return Implementation(
        spec,
        f"{attribute} of {path.name}",
        ("cpu", "cuda"),
        definition(operation).plug_in(function),
        operation=operation,
        peer=_limited(str(getattr(function, "peer_of", "")), spec),
    )


def _limited(peer: str, name: str) -> str:
    """Whose work it says that it runs."""
    if len(peer) > MOST_PEER_CHARACTERS:
        raise UsageError(
            f"{name}: peer_of has {len(peer)} characters; expected a name of at most {MOST_PEER_CHARACTERS}"
        )
    return peer


def trusted(plan: Plan) -> frozenset[str]:
    """The implementations of a plan that come with the lab, and variants of these, which nobody has to watch."""
    built_in = {item.name: item for item in definition(plan.operation).implementations()}
    others = [name for name in plan.implementations if name not in plan.versions and not is_plug_in(name)]
    return frozenset(name for name in others if named(name, built_in) is not None)


Loading = Callable[[str], AbstractContextManager[object]]
"""Entered while an implementation of that name is loaded, which runs its code."""


def _nobody_watches(name: str) -> AbstractContextManager[object]:
    return nullcontext()


def load_all(
    plan: Plan,
    barred: Mapping[str, str],
    index: int,
    mark: Mark,
    loading: Loading = _nobody_watches,
) -> tuple[dict[str, Implementation], dict[str, str]]:
    """The plan's implementations that can run on its device, and the reasons why the others cannot."""
    usable: dict[str, Implementation] = {}
    reasons = {name: barred[name] for name in plan.implementations if name in barred}
    for name in plan.implementations:
        if name in reasons:
            continue
        mark(Doing(index, "", name, LOADING))
        with loading(name):
            implementation = get(name, plan.operation, plan.versions)
            reason = why_not(implementation, plan.device)
        if reason is None:
            usable[name] = implementation
        else:
            reasons[name] = reason
    return usable, reasons


def _module(path: Path, *, from_source: bool = False) -> ModuleType:
    """``from_source``: whether bytecode beside it is left alone."""
    name = f"cudadent42_plug_in_{path.stem}_{abs(hash(path)):x}"
    if name in sys.modules:
        return sys.modules[name]
    loader = SourceLoader(name, str(path)) if from_source else None
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    if spec is None or spec.loader is None:
        raise UsageError(f"cannot import {path}; expected a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise UsageError(f"{path.name} failed on import: {type(error).__name__}: {error}") from error
    return module

"""A state of a source tree as an implementation: its function, and the kernels that it needs built."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from cudadent42.base.errors import UsageError
from cudadent42.model.implementations import (
    OURS,
    Call,
    Implementation,
    Prepare,
    UnsupportedCaseError,
    is_kernel_file,
)
from cudadent42.model.records import Version
from cudadent42.native.implementation import load as load_kernel
from cudadent42.operations import definition
from cudadent42.versions.loading import import_module, import_tree
from cudadent42.versions.sources import PACKAGE, checked_folder_of, is_of_package

_NOT_DONE = ("InputError", "NoKernelError")

_DEVICES = ("cpu", "cuda")


def implementation(name: str, operation: str, versions: Mapping[str, Version]) -> Implementation:
    """The implementation called ``name``. Imports it. Raises UsageError where that fails."""
    version = versions[name]
    if is_kernel_file(version.entry):
        kernel = load_kernel(str(kernel_file(version)), operation)
        return replace(kernel, name=name, description=f"{version.entry} of {version.revision}")
    own = package(name, versions)
    if own is not None and version.entry:
        return _variant(name, operation, version, own)
    function = _function(name, operation, versions)
    prepare = definition(operation).plug_in(tolerant(function, name))
    if own is not None:
        prepare = _translated(prepare, import_module(f"{own.__name__}.errors", version.revision))
    description = f"{version.entry or definition(operation).function} of {version.revision}"
    return Implementation(name, description, _DEVICES, prepare, operation=operation)


def _variant(name: str, operation: str, version: Version, own: ModuleType) -> Implementation:
    """A variant of the version's kernels, with the fields that their configurations have in that version.

    Raises UsageError where that version has no such variant, or kernels that could not be asked for by name yet.
    """
    built_in = {each.name: each for each in definition(operation).implementations()}
    variants = built_in[OURS].variants if OURS in built_in else None
    if variants is None:
        raise UsageError(
            f"{version.entry!r}: the kernels of {operation} have no variants; leave out the brackets"
        )
    cannot = f"the kernels of {version.revision} cannot be asked for by name, as {version.entry!r} is"
    try:
        made = variants(built_in[OURS], version.entry, own.__name__)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"{cannot} ({error}); take a later version, or leave out --implementation"
        ) from error

    def prepare(case: Any, inputs: Any) -> Call:
        try:
            return made.prepare(case, inputs)
        except (ImportError, AttributeError, TypeError) as error:
            raise UnsupportedCaseError(f"{cannot} ({error})") from error

    errors = import_module(f"{own.__name__}.errors", version.revision)
    description = f"{version.entry} of {version.revision}"
    return replace(made, name=name, description=description, prepare=_translated(prepare, errors))


def _translated(prepare: Prepare, errors: ModuleType) -> Prepare:
    """A version has error classes of its own, that nobody else knows: those that say that a case is not done become
    the lab's."""
    not_done = tuple(getattr(errors, name) for name in _NOT_DONE if hasattr(errors, name))

    def prepare_translated(case: Any, inputs: Any) -> Call:
        call = prepare(case, inputs)

        def translated() -> Any:
            try:
                return call()
            except not_done as error:
                raise UnsupportedCaseError(str(error)) from error

        return translated

    return prepare_translated


def kernel_file(version: Version) -> Path:
    """The TOML file of a version whose entry is one."""
    return checked_folder_of(version) / version.entry


def package(name: str, versions: Mapping[str, Version]) -> ModuleType | None:
    """The package ``flashmoe_science`` of a version; None for a version of somebody else's tree."""
    version = versions[name]
    if not is_of_package(version.entry):
        return None
    return import_module(
        f"{_private(name, versions, [checked_folder_of(version)])}.{PACKAGE}", version.revision
    )


def _function(name: str, operation: str, versions: Mapping[str, Version]) -> Callable[..., Any]:
    version = versions[name]
    own = package(name, versions)
    if own is not None:
        module, attribute = own, definition(operation).function
        if not attribute:
            raise UsageError(
                f"{PACKAGE} has no function for {operation}, so two revisions of it cannot be raced; "
                "name a file of the tree with --implementation path/to/file.py:callable"
            )
    else:
        tree = checked_folder_of(version)
        path, _, attribute = version.entry.rpartition(":")
        file = tree / path
        folders = list(dict.fromkeys((file.parent, tree, tree / "src")))
        private = _private(name, versions, [folder for folder in folders if folder.is_dir()])
        module = import_module(f"{private}.{file.stem}", version.revision)
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UsageError(
            f"{module.__name__.rpartition('.')[2]} of {version.revision} has no callable {attribute!r}"
        )
    loaded: Callable[..., Any] = function
    return loaded


def _private(name: str, versions: Mapping[str, Version], folders: Sequence[Path]) -> str:
    """Names differ also where two versions are equal: a race of a tree against itself has two copies of all state."""
    version = versions[name]
    index = list(versions).index(name)
    return import_tree(checked_folder_of(version), f"{index}_{version.digest[:12]}", folders)


def tolerant(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function, asked only for what it knows.

    An older version may lack an argument: it is left out where its value is the default, and the case is not done by
    that version where it is not.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a compiled function that does not say
        return function
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return function
    accepted = {parameter.name for parameter in parameters}
    if {"causal", "softmax_scale"} <= accepted:
        return function

    def call(*arguments: Any, **options: Any) -> Any:
        for option in [option for option in options if option not in accepted]:
            if options.pop(option) not in (None, False):
                raise UnsupportedCaseError(f"{name} does not know the argument {option!r}")
        return function(*arguments, **options)

    return call

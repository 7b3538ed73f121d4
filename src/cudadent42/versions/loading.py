"""Importing a source tree under a private name, beside any other state of the same tree.

The modules of a tree lie in a package that exists in this process only. A finder ahead of the usual ones compiles them
from their renamed syntax trees (`versions.rename`); bytecode is not kept, as it would depend on the name.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

from cudadent42.base.errors import UsageError
from cudadent42.versions.rename import Names, defined_namespaces, rename

PREFIX = "_cudadent42_version_"
"""Of the names of private packages."""


def import_tree(root: Path, label: str, folders: Sequence[Path]) -> str:
    """Make the modules in ``folders`` importable as ``<returned name>.<module>``; nothing is imported yet.

    Args:
        root: of the tree; its Python files are searched for operators that they register with torch.
        label: what makes the name unique in this process: letters, digits and underscores.
        folders: where top-level modules lie, as on ``sys.path``; they are in ``root``.
    """
    private = f"{PREFIX}{label}"
    if private in sys.modules:
        return private
    own = frozenset(name for folder in folders for name in _top_level(folder))
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in root.rglob("*.py")]
    names = Names(private, own, defined_namespaces(texts))
    package = ModuleType(private)
    package.__path__ = [str(folder) for folder in folders]
    sys.modules[private] = package
    sys.meta_path.insert(0, _Finder(names))
    _guard_operators()
    return private


def import_module(name: str, revision: str) -> ModuleType:
    """A module of a private package. Raises UsageError, in words, for whatever it fails with."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        shown = name.removeprefix(PREFIX).partition(".")[2]
        raise UsageError(
            f"{shown} of {revision} failed on import: {type(error).__name__}: {error}"
        ) from error


def _top_level(folder: Path) -> list[str]:
    """Modules and packages that an import finds in a folder. Names of the standard library are never a tree's own."""
    names = []
    for path in folder.iterdir():
        is_module = path.suffix == ".py" and path.is_file()
        if is_module or (path.is_dir() and any(path.rglob("*.py"))):
            names.append(path.stem if is_module else path.name)
    return [name for name in names if name.isidentifier() and name not in sys.stdlib_module_names]


class _Finder(MetaPathFinder):
    def __init__(self, names: Names) -> None:
        self._names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(self._names.private + "."):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader and spec.origin:
            spec.loader = _Loader(fullname, spec.origin, self._names)
            spec.cached = None
        return spec


class _Loader(SourceFileLoader):
    def __init__(self, fullname: str, path: str, names: Names) -> None:
        super().__init__(fullname, path)
        self._names = names

    def get_code(self, fullname: str) -> CodeType:
        tree: ast.Module = rename(self.get_data(self.path), self.path, self._names)
        return compile(tree, self.path, "exec", dont_inherit=True)


# ---------------------------------------------------------------- operators of torch


def _guard_operators() -> None:
    """From now on two trees that register operators in one namespace of torch are refused: the later one would silently
    take the place of the earlier."""
    import torch

    if isinstance(getattr(torch.library.Library.__init__, "owners", None), dict):
        return
    original: Any = torch.library.Library.__init__
    owners: dict[str, str] = {}

    def guarded(self: Any, namespace: str, kind: str, *arguments: Any, **options: Any) -> None:
        tree = _tree_of(sys._getframe(1))
        if tree and kind != "IMPL" and owners.setdefault(namespace, tree) != tree:
            raise UsageError(
                f"two versions register operators of torch in the namespace {namespace!r}, in a way that cannot be "
                'told apart; write the namespace as text where it is defined: Library("name", ...)'
            )
        original(self, namespace, kind, *arguments, **options)

    guarded.owners = owners  # type: ignore[attr-defined]
    torch.library.Library.__init__ = guarded  # type: ignore[method-assign, assignment]


def _tree_of(frame: FrameType | None) -> str:
    """The private package whose code is running, looking from ``frame`` outwards; empty for none."""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if isinstance(name, str) and name.startswith(PREFIX):
            return name.partition(".")[0]
        frame = frame.f_back
    return ""

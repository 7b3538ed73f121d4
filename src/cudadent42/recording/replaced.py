"""Functions in the place of others, wherever modules hold them by name, and back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_LEFT_ALONE = ("torch._C", "cudadent42.recording", "flashmoe_science.takeover.availability")
"""Modules, with those below them: what PyTorch itself goes by, this package, and calls that only try a kernel."""


@contextmanager
def replaced(functions: dict[Any, Any]) -> Iterator[None]:
    """Inside, each module has the second of each pair where it had the first, also by ``from ... import`` before.

    What modules import inside they hold no longer afterwards. Class attributes, closures and default arguments stay.
    """
    exchange(functions)
    try:
        yield
    finally:
        exchange({second: first for first, second in functions.items()})


def exchange(functions: dict[Any, Any]) -> None:
    by_identity = {id(first): (first, second) for first, second in functions.items()}
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType):
            continue
        names = module.__dict__
        # Of thousands of modules with hundreds of names next to none holds any: that is seen without a step for each.
        if by_identity.keys().isdisjoint(map(id, list(names.values()))) or _is_left_alone(name):
            continue
        for attribute, value in list(names.items()):
            pair = by_identity.get(id(value))
            if pair is not None and pair[0] is value:
                names[attribute] = pair[1]


def _is_left_alone(name: str) -> bool:
    return any(name == left or name.startswith(f"{left}.") for left in _LEFT_ALONE)


@contextmanager
def after_import(callbacks: dict[str, Callable[[ModuleType], None]]) -> Iterator[None]:
    """Calls each with its module: now if it is imported, else as soon as it is."""
    waiting = dict(callbacks)
    for name in [name for name in waiting if name in sys.modules]:
        waiting.pop(name)(sys.modules[name])
    finder = _Finder(waiting)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder(MetaPathFinder):
    """Finds nothing itself: what others find is told of when it has been executed."""

    def __init__(self, waiting: dict[str, Callable[[ModuleType], None]]) -> None:
        self._waiting = waiting

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        callback = self._waiting.pop(fullname, None)  # so that what is asked here is answered by the others
        if callback is None:
            return None
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Telling(spec.loader, callback)
        return spec


class _Telling(Loader):
    """A loader that says when a module is there."""

    def __init__(self, loader: Any, callback: Callable[[ModuleType], None]) -> None:
        self._loader, self._callback = loader, callback

    def create_module(self, spec: ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._callback(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

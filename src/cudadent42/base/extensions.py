"""Things of one kind that are built in as folders of a package or are published by other packages, found by name."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import pkgutil
from dataclasses import dataclass
from functools import cache

from cudadent42.base.errors import UsageError


@dataclass(frozen=True)
class ExtensionPoint:
    """Where extensions of one kind are."""

    kind: str
    """As errors call one of them."""
    name: str
    """The package whose folders are extensions, and the group of entry points under which others publish theirs."""
    attribute: str
    """Of a folder's package, that is the extension; an entry point names its own."""

    def names(self) -> tuple[str, ...]:
        """All there are; the built-in ones first, sorted. Imports none of them."""
        return tuple(dict.fromkeys((*_folders(self.name), *sorted(published(self.name)))))

    def built_in(self) -> tuple[str, ...]:
        """Those that come with this package, sorted: the same on every machine."""
        return _folders(self.name)

    def load(self, name: str) -> object:
        """The extension of that name. Raises UsageError where there is none, or it cannot be imported."""
        if name in _folders(self.name):
            extension: object = getattr(importlib.import_module(f"{self.name}.{name}"), self.attribute)
            return extension
        point = published(self.name).get(name)
        if point is None:
            raise UsageError(
                f"unknown {self.kind} {name!r}; expected one of {', '.join(self.names())}. "
                f"Others come with packages that publish them as {self.name}: install the package that has it"
            )
        try:
            return point.load()
        except (ImportError, AttributeError) as error:
            raise UsageError(
                f"the {self.kind} {name!r} is published as {point.value}, which cannot be imported: {error}"
            ) from error


@cache
def _folders(package: str) -> tuple[str, ...]:
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    return tuple(sorted(item.name for item in pkgutil.iter_modules(folders or []) if item.ispkg))


def published(group: str) -> dict[str, importlib.metadata.EntryPoint]:
    """Entry points of a group by name, as installed when first asked."""
    return {point.name: point for point in points(group)}


@cache
def points(group: str) -> tuple[importlib.metadata.EntryPoint, ...]:
    """All of a group, as installed when first asked: to look takes three milliseconds where a hundred packages are."""
    return tuple(importlib.metadata.entry_points(group=group))

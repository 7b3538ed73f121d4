"""Where the code of what was raced comes from, where that is not this project's source: files, packages, versions."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cudadent42.base import extensions
from cudadent42.base.errors import UsageError
from cudadent42.base.paths import real_path
from cudadent42.base.reading import read_bytes
from cudadent42.model import implementations
from cudadent42.model.records import Plan
from cudadent42.native import specification
from cudadent42.native.tuned import files_of
from cudadent42.runs.source import ask

_SHORT = 8


@dataclass(frozen=True)
class KernelSource:
    """The state of one implementation's code."""

    commit: str = ""
    """Of the repository that its files lie in; empty outside of one, and where something tracked there is changed."""
    digest: str = ""
    """SHA-256 over its files: a Python file; a kernel's TOML file, source and the headers beside it; a raced version's
    whole tree. Empty for an installed package."""
    package: str = ""
    """Name and version of the package that published it."""

    @property
    def label(self) -> str:
        """In a few letters: which state it is."""
        return self.package or self.commit[:_SHORT] or f"file {self.digest[:_SHORT]}"


def of_plan(plan: Plan) -> dict[str, KernelSource]:
    """By implementation: files and packages of others, and the versions of a race. Files that cannot be read are left
    out: loading them says why."""
    sources = {}
    for name in plan.implementations:
        version = plan.versions.get(name)
        if version is not None:
            sources[name] = KernelSource(version.commit, version.digest)
        elif implementations.is_plug_in(name):
            try:
                sources[name] = _of_files(_files(name))
            except (OSError, UsageError):
                continue
        else:
            package = _package(name)
            if package:
                sources[name] = KernelSource(package=package)
    return sources


def _files(name: str) -> Sequence[Path]:
    path = implementations.plug_in_file(name)
    if not implementations.is_kernel_file(name):
        return [path]
    return files_of(specification.load(path))


def _of_files(files: Sequence[Path]) -> KernelSource:
    digest = hashlib.sha256()
    for path in files:
        content = read_bytes(path)
        for part in (path.name.encode("utf-8", "surrogateescape"), content):
            digest.update(len(part).to_bytes(8, "big") + part)
    return KernelSource(_commit(files), digest.hexdigest())


def _commit(files: Sequence[Path]) -> str:
    folder = real_path(files[0]).parent
    tracked = ask(folder, "ls-files", "--error-unmatch", paths=[str(real_path(path)) for path in files])
    changed = ask(folder, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules=dirty")
    if tracked is None or changed is None or changed.strip():
        return ""
    return (ask(folder, "rev-parse", "--verify", "HEAD") or "").strip()


def _package(name: str) -> str:
    for point in extensions.points(implementations.ENTRY_POINT_GROUP):
        if point.name == name and point.dist is not None:
            return f"{point.dist.name} {point.dist.version}"
    return ""

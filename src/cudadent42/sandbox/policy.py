"""What a confined process may do: data that travels to it as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Limits:
    """Of one sandboxed process and all that it starts."""

    memory_bytes: int
    """Private memory of each process; with a cgroup also of all together."""
    address_bytes: int | None
    """Addresses that one process may map. None where a GPU is used: its driver maps far more than it fills."""
    processes: int
    """Threads count."""
    file_bytes: int
    """Of one file."""
    open_files: int
    scratch_bytes: int
    """Of all files in the scratch folder, where it has a file system of its own."""


@dataclass(frozen=True)
class Policy:
    """All that a sandbox is to be. Paths are absolute."""

    readable: tuple[str, ...]
    """Files and folders that may be read and executed, with all below. What does not exist is left out."""
    devices: tuple[str, ...]
    """Device files, and folders of them, that may be read and written: those of a GPU."""
    scratch: str
    """An empty folder of this user's. All that the process writes goes there."""
    folder: str
    """The current folder."""
    limits: Limits
    links: dict[str, str] = field(default_factory=dict)
    """Symbolic links in the private compile cache, by path relative to it."""
    cache_seed: str = ""
    """A compile cache that is read and never written."""
    cgroups: tuple[str, ...] = ()
    """Folders of control groups that were made for it."""
    wanted: tuple[str, ...] | None = None
    """Names of layers without which nothing is to run. None: whatever there is, for a probe."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Policy:
        data: dict[str, Any] = json.loads(text)
        lists = ("readable", "devices", "cgroups", "wanted")
        sequences = {name: tuple(data[name]) for name in lists if data[name] is not None}
        return Policy(**{**data, **sequences, "limits": Limits(**data["limits"])})

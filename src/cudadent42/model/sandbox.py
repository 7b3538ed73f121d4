"""What confines a candidate on this machine: layers that are there or not, and what they protect."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Layer(str, Enum):
    """One means of the system's. The text is what a report calls it."""

    ENVIRONMENT = "cleaned environment"
    USER = "user namespace"
    TREE = "file tree of its own"
    NETWORK = "network namespace"
    IPC = "IPC namespace"
    PROCESSES = "process namespace"
    GROUP_MEMORY = "control group: memory"
    GROUP_PROCESSES = "control group: processes"
    RLIMITS = "resource limits"
    PROCESS_COUNT = "limit on processes"
    PRIVILEGES = "no new privileges"
    CAPABILITIES = "no capabilities"
    LANDLOCK_FILES = "Landlock: files"
    LANDLOCK_TCP = "Landlock: TCP"
    LANDLOCK_SIGNALS = "Landlock: signals"
    SYSTEM_CALLS = "system-call filter"


class Protection(str, Enum):
    """What a sandbox is for. Each needs one of several layers; a name of ``--accept-missing``."""

    FILES = "files"
    """Nothing outside of what it needs is read, and nothing but its own scratch is written."""
    NETWORK = "network"
    """No connection to anywhere, this machine included."""
    PROCESSES = "processes"
    """Processes outside are neither signalled nor looked into."""
    LIMITS = "limits"
    """Processes, and the memory of each, are bounded."""


_MEANS: dict[Protection, tuple[tuple[Layer, ...], ...]] = {
    Protection.FILES: ((Layer.TREE,), (Layer.LANDLOCK_FILES, Layer.SYSTEM_CALLS)),
    Protection.NETWORK: ((Layer.NETWORK, Layer.TREE), (Layer.SYSTEM_CALLS,)),
    Protection.PROCESSES: ((Layer.PROCESSES,), (Layer.LANDLOCK_SIGNALS,)),
    Protection.LIMITS: ((Layer.RLIMITS, Layer.PROCESS_COUNT),),
}
"""Any one of the rows does, if all of its layers are there. Landlock leaves modes and owners of files alone, so there
the filter keeps them. A network namespace does not hold sockets that are files: for those there is the tree."""


@dataclass(frozen=True)
class LayerState:
    """One layer as it was tried, by the system call itself."""

    layer: Layer
    there: bool
    detail: str = ""
    """Its version or bounds; where it is not there, why."""

    @property
    def line(self) -> str:
        return f"{self.layer.value}: {'there' if self.there else 'not there'}" + (
            f" ({self.detail})" if self.detail else ""
        )


@dataclass(frozen=True)
class SandboxReport:
    """What a sandbox is made of on this machine."""

    layers: tuple[LayerState, ...]
    accepted_missing: tuple[Protection, ...] = ()
    """Protections that whoever started the run did without."""

    def has(self, layer: Layer) -> bool:
        return any(state.there for state in self.layers if state.layer is layer)

    def gives(self, protection: Protection) -> bool:
        return any(all(map(self.has, row)) for row in _MEANS[protection])

    @property
    def missing(self) -> tuple[Protection, ...]:
        return tuple(each for each in Protection if not self.gives(each))

    def why_missing(self, protection: Protection) -> str:
        """The layers that would give it and are not there, with what the system said."""
        wanted = dict.fromkeys(layer for row in _MEANS[protection] for layer in row)
        absent = [state for state in self.layers if state.layer in wanted and not state.there]
        return "; ".join(f"{state.layer.value}: {state.detail}" for state in absent)

    @property
    def summary(self) -> str:
        """In one line."""
        there = [state.layer.value for state in self.layers if state.there]
        absent = [state.layer.value for state in self.layers if not state.there]
        return ", ".join(there) + (f"; not there: {', '.join(absent)}" if absent else "")

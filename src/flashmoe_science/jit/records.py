"""What a build is: how a kernel was compiled, what it needs of the machine, and where it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Recipe:
    """Everything that determines a compiled kernel; enough to compile the same bytes again."""

    kernel: str
    """Name of the kernel, e.g. ``attention_forward``."""
    backend: str
    """``host`` (the machine's C++ compiler) or ``nvrtc``."""
    architecture: str
    """Target: ``sm_90a`` for CUDA, a name and feature list for a CPU."""
    configuration: dict[str, int | str]
    """Compile-time parameters (tile sizes, head dim, dtype), passed as macros."""
    compiler: str
    """Path of the compiler, or ``nvrtc``."""
    compiler_version: str
    flags: tuple[str, ...]
    sources: dict[str, str]
    """Source and header file names, relative to the kernel folder, with their SHA-256."""

    @property
    def label(self) -> str:
        """Short human-readable name: the kernel and the configuration that tells it apart."""
        inside = ", ".join(f"{name}={value}" for name, value in self.configuration.items())
        return f"{self.kernel}[{inside}]" if inside else self.kernel


@dataclass(frozen=True)
class Resources:
    """What one block of a CUDA kernel uses, and how many blocks fit one multiprocessor of the target."""

    registers_per_thread: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    static_shared_bytes: int
    dynamic_shared_bytes: int
    threads_per_block: int
    blocks_per_sm: int
    occupancy: float
    """Resident warps over the most that the target can hold, 0 to 1."""


@dataclass(frozen=True)
class KernelBuild:
    """One compiled kernel."""

    recipe: Recipe
    key: str
    """Content address of the recipe (SHA-256, hexadecimal)."""
    artifact: Path
    """The shared library or cubin in the cache."""
    artifact_bytes: int
    compile_seconds: float
    """Time that compiling took when it was compiled."""
    cached: bool
    """True when this process found it compiled already."""
    log: str
    """What the compiler printed."""
    resources: Resources | None = None
    """None on a CPU."""

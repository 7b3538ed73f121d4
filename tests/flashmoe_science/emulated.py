"""CUDA kernels on the CPU: their own source as C++, with what PTX does given by the headers in `emulation`.

Compiling them is most of what their tests cost. Libraries are kept in the compile cache, by what they are made of. The
standard library's headers are compiled ahead; that they are few matters still, as the compiler reads all that came of
them for each kernel.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pytest

from flashmoe_science.jit.cache import Compilation, default_cache
from flashmoe_science.jit.nvrtc import KERNEL_DIRECTORY, CudaKernel
from flashmoe_science.jit.records import Recipe

EMULATION = Path(__file__).parent / "emulation"
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation needs g++")

_FLAGS = (
    "-Og",  # the quickest of all to compile; how fast it runs matters less
    "-w",
    "-U_FORTIFY_SOURCE",
    # A "unique" symbol would be that of the first library in the process, in which it may be of another kind.
    "-fno-gnu-unique",
    "-shared",
    "-fPIC",
    "-pthread",
)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)
_SHARED = re.compile(r"__shared__ (\w+) (\w+)((?:\[[^\]]+\])*);")
_DYNAMIC_SHARED = "extern __shared__ __align__(1024) char shared_memory[];"
_ARENA = "char* const shared_memory = block_->arena.data();"
_RAW_SHARED = "extern __shared__ unsigned char raw[];"
_RAW_ARENA = "char* const raw = block_->arena.data();"


@dataclass(frozen=True)
class _Standard:
    """What is included ahead of a kernel, and the C++ that it takes."""

    header: str
    flag: str

    @property
    def flags(self) -> tuple[str, ...]:
        return (self.flag, *_FLAGS)


_FIBERS = _Standard("standard.h", "-std=c++17")
_THREADS = _Standard("threads.h", "-std=c++20")
"""With std::barrier, and four times as long to read."""


def compile_emulation(kernel: CudaKernel, parameters: str, *, copies_late: bool = True) -> ctypes.CDLL:
    """A library whose `run(arguments, blocks)` runs a grid of the kernel, which may use dynamic shared memory.

    Each CUDA thread is a fiber.

    Args:
        parameters: name of the struct that the kernel takes.
        copies_late: asynchronous copies happen when they are waited for, as late as a GPU may do them; else at once,
            as early as it may.
    """
    text = (KERNEL_DIRECTORY / kernel.source).read_text()
    text = text.replace(_DYNAMIC_SHARED, _ARENA).replace(_RAW_SHARED, _RAW_ARENA)
    macros = {
        **kernel.macros,
        "NATIVE_REDUX": 0,
        "KERNEL": kernel.function,
        "PARAMETERS": parameters,
        "BLOCK_THREADS": kernel.threads_per_block,
        "COPIES_LATE": int(copies_late),
        "FIBERS": 1,
    }
    return _compiled(kernel.function, text + (EMULATION / "launch_blocks.inc").read_text(), macros, _FIBERS)


def compile_clusters(kernel: CudaKernel) -> ctypes.CDLL:
    """A library whose `run(arguments, x, y, z, last_first)` runs a grid of `attention_small` in clusters.

    Each CUDA thread is a thread, and each block has shared variables of its own.
    """
    text = (KERNEL_DIRECTORY / kernel.source).read_text()
    text = _SHARED.sub(r"auto& \2 = *shared_alloc<\1\3>();", text)
    return _compiled(kernel.function, text + (EMULATION / "launch.inc").read_text(), kernel.macros, _THREADS)


def _compiled(name: str, text: str, macros: Mapping[str, int | str], standard: _Standard) -> ctypes.CDLL:
    recipe = Recipe(
        kernel=f"emulated {name}",
        backend="host",
        architecture=platform.machine(),
        configuration=dict(macros),
        compiler="g++",
        compiler_version=_compiler_version(),
        flags=(*standard.flags, *(f"-D{macro}={value}" for macro, value in macros.items())),
        sources={**_included(text, standard), "kernel.cpp": hashlib.sha256(text.encode()).hexdigest()},
    )

    def compile_to(library: Path) -> Compilation:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "source"
            _lay_together(source)
            (source / f"{standard.header}.gch").symlink_to(_compiled_ahead(standard))
            (source / "kernel.cpp").write_text(text)
            inputs = ("-include", str(source / standard.header), str(source / "kernel.cpp"))
            subprocess.run(["g++", *recipe.flags, f"-I{source}", *inputs, "-o", str(library)], check=True)
        return Compilation()

    return ctypes.CDLL(str(default_cache().get_or_build(recipe, ".so", compile_to).artifact))


def _lay_together(folder: Path) -> None:
    """The kernels' sources with the emulation's in their place: includes search the directory of the file that includes
    first."""
    shutil.copytree(KERNEL_DIRECTORY, folder)
    shutil.copytree(EMULATION, folder, dirs_exist_ok=True)


def _included(text: str, standard: _Standard) -> dict[str, str]:
    """What is included, directly or not, by its path, with its SHA-256: other headers may change."""
    digests: dict[str, str] = {}
    waiting = [standard.header, *_included_by(text, PurePosixPath())]
    while waiting:
        name = waiting.pop()
        if name not in digests:
            digests[name], inside = _read(name)
            waiting += inside
    return dict(sorted(digests.items()))


@functools.cache
def _read(name: str) -> tuple[str, list[str]]:
    """A header's SHA-256, and what it includes."""
    content = _headers()[name].read_bytes()
    return hashlib.sha256(content).hexdigest(), _included_by(content.decode(), PurePosixPath(name).parent)


def _included_by(text: str, folder: PurePosixPath) -> list[str]:
    """As the compiler looks for them: beside the file that includes, then from the root."""
    candidates = [(str(folder / name), name) for name in _INCLUDE.findall(text)]
    return [name for pair in candidates if (name := next(filter(_headers().__contains__, pair), ""))]


@functools.cache
def _headers() -> dict[str, Path]:
    """All that may be included, by its path."""
    return {
        path.relative_to(root).as_posix(): path
        for root in (KERNEL_DIRECTORY, EMULATION)
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


@functools.cache
def _compiler_version() -> str:
    return subprocess.run(
        ["g++", "--version"], check=True, capture_output=True, text=True
    ).stdout.splitlines()[0]


@functools.cache
def _compiled_ahead(standard: _Standard) -> Path:
    """The standard library's headers in the compiler's own form; libraries are the same without it."""
    header = EMULATION / standard.header
    recipe = Recipe(
        kernel="emulation's headers",
        backend="host",
        architecture=platform.machine(),
        configuration={},
        compiler="g++",
        compiler_version=_compiler_version(),
        flags=standard.flags,
        sources=_included("", standard),
    )

    def compile_to(path: Path) -> Compilation:
        subprocess.run(["g++", *standard.flags, "-x", "c++-header", str(header), "-o", str(path)], check=True)
        return Compilation()

    return default_cache().get_or_build(recipe, ".gch", compile_to).artifact

"""CUDA kernels on the CPU: their own source as C++, with what PTX does given by the headers in `emulation`.

Compiling them is most of what their tests cost. Libraries are kept in the compile cache, by what they are made of, and
the standard library's headers, which are most of what the compiler reads, are compiled ahead.
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
from pathlib import Path

import pytest

from flashmoe_science.jit.cache import Compilation, default_cache
from flashmoe_science.jit.nvrtc import KERNEL_DIRECTORY, CudaKernel
from flashmoe_science.jit.records import Recipe

EMULATION = Path(__file__).parent / "emulation"
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation needs g++")

_FLAGS = (
    "-std=c++20",
    "-Og",  # the quickest of all to compile; how fast it runs matters less
    "-w",
    "-U_FORTIFY_SOURCE",
    # A "unique" symbol would be that of the first library in the process, in which it may be of another kind.
    "-fno-gnu-unique",
    "-shared",
    "-fPIC",
    "-pthread",
)
_STANDARD = "standard.h"
_SHARED = re.compile(r"__shared__ (\w+) (\w+)((?:\[[^\]]+\])*);")
_DYNAMIC_SHARED = "extern __shared__ __align__(1024) char shared_memory[];"
_ARENA = "char* const shared_memory = block_->arena.data();"
_RAW_SHARED = "extern __shared__ unsigned char raw[];"
_RAW_ARENA = "char* const raw = block_->arena.data();"


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
    return _compiled(kernel.function, text + (EMULATION / "launch_blocks.inc").read_text(), macros)


def compile_clusters(kernel: CudaKernel) -> ctypes.CDLL:
    """A library whose `run(arguments, x, y, z, last_first)` runs a grid of `attention_small` in clusters.

    Each CUDA thread is a thread, and each block has shared variables of its own.
    """
    text = (KERNEL_DIRECTORY / kernel.source).read_text()
    text = _SHARED.sub(r"auto& \2 = *shared_alloc<\1\3>();", text)
    return _compiled(kernel.function, text + (EMULATION / "launch.inc").read_text(), kernel.macros)


def _compiled(name: str, text: str, macros: Mapping[str, int | str]) -> ctypes.CDLL:
    recipe = Recipe(
        kernel=f"emulated {name}",
        backend="host",
        architecture=platform.machine(),
        configuration=dict(macros),
        compiler="g++",
        compiler_version=_compiler_version(),
        flags=(*_FLAGS, *(f"-D{macro}={value}" for macro, value in macros.items())),
        sources={**_headers(), "kernel.cpp": hashlib.sha256(text.encode()).hexdigest()},
    )

    def compile_to(library: Path) -> Compilation:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "source"
            _lay_together(source)
            (source / f"{_STANDARD}.gch").symlink_to(_compiled_ahead())
            (source / "kernel.cpp").write_text(text)
            inputs = ("-include", str(source / _STANDARD), str(source / "kernel.cpp"))
            subprocess.run(["g++", *recipe.flags, f"-I{source}", *inputs, "-o", str(library)], check=True)
        return Compilation()

    return ctypes.CDLL(str(default_cache().get_or_build(recipe, ".so", compile_to).artifact))


def _lay_together(folder: Path) -> None:
    """The kernels' sources with the emulation's in their place: includes search the directory of the file that includes
    first."""
    shutil.copytree(KERNEL_DIRECTORY, folder)
    shutil.copytree(EMULATION, folder, dirs_exist_ok=True)


@functools.cache
def _headers() -> dict[str, str]:
    """All that may be included, by its path, with its SHA-256."""
    files = {
        path.relative_to(root): path
        for root in (KERNEL_DIRECTORY, EMULATION)
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.suffix != ".cu"
    }
    return {str(name): hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}


@functools.cache
def _compiler_version() -> str:
    return subprocess.run(
        ["g++", "--version"], check=True, capture_output=True, text=True
    ).stdout.splitlines()[0]


@functools.cache
def _compiled_ahead() -> Path:
    """The standard library's headers in the compiler's own form, which a process of tests makes once."""
    header = Path(_folder().name) / _STANDARD
    shutil.copy(EMULATION / _STANDARD, header)
    result = header.with_suffix(".h.gch")
    subprocess.run(["g++", *_FLAGS, "-x", "c++-header", str(header), "-o", str(result)], check=True)
    return result


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Lives as long as this process."""
    return tempfile.TemporaryDirectory()

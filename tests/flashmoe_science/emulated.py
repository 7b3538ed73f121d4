"""CUDA kernels on the CPU: their own source as C++, with what PTX does given by the headers in `emulation`.

Compiling them is most of what their tests cost. Libraries are kept in the compile cache, by what they are made of. The
standard library's headers and the emulation's are compiled ahead; that they are few matters still, as the compiler
reads all that came of them for each kernel.
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
from pathlib import Path, PurePosixPath

import pytest

from flashmoe_science.jit.cache import Compilation, default_cache
from flashmoe_science.jit.host import InstructionSet, available_instruction_sets
from flashmoe_science.jit.nvrtc import KERNEL_DIRECTORY, CudaKernel
from flashmoe_science.jit.records import Recipe

EMULATION = Path(__file__).parent / "emulation"
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation needs g++")

_FLAGS = (
    "-std=c++17",
    "-Og",  # the quickest of all to compile; how fast it runs matters less
    "-w",
    "-U_FORTIFY_SOURCE",
    # A "unique" symbol would be that of the first library in the process, in which it may be of another kind.
    "-fno-gnu-unique",
    "-shared",
    "-fPIC",
    "-pthread",
    # Float16 to float32 by an instruction where there is one; else it is a call, and a tenth of what emulations take.
    *(("-mf16c",) if InstructionSet.AVX2 in available_instruction_sets() else ()),
)
_LINKER = ("-fuse-ld=gold",) if shutil.which("ld.gold") else ()
"""Half the time of the usual one."""
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)
_SHARED = re.compile(r"__shared__ (\w+) (\w+)((?:\[[^\]]+\])*);")
_DYNAMIC_SHARED = "extern __shared__ __align__(1024) char shared_memory[];"
_ARENA = "char* const shared_memory = block_->arena.data();"
_RAW_SHARED = "extern __shared__ unsigned char raw[];"
_RAW_ARENA = "auto* const raw = reinterpret_cast<unsigned char*>(block_->arena.data());"


_AHEAD = "ahead.h"
"""Compiled ahead and included before each kernel."""
_READ_AHEAD = ("ELEMENT_BF16", "COPIES_LATE")
"""The macros that it reads."""


def compile_emulation(
    kernel: CudaKernel, parameters: str, *, copies_late: bool = True, together: bool = False
) -> ctypes.CDLL:
    """A library whose `run(arguments, blocks)` runs a grid of the kernel, which may use dynamic shared memory.

    Each CUDA thread is a fiber.

    Args:
        parameters: name of the struct that the kernel takes.
        copies_late: asynchronous copies happen when they are waited for, as late as a GPU may do them, and those that
            complete a barrier at once or late, in any order; else at once, as early as it may.
        together: blocks with shared variables may run at a time, by `run_together`.
    """
    text = (KERNEL_DIRECTORY / kernel.source).read_text()
    text = text.replace(_DYNAMIC_SHARED, _ARENA).replace(_RAW_SHARED, _RAW_ARENA)
    together = together or kernel.cluster_blocks > 1
    if together:  # each block has shared variables of its own, behind its dynamic shared memory
        text = _SHARED.sub(r"auto& \2 = *shared_alloc<\1\3>();", text)
    macros = {
        **kernel.macros,
        "NATIVE_REDUX": 0,
        "KERNEL": kernel.function,
        "PARAMETERS": parameters,
        "BLOCK_THREADS": kernel.threads_per_block,
        "CLUSTER_BLOCKS": kernel.cluster_blocks,
        "DYNAMIC_BYTES": kernel.dynamic_shared_bytes if together else 0,
        "COPIES_LATE": int(copies_late),
    }
    return _compiled(kernel.function, text + (EMULATION / "launch_blocks.inc").read_text(), macros)


def compile_clusters(kernel: CudaKernel) -> ctypes.CDLL:
    """A library whose `run(arguments, x, y, z, last_first)` runs a grid of a kernel with `Parameters` in clusters.

    Each CUDA thread is a fiber, and each block has shared variables of its own, behind its dynamic shared memory.
    """
    text = (KERNEL_DIRECTORY / kernel.source).read_text().replace(_DYNAMIC_SHARED, _ARENA)
    text = _SHARED.sub(r"auto& \2 = *shared_alloc<\1\3>();", text)
    macros = {
        **kernel.macros,
        "NATIVE_REDUX": 0,
        "KERNEL": kernel.function,
        "DYNAMIC_BYTES": kernel.dynamic_shared_bytes,
    }
    return _compiled(kernel.function, text + (EMULATION / "launch_clusters.inc").read_text(), macros)


def _compiled(name: str, text: str, given: Mapping[str, int | str]) -> ctypes.CDLL:
    macros = {**dict.fromkeys(_READ_AHEAD, 0), **given}
    recipe = Recipe(
        kernel=f"emulated {name}",
        backend="host",
        architecture=platform.machine(),
        configuration=dict(macros),
        compiler="g++",
        compiler_version=_compiler_version(),
        flags=(*_FLAGS, *_LINKER, *(f"-D{macro}={value}" for macro, value in macros.items())),
        sources={**_included(text), "kernel.cpp": hashlib.sha256(text.encode()).hexdigest()},
    )

    def compile_to(library: Path) -> Compilation:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "source"
            _lay_together(source)
            (source / f"{_AHEAD}.gch").symlink_to(_compiled_ahead(*(macros[macro] for macro in _READ_AHEAD)))
            (source / "kernel.cpp").write_text(text)
            inputs = ("-include", str(source / _AHEAD), str(source / "kernel.cpp"))
            subprocess.run(["g++", *recipe.flags, f"-I{source}", *inputs, "-o", str(library)], check=True)
        return Compilation()

    return ctypes.CDLL(str(default_cache().get_or_build(recipe, ".so", compile_to).artifact))


def _lay_together(folder: Path) -> None:
    """The kernels' sources with the emulation's in their place: includes search the directory of the file that includes
    first."""
    shutil.copytree(KERNEL_DIRECTORY, folder)
    shutil.copytree(EMULATION, folder, dirs_exist_ok=True)


def _included(text: str) -> dict[str, str]:
    """What is included, directly or not, by its path, with its SHA-256: other headers may change."""
    digests: dict[str, str] = {}
    waiting = [_AHEAD, *_included_by(text, PurePosixPath())]
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
def _compiled_ahead(*values: int | str) -> Path:
    """`_AHEAD` in the compiler's own form, for these values of what it reads; libraries are the same without it."""
    header = EMULATION / _AHEAD
    macros = dict(zip(_READ_AHEAD, values, strict=True))
    flags = (*_FLAGS, *(f"-D{macro}={value}" for macro, value in macros.items()))
    recipe = Recipe(
        kernel="emulation's headers",
        backend="host",
        architecture=platform.machine(),
        configuration=macros,
        compiler="g++",
        compiler_version=_compiler_version(),
        flags=flags,
        sources=_included(""),
    )

    def compile_to(path: Path) -> Compilation:
        command = ["g++", *flags, f"-I{EMULATION}", "-x", "c++-header", str(header), "-o", str(path)]
        subprocess.run(command, check=True)
        return Compilation()

    return default_cache().get_or_build(recipe, ".gch", compile_to).artifact

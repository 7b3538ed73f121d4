"""CUDA kernels on the CPU: their own source as C++, with what PTX does given by the headers in `emulation`, and one
fiber per CUDA thread.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

from flashmoe_science.jit.nvrtc import KERNEL_DIRECTORY, CudaKernel

EMULATION = Path(__file__).parent / "emulation"
_DYNAMIC_SHARED = "extern __shared__ __align__(1024) char shared_memory[];"
_ARENA = "char* const shared_memory = block_->arena.data();"


def compile_emulation(
    kernel: CudaKernel, parameters: str, folder: Path, *, copies_late: bool = True
) -> ctypes.CDLL:
    """A library whose `run(arguments, blocks)` runs a grid of the kernel, which may use dynamic shared memory.

    Args:
        parameters: name of the struct that the kernel takes.
        copies_late: asynchronous copies happen when they are waited for, as late as a GPU may do them; else at once,
            as early as it may.
    """
    # Includes search the directory of the file that includes first, so the headers have to lie together.
    source = folder / "source"
    shutil.copytree(KERNEL_DIRECTORY, source)
    shutil.copytree(EMULATION, source, dirs_exist_ok=True)
    text = (source / kernel.source).read_text().replace(_DYNAMIC_SHARED, _ARENA)
    (source / "kernel.cpp").write_text(text + (EMULATION / "launch_blocks.inc").read_text())
    macros = {
        **kernel.macros,
        "NATIVE_REDUX": 0,
        "KERNEL": kernel.function,
        "PARAMETERS": parameters,
        "BLOCK_THREADS": kernel.threads_per_block,
        "COPIES_LATE": int(copies_late),
        "FIBERS": 1,
    }
    command = [
        "g++",
        "-std=c++20",
        "-O1",
        "-w",
        "-U_FORTIFY_SOURCE",
        # A "unique" symbol would be that of the first library in the process, in which it may be of another kind.
        "-fno-gnu-unique",
        "-shared",
        "-fPIC",
        "-pthread",
        f"-I{source}",
    ]
    defines = [f"-D{name}={value}" for name, value in macros.items()]
    library = folder / "kernel.so"
    subprocess.run([*command, str(source / "kernel.cpp"), "-o", str(library), *defines], check=True)
    return ctypes.CDLL(str(library))

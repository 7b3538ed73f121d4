"""CUDA source text to a cubin in the compile cache, through NVRTC. Needs no GPU, no driver and no toolkit."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashmoe_science.errors import BuildError, DeviceError, KernelDefectError
from flashmoe_science.jit.cache import Compilation, CompileCache, default_cache
from flashmoe_science.jit.limits import check_block, occupancy
from flashmoe_science.jit.records import KernelBuild, Recipe, Resources
from flashmoe_science.jit.requirements import install_command

KERNEL_DIRECTORY = Path(__file__).resolve().parent.parent / "kernels" / "cuda"

_FLAGS = (
    "--std=c++17",
    "--device-as-default-execution-space",
    "--ptxas-options=-v",
    "--ptxas-options=-warn-spills",
)
_FIRST_WITH_CACHE = (12, 9)
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_STATIC_SHARED = re.compile(r"(\d+) bytes smem")
# Notes with which ptxas says that it serialised wgmma or ignored setmaxnreg; each costs a large part of the
# speed.
_SERIALISED = re.compile(r"\bC75\d\d\b.*")


@dataclass(frozen=True)
class CudaKernel:
    """One kernel in one configuration: all that is needed to compile it and to launch a block of it."""

    source: str
    """File below `directory`, e.g. ``attention_portable.cu``."""
    function: str
    """The ``extern "C"`` name of the ``__global__`` function."""
    architecture: str
    """Target, e.g. ``sm_90a``. Code for sm_86 also runs on sm_89; an ``a`` target runs nowhere else."""
    macros: Mapping[str, int]
    threads_per_block: int
    dynamic_shared_bytes: int
    directory: Path = KERNEL_DIRECTORY
    header_directory: Path = KERNEL_DIRECTORY
    """Where the files that it includes are, by path relative to this."""
    more_header_directories: tuple[Path, ...] = field(default=())
    """Where files that it includes are looked for next."""
    include_directories: tuple[Path, ...] = field(default=())
    """Toolkit headers, for kernels of others; ours need none."""
    cluster_blocks: int = 1
    """Blocks of the cluster that the source asks for. More than 8 are not portable."""

    @property
    def label(self) -> str:
        return f"{self.function}[{', '.join(f'{name}={value}' for name, value in self.macros.items())}]"


def compile_kernel(
    kernel: CudaKernel, cache: CompileCache | None = None, *, allow_defects: bool = False
) -> KernelBuild:
    """The kernel's cubin and resource table, compiled now unless the cache has it.

    Spills, a stack frame and serialised wgmma (C75xx) count as failures: a kernel that has them is much
    slower than it should be, and nothing else would tell. It is kept in the cache, so that it is compiled once.

    Args:
        allow_defects: return a kernel with one of those defects all the same.

    Raises:
        KernelDefectError: it has one of those defects.
        BuildError: it does not fit the architecture, or does not compile.
        DeviceError: there is no NVRTC, or it does not know the architecture.
    """
    check_block(kernel.label, kernel.architecture, kernel.threads_per_block, kernel.dynamic_shared_bytes)
    sources = _sources(kernel)
    recipe = Recipe(
        kernel=kernel.function,
        backend="nvrtc",
        architecture=kernel.architecture,
        configuration=dict(kernel.macros),
        compiler="nvrtc",
        compiler_version=".".join(map(str, nvrtc_version())),
        flags=_flags(kernel),
        sources={name: hashlib.sha256(text).hexdigest() for name, text in sources.items()},
    )
    cache = default_cache() if cache is None else cache
    build = cache.get_or_build(recipe, ".cubin", lambda path: _compile(kernel, recipe, sources, path))
    assert build.resources is not None
    resources = _with_occupancy(kernel, build.resources)
    if not allow_defects:
        _refuse_defects(kernel, resources, build.log)
    return dataclasses.replace(build, resources=resources)


@functools.cache
def nvrtc_version() -> tuple[int, int]:
    """Version of the NVRTC that is used, e.g. (13, 0). DeviceError if there is none."""
    nvrtc = _nvrtc()
    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except (RuntimeError, OSError) as error:
        raise DeviceError(
            "NVRTC, the CUDA run-time compiler, was not found; install it with: "
            f"{install_command('cu13')} (or cu12, to match torch.version.cuda)"
        ) from error
    _check(status, "nvrtcVersion")
    return int(major), int(minor)


@functools.cache
def supported_architectures() -> tuple[int, ...]:
    """Compute capabilities that NVRTC can compile for, times ten, e.g. (75, 80, ..., 120)."""
    nvrtc_version()
    status, numbers = _nvrtc().nvrtcGetSupportedArchs()
    _check(status, "nvrtcGetSupportedArchs")
    return tuple(sorted(int(number) for number in numbers))


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise DeviceError(
            f"the Python package cuda-bindings is not installed; install it with: {install_command('cu13')}"
        ) from error
    return nvrtc


def _check(status: Any, call: str) -> None:
    if int(status) != 0:
        raise BuildError(f"{call} failed: {getattr(status, 'name', status)}")


def _flags(kernel: CudaKernel) -> tuple[str, ...]:
    number = int(re.sub(r"\D", "", kernel.architecture))
    if number not in supported_architectures():
        version = ".".join(map(str, nvrtc_version()))
        architectures = ", ".join(f"sm_{n}" for n in supported_architectures())
        raise DeviceError(
            f"NVRTC {version} cannot compile for {kernel.architecture} (it knows {architectures}); "
            "install a version of nvidia-cuda-nvrtc that does"
        )
    includes = (f"--include-path={directory}" for directory in kernel.include_directories)
    macros = (f"--define-macro={name}={value}" for name, value in kernel.macros.items())
    # NVRTC's own cache returns cubins without the resource table that ptxas prints.
    uncached = ("--no-cache",) if nvrtc_version() >= _FIRST_WITH_CACHE else ()
    return (f"--gpu-architecture={kernel.architecture}", *_FLAGS, *uncached, *includes, *macros)


@functools.cache
def sources_digest(names: tuple[str, ...]) -> str:
    """SHA-256 of these kernels' files below `KERNEL_DIRECTORY` and of all that they include."""
    digest = hashlib.sha256()
    for name in names:
        for path, text in sorted(_sources(CudaKernel(name, "", "", {}, 1, 0)).items()):
            digest.update(hashlib.sha256(path.encode()).digest() + hashlib.sha256(text).digest())
    return digest.hexdigest()


def _sources(kernel: CudaKernel) -> dict[str, bytes]:
    """The kernel's file and every file of ours that it includes, directly or not, by relative path.

    Includes name files by their path below `header_directory`, wherever they stand.
    """
    path = kernel.directory / kernel.source
    try:
        texts = {kernel.source: path.read_bytes()}
    except OSError as error:
        raise BuildError(f"kernel source {path} cannot be read: {error.strerror}") from error
    waiting = [kernel.source]
    while waiting:
        for match in _INCLUDE.finditer(texts[waiting.pop()]):
            name = match[1].decode()
            directories = (kernel.header_directory, *kernel.more_header_directories)
            header = next((each / name for each in directories if (each / name).is_file()), None)
            # What is not ours is a toolkit's header, or one that the compiler will name as missing.
            if name not in texts and header is not None:
                texts[name] = header.read_bytes()
                waiting.append(name)
    return texts


def _compile(kernel: CudaKernel, recipe: Recipe, sources: dict[str, bytes], path: Path) -> Compilation:
    nvrtc = _nvrtc()
    headers = [name for name in sources if name != kernel.source]
    status, program = nvrtc.nvrtcCreateProgram(
        sources[kernel.source],
        kernel.source.encode(),
        len(headers),
        [sources[name] for name in headers],
        [name.encode() for name in headers],
    )
    _check(status, "nvrtcCreateProgram")
    try:
        options = [flag.encode() for flag in recipe.flags]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode(errors="replace")
        log = log.rstrip("\0\n")
        if int(status) != 0:
            raise BuildError(
                f"{kernel.label} does not compile for {kernel.architecture}: {_first_error(log)}", log
            )
        path.write_bytes(_text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    resources = parse_resources(log, kernel)
    if resources.blocks_per_sm == 0:
        raise BuildError(
            f"{kernel.label} for {kernel.architecture} leaves room for no block on a multiprocessor "
            "(take smaller tiles or fewer warps)",
            log,
        )
    return Compilation(log=log, resources=resources)


def _text(size_of: Callable[..., Any], read: Callable[..., Any], program: object) -> bytes:
    status, size = size_of(program)
    _check(status, size_of.__name__)
    buffer = b" " * int(size)
    _check(read(program, buffer)[0], read.__name__)  # writes into the buffer
    return buffer


def _first_error(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next(
        (line for line in lines if "error" in line), lines[0] if lines else "the compiler gave no reason"
    )


def parse_resources(log: str, kernel: CudaKernel) -> Resources:
    """The resource table of a kernel from what ``ptxas -v`` printed; BuildError if it is not there."""
    stack, registers = _STACK.search(log), _REGISTERS.search(log)
    if stack is None or registers is None:
        raise BuildError(f"{kernel.label}: the compiler printed no resource table; see the log", log)
    shared = _STATIC_SHARED.search(log)
    return _with_occupancy(
        kernel,
        Resources(
            registers_per_thread=int(registers[1]),
            spill_store_bytes=int(stack[2]),
            spill_load_bytes=int(stack[3]),
            stack_bytes=int(stack[1]),
            static_shared_bytes=int(shared[1]) if shared else 0,
            dynamic_shared_bytes=kernel.dynamic_shared_bytes,
            threads_per_block=kernel.threads_per_block,
            blocks_per_sm=0,
            occupancy=0.0,
        ),
    )


def _with_occupancy(kernel: CudaKernel, resources: Resources) -> Resources:
    fits = occupancy(
        kernel.architecture,
        kernel.threads_per_block,
        resources.registers_per_thread,
        resources.static_shared_bytes + kernel.dynamic_shared_bytes,
    )
    return dataclasses.replace(
        resources,
        dynamic_shared_bytes=kernel.dynamic_shared_bytes,
        threads_per_block=kernel.threads_per_block,
        blocks_per_sm=fits.blocks_per_sm,
        occupancy=fits.fraction,
    )


def _refuse_defects(kernel: CudaKernel, resources: Resources, log: str) -> None:
    defects = []
    if resources.spill_store_bytes or resources.spill_load_bytes:
        defects.append(
            f"spills {resources.spill_store_bytes + resources.spill_load_bytes} bytes of registers to memory"
        )
    if resources.stack_bytes:
        defects.append(f"has a stack frame of {resources.stack_bytes} bytes")
    defects += [f"makes ptxas warn: {match[0].strip()}" for match in _SERIALISED.finditer(log)]
    if defects:
        raise KernelDefectError(
            f"{kernel.label} for {kernel.architecture} {'; '.join(defects)} "
            "(take smaller tiles or more warps)",
            log,
        )

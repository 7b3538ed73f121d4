"""C++ for this machine: the instruction sets it has, the compiler, and loading what it compiled.

Code is compiled for a named instruction set with explicit ``-m`` flags, never for "this CPU". The same recipe gives
the same code anywhere, and a library is only loaded where the CPU has every feature that its flags turned on, also
when several machines share one home directory.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from flashmoe_science.errors import BuildError, DeviceError, NoRoomError
from flashmoe_science.jit.cache import (
    DIRECTORY_VARIABLE,
    Compilation,
    CompileCache,
    default_cache,
    entry_changed,
)
from flashmoe_science.jit.records import KernelBuild, Recipe

COMPILER_VARIABLE = "CXX"
INSTRUCTION_SET_VARIABLE = "FLASHMOE_CPU_ISA"
COMPILE_TIMEOUT_S = 300

_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq")
_AMX = ("amx_tile", "amx_bf16")

COMMON_FLAGS = (
    "-std=c++17",
    "-O3",
    # The kernels say themselves where a product and a sum are fused, and rely on rounding elsewhere.
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-exceptions",
    "-fno-rtti",
    "-fvisibility=hidden",
    "-fPIC",
    "-shared",
    "-pthread",
)

_DISK_FULL = re.compile("No space left on device|Disk quota exceeded|ENOSPC|NoSpaceLeft")
_LINKER_FAILED = re.compile(r"ld returned \d+ exit status|linker command failed")


class InstructionSet(Enum):
    """What the CPU code is compiled for, fastest first on most CPUs."""

    AMX = "amx"
    AVX512_BF16 = "avx512_bf16"
    AVX512 = "avx512"
    AVX2 = "avx2"
    PORTABLE = "portable"

    @property
    def features(self) -> tuple[str, ...]:
        """CPU features that the code needs, by their names in /proc/cpuinfo."""
        return {
            InstructionSet.AMX: (*_AVX512, "avx512_bf16", *_AMX),
            InstructionSet.AVX512_BF16: (*_AVX512, "avx512_bf16"),
            InstructionSet.AVX512: _AVX512,
            InstructionSet.AVX2: _AVX2,
            InstructionSet.PORTABLE: (),
        }[self]

    @property
    def flags(self) -> tuple[str, ...]:
        return feature_flags(self.features)


def feature_flags(features: Sequence[str]) -> tuple[str, ...]:
    """The compiler's flags for CPU features that are named as in /proc/cpuinfo."""
    return tuple("-m" + feature.replace("_", "-" if feature in _AMX else "") for feature in features)


def integer_dot_products(instruction_set: InstructionSet) -> tuple[str, ...]:
    """The feature that multiplies bytes and adds fours of products to 32 bits (VNNI), by its name in /proc/cpuinfo:
    where this CPU has it beside an instruction set with vectors of 512 bits, else none.

    It is part of no instruction set, because processors with and without products of bf16 have it.
    """
    wide = "avx512f" in instruction_set.features
    return ("avx512_vnni",) if wide and "avx512_vnni" in cpu_features() else ()


@dataclass(frozen=True)
class HostCompiler:
    """A C++ compiler of this machine."""

    command: tuple[str, ...]
    version: str
    """The first line of what it says about itself."""
    environment: tuple[tuple[str, str], ...] = ()
    baseline_flags: tuple[str, ...] = ()
    """Flags that keep it from targeting this very CPU, if it would."""


@functools.cache
def cpu_features() -> frozenset[str]:
    """The features that the CPU has and the operating system lets programs use, from /proc/cpuinfo."""
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name.strip() in ("flags", "Features"):
                    return frozenset(value.split())
    except OSError:
        pass
    return frozenset()


@functools.cache
def amx_is_granted() -> bool:
    """Whether this process may use the matrix unit's registers: Linux grants them to a process that asks.

    Asked for once, with arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA). Containers may refuse.
    """
    if not cpu_features().issuperset(_AMX) or platform.machine() != "x86_64":
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    try:
        return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)
    except (OSError, AttributeError):
        return False


def available_instruction_sets() -> tuple[InstructionSet, ...]:
    """Those that this CPU can run, fastest first."""
    able = [each for each in InstructionSet if not missing_for(each)]
    if cpu_features().issuperset(_AMX) and able[0] is InstructionSet.AVX512_BF16:
        # A CPU with a matrix unit leaves products of bf16 to it: its vectors' are slower than widened ones.
        able[:2] = able[1::-1]
    return tuple(able)


def missing_for(wanted: InstructionSet) -> list[str]:
    """What this CPU lacks for it, or the operating system does not grant."""
    missing = sorted(set(wanted.features) - cpu_features())
    if not missing and wanted is InstructionSet.AMX:
        if not amx_is_granted():
            missing = ["the operating system's leave to use amx_tile"]
        elif not _compiler_takes(wanted.flags):
            missing = ["a compiler that knows amx_tile: g++ 11 or clang++ 12, or newer"]
    return missing


@functools.cache
def _compiler_takes(flags: tuple[str, ...]) -> bool:
    """Whether the compiler knows these flags; True where there is none, as that is said elsewhere."""
    try:
        compiler = find_compiler()
    except DeviceError:
        return True
    if compiler.environment:  # Zig's, which is newer than any of them
        return True
    words = (*compiler.command, *flags, "-fsyntax-only", "-x", "c++", os.devnull)
    try:
        done = subprocess.run(words, capture_output=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return True
    return done.returncode == 0


def choose_instruction_set() -> InstructionSet:
    """The fastest one that this CPU can run, or the one that ``$FLASHMOE_CPU_ISA`` names.

    Raises:
        DeviceError: the variable names no instruction set, or one that this CPU lacks.
    """
    named = os.environ.get(INSTRUCTION_SET_VARIABLE)
    if not named:
        return available_instruction_sets()[0]
    try:
        wanted = InstructionSet(named)
    except ValueError as error:
        raise DeviceError(
            f"{INSTRUCTION_SET_VARIABLE}={named} is not an instruction set; "
            f"set it to one of {', '.join(each.value for each in InstructionSet)}, or unset it"
        ) from error
    require_instruction_set(wanted)
    return wanted


def require_instruction_set(wanted: InstructionSet) -> None:
    missing = missing_for(wanted)
    if missing:
        raise DeviceError(
            f"this CPU cannot run {wanted.value} code (it lacks {', '.join(missing)}); "
            f"it can run {', '.join(each.value for each in available_instruction_sets())}"
        )


@functools.cache
def find_compiler() -> HostCompiler:
    """``$CXX``, else g++, clang++, c++, else the compiler in the ``ziglang`` wheel.

    Raises:
        DeviceError: there is none, or ``$CXX`` cannot be run.
    """
    named = os.environ.get(COMPILER_VARIABLE)
    if named:
        try:
            command = shlex.split(named)
        except ValueError:  # a quote that is not closed
            command = []
        path = shutil.which(command[0]) if command else None
        if path is None:
            raise DeviceError(
                f"${COMPILER_VARIABLE} is {named!r}, which is not a program; correct it or unset it"
            )
        return _described((path, *command[1:]))
    for name in ("g++", "clang++", "c++"):
        path = shutil.which(name)
        if path is not None:
            return _described((path,))
    zig = _find_zig()
    if zig is not None:
        return zig
    raise DeviceError(
        "no C++ compiler found (looked for $CXX, g++, clang++, c++, the ziglang wheel); "
        "install one, e.g.: pip install ziglang"
    )


def build(
    source: Path,
    kernel: str,
    instruction_set: InstructionSet,
    cache: CompileCache | None = None,
    *,
    macros: Mapping[str, int] | None = None,
    include_directories: Sequence[Path] = (),
    further_features: Sequence[str] = (),
) -> KernelBuild:
    """The shared library of one translation unit, from the cache or compiled now.

    Args:
        source: the .cpp file; every .h file beside it counts as one of its headers.
        kernel: the kernel's name in the recipe.
        instruction_set: what to compile for.
        cache: where to keep it; `default_cache` unless given.
        macros: defined for the compilation.
        include_directories: searched for headers besides; every .h file below them counts as one of its headers.
        further_features: CPU features that this code takes besides those of the instruction set; the CPU has them.

    Raises:
        BuildError: it does not compile; the compiler's output is in its ``log``.
        DeviceError: there is no compiler, no usable cache directory, or the CPU lacks the instruction set.
    """
    require_instruction_set(instruction_set)
    compiler = find_compiler()
    cache = default_cache() if cache is None else cache
    macros = {} if macros is None else macros
    files = {file.name: file for file in (source, *sorted(source.parent.glob("*.h")))}
    for directory in include_directories:
        headers = sorted(directory.rglob("*.h"))
        files |= {str(file.relative_to(directory)): file for file in headers}
    recipe = Recipe(
        kernel=kernel,
        backend="host",
        architecture="+".join(
            (f"{platform.machine()}:{instruction_set.value}", *instruction_set.features, *further_features)
        ),
        configuration=dict(macros),
        compiler=" ".join(compiler.command),
        compiler_version=compiler.version,
        flags=(
            *COMMON_FLAGS,
            *compiler.baseline_flags,
            *instruction_set.flags,
            *feature_flags(further_features),
            *(f"-D{name}={value}" for name, value in macros.items()),
        ),
        sources={name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()},
    )
    # Where headers lie is not part of the recipe: what they say is.
    searched = tuple(f"-I{directory}" for directory in include_directories)
    return cache.get_or_build(
        recipe, ".so", lambda path: _compile(compiler, recipe, source, searched, cache, path)
    )


def load(build: KernelBuild) -> ctypes.CDLL:
    """The library of a build in this process, loaded through the cache's open directory.

    Raises:
        BuildError: its entry in the cache has gone or was changed, or the dynamic loader refuses it.
    """
    cache = CompileCache(build.artifact.parent)
    path = cache.path_to_load(build.key)
    if path is None:
        raise entry_changed(build)
    try:
        return ctypes.CDLL(path)
    except OSError as error:
        raise BuildError(
            f"{build.recipe.label} was compiled but cannot be loaded ({error}); "
            f"check that {build.artifact.parent} is not mounted noexec"
        ) from error


def _compile(
    compiler: HostCompiler,
    recipe: Recipe,
    source: Path,
    searched: Sequence[str],
    cache: CompileCache,
    path: Path,
) -> Compilation:
    command = [*compiler.command, *recipe.flags, *searched, source.name, "-o", str(path)]
    # LC_ALL: what it says is searched below.
    environment = {**os.environ, **dict(compiler.environment), "LC_ALL": "C"}
    if compiler.environment:
        environment["ZIG_GLOBAL_CACHE_DIR"] = str(cache.tool_directory("zig"))
        environment["ZIG_LOCAL_CACHE_DIR"] = environment["ZIG_GLOBAL_CACHE_DIR"]
    try:
        done = subprocess.run(
            command,
            cwd=source.parent,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=COMPILE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(
            f"{recipe.compiler} had not compiled {recipe.label} after {COMPILE_TIMEOUT_S} s; "
            f"is the machine overloaded? Try again, or name another compiler in ${COMPILER_VARIABLE}"
        ) from error
    except OSError as error:
        raise DeviceError(f"cannot run the compiler {recipe.compiler}: {error.strerror}") from error
    if done.returncode != 0:
        full = next((line for line in done.stdout.splitlines() if _DISK_FULL.search(line)), None)
        if full is not None:
            raise NoRoomError(
                f"the disk is full, so {recipe.label} could not be compiled ({full.strip()}); free space in the "
                f"compile cache {cache.directory} and in {tempfile.gettempdir()}, or set {DIRECTORY_VARIABLE} "
                "and TMPDIR to directories on another disk",
                done.stdout,
            )
        reason = _reason(done.stdout) or f"exit status {done.returncode}, no output"
        raise BuildError(
            f"{recipe.compiler} did not compile {recipe.label}: {reason}; "
            f"name another compiler in ${COMPILER_VARIABLE} or update this one",
            done.stdout,
        )
    return Compilation(log=shlex.join(command) + "\n" + done.stdout)


def _reason(output: str) -> str | None:
    """The line of a compiler's output that says what went wrong."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    # The driver only repeats that the linker failed; the linker's own lines come before and need not say "error".
    telling = [line for line in lines if not _LINKER_FAILED.search(line)] or lines
    errors = [line for line in telling if "error" in line.lower()]
    return next(iter(errors or telling), None)


def _described(command: tuple[str, ...]) -> HostCompiler:
    try:
        done = subprocess.run(
            [*command, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise DeviceError(
            f"the compiler {shlex.join(command)} does not run ({error}); "
            f"reinstall it or name another one in ${COMPILER_VARIABLE}"
        ) from error
    lines = done.stdout.splitlines()
    return HostCompiler(command=command, version=lines[0].strip() if lines else "unknown")


def _find_zig() -> HostCompiler | None:
    spec = importlib.util.find_spec("ziglang")
    if spec is None or not spec.submodule_search_locations:
        return None
    executable = Path(spec.submodule_search_locations[0]) / "zig"
    if not executable.is_file():
        return None
    # `zig cc` on a .cpp file: C++ without libc++, which the kernels do not use and Zig would build first.
    baseline = ("-march=baseline",) if platform.machine() == "x86_64" else ()
    return HostCompiler(
        command=(str(executable), "cc"),
        version=f"ziglang {importlib.metadata.version('ziglang')}",
        environment=(("ZIG_GLOBAL_CACHE_DIR", ""),),
        baseline_flags=baseline,
    )

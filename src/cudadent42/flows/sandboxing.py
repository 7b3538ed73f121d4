"""What a run with ``--untrusted`` gives its candidates to see, and the sandbox that is made of it."""

from __future__ import annotations

import glob
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from cudadent42.base import parcels
from cudadent42.base.errors import MachineNotReadyError
from cudadent42.base.paths import real_path
from cudadent42.model.implementations import is_plug_in, plug_in_file
from cudadent42.model.records import Plan
from cudadent42.model.sandbox import Protection
from cudadent42.preflight.host import available_memory
from cudadent42.sandbox import cgroup
from cudadent42.sandbox.launch import Sandbox, sandbox
from cudadent42.sandbox.policy import Limits, Policy
from cudadent42.versions.sources import folder_of
from flashmoe_science.errors import DeviceError
from flashmoe_science.jit.cache import cache_directory
from flashmoe_science.jit.host import COMPILER_VARIABLE

_SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt", "/nix/store", "/gnu/store"),
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/localtime"),
    *("/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/os-release"),
)
"""Programs and libraries, and what these look up. No other settings of the machine."""

_GPU_DEVICES = ("/dev/nvidia*", "/dev/dxg")
_TOOLKIT_VARIABLES = ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX")
_COMPILERS = ("c++", "g++", "clang++", "cc", "gcc", "clang", "nvcc", "ld")
_GIB = 1 << 30
_MEMORY_SHARE = 0.75
_SCRATCH_SHARE, _MOST_SCRATCH = 0.125, 2 * _GIB
_UNTOUCHED_ADDRESSES = 32 * _GIB
"""That a process on the CPU maps beyond what it fills: stacks of threads, arenas of the allocator."""


@contextmanager
def untrusted(
    device: str,
    files: Sequence[Path],
    accepted: Sequence[Protection] = (),
    *,
    versions: Sequence[Path] = (),
) -> Iterator[Sandbox]:
    """A sandbox for these files of candidates and folders of versions; its scratch is gone at the end.

    Raises MachineNotReadyError where the machine does not protect what is not ``accepted`` as unprotected.
    """
    limits = limits_for(device)
    scratch = tempfile.mkdtemp(prefix="cudadent42-sandbox-")
    groups = cgroup.make(limits)
    try:
        cache = _compile_cache()
        sent = parcels.folder()
        policy = Policy(
            readable=(
                *_system(),
                *_python(),
                *_shown(files),
                str(cache),
                *([] if sent is None else [str(sent)]),
            ),
            devices=_devices(device),
            scratch=os.path.realpath(scratch),
            folder=os.getcwd(),
            limits=limits,
            links={str(each.relative_to(cache)): str(each) for each in versions if cache in each.parents},
            cache_seed=str(cache),
            cgroups=groups,
        )
        yield sandbox(policy, accepted)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        cgroup.remove(groups)


def candidates_of(plan: Plan) -> tuple[list[Path], list[Path]]:
    """The files of a plan's plug-ins, and the folders of its versions."""
    names = [name for name in plan.implementations if name not in plan.versions]
    files = [plug_in_file(name) for name in names if is_plug_in(name)]
    return files, [folder_of(version) for version in plan.versions.values()]


def limits_for(device: str) -> Limits:
    """Of this machine as it is now."""
    memory = available_memory() or _GIB
    scratch = min(_MOST_SCRATCH, int(_SCRATCH_SHARE * memory))
    most = int(_MEMORY_SHARE * memory)
    return Limits(
        memory_bytes=most,
        address_bytes=None if device.startswith("cuda") else most + _UNTOUCHED_ADDRESSES,
        processes=max(1024, 32 * (os.cpu_count() or 1)),
        file_bytes=scratch,
        open_files=4096,
        scratch_bytes=scratch,
    )


def _compile_cache() -> Path:
    try:
        return cache_directory()
    except DeviceError as error:
        raise MachineNotReadyError(str(error)) from error


def _system() -> Iterator[str]:
    yield from _SYSTEM
    for path in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep):
        if os.path.isabs(path):
            yield from _unless_home(path)
    for variable in _TOOLKIT_VARIABLES:
        yield from _unless_home(os.environ.get(variable, ""))
    for name in _compilers():
        if program := shutil.which(name):
            yield from _unless_home(os.path.dirname(os.path.dirname(os.path.realpath(program))))


def _compilers() -> Iterator[str]:
    """The usual ones, and the one by which the CPU kernels are compiled."""
    yield from _COMPILERS
    with suppress(ValueError):  # a quote that is not closed
        yield from shlex.split(os.environ.get(COMPILER_VARIABLE, ""))[:1]


def _python() -> Iterator[str]:
    """The interpreter, and where it takes modules from. Not the current folder, which is nobody's in particular."""
    here = os.path.realpath(os.getcwd())
    program = os.path.realpath(sys.executable)
    paths = [sys.prefix, sys.base_prefix, sys.exec_prefix, program, *sys.path]
    paths.append(str(Path(__file__).resolve().parents[2]))
    for path in paths:
        if os.path.isabs(path) and os.path.realpath(path) != here:
            yield from _unless_home(path)


def _unless_home(path: str) -> Iterator[str]:
    """The folder, unless it is this user's home, or has that in it."""
    if path and not _holds_much(Path(path)):
        yield path


def _holds_much(folder: Path) -> bool:
    """Whether more than one project lies in it: a home, what is above one, the folder for temporary files."""
    folder = real_path(folder)
    others = [real_path(Path(tempfile.gettempdir()))]
    with suppress(RuntimeError):  # a user without a home
        others.append(real_path(Path.home()))
    return any(folder == each or folder in each.parents for each in others)


def _shown(files: Sequence[Path]) -> Iterator[str]:
    """Each file, and what lies beside it: not what is hidden, and no links out of the folder."""
    for file in files:
        yield str(file.absolute())
        folder = file.absolute().parent
        if _holds_much(folder):
            continue
        for each in folder.iterdir():
            if not _hidden(each) and real_path(folder) in real_path(each).parents:
                yield from _without_hidden(each)


def _hidden(path: Path) -> bool:
    return path.name.startswith(".")


def _without_hidden(path: Path) -> list[str]:
    """The path; in the place of a folder with something hidden below it, its parts that are not."""
    if path.is_symlink() or not path.is_dir():
        return [str(path)]
    try:
        entries = sorted(path.iterdir())
    except PermissionError:
        return []
    below = {each: _without_hidden(each) for each in entries if not _hidden(each)}
    if len(below) == len(entries) and all(parts == [str(each)] for each, parts in below.items()):
        return [str(path)]
    return [part for parts in below.values() for part in parts]


def _devices(device: str) -> tuple[str, ...]:
    if not device.startswith("cuda"):
        return ()
    return tuple(path for pattern in _GPU_DEVICES for path in sorted(glob.glob(pattern)))

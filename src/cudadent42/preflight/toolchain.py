"""What compiles kernels and keeps them: the host compiler, NVRTC, nvcc if any, the compile cache."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from cudadent42.base.paths import real_path
from cudadent42.model.records import Status
from cudadent42.preflight.definitions import THIS_PYTHON, Context, Definition, Fact, Finding, Problem
from flashmoe_science.errors import DeviceError
from flashmoe_science.jit.cache import DIRECTORY_VARIABLE, cache_directory
from flashmoe_science.jit.host import find_compiler

_VERSION_TIMEOUT_S = 10
_UNKNOWN = "unknown version"


def _compiler(context: Context) -> Finding:
    try:
        compiler = find_compiler()
    except DeviceError as error:
        problem = "missing-gpu" if context.wants_gpu else "missing"
        return Finding("none that runs", problem, {"python": THIS_PYTHON, "reason": str(error).split(";")[0]})
    command = shlex.join(compiler.command)
    return Finding(
        f"{compiler.version}: {command}", facts={"compiler": command, "compiler_version": compiler.version}
    )


def _nvrtc(context: Context) -> Finding:
    version = nvrtc_version()
    if version is not None:
        return Finding(version, facts={"nvrtc": version})
    if not context.wants_gpu:
        return Finding("none, and a CPU run needs none", skipped=True)
    return Finding("not found", "missing", {"python": THIS_PYTHON})


def nvrtc_version() -> str | None:
    """Version of the NVRTC that would be used, ``13.0``; None where there is none. Needs no driver."""
    try:
        from cuda.bindings import nvrtc
    except ImportError:
        return None
    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except (RuntimeError, OSError):  # the bindings are there and the library is not
        return None
    return f"{major}.{minor}"


def _nvcc(context: Context) -> Finding:
    on_path = shutil.which("nvcc")
    path = on_path or find_nvcc()
    if path is None:
        return Finding("none, and nothing here needs it", skipped=True)
    version = _nvcc_version(path)
    facts: dict[str, Fact] = {"nvcc": version, "nvcc_path": path}
    detail = f"{version} at {path}"
    if on_path:
        return Finding(detail, facts=facts)
    if not context.wants_gpu:
        return Finding(f"{detail}, not on PATH; a CPU run does not need it", facts=facts, skipped=True)
    return Finding(detail, "off-path", {"folder": str(Path(path).parent)}, facts)


def find_nvcc(root: Path = Path("/usr/local")) -> str | None:
    """An nvcc in the usual places off the PATH: ``$CUDA_HOME``, ``/usr/local/cuda*``, newest first."""
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    homes += [root / "cuda", *sorted(root.glob("cuda-*"), key=_numbers, reverse=True)]
    return next((str(home / "bin/nvcc") for home in homes if os.access(home / "bin/nvcc", os.X_OK)), None)


def _numbers(path: Path) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", path.name))


def _nvcc_version(path: str) -> str:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return _UNKNOWN
    match = re.search(r"release (\d+\.\d+)", done.stdout)
    return match[1] if match else _UNKNOWN


_CUDA_VERSION = re.compile(r"^#define CUDA_VERSION\s+(\d+)", re.MULTILINE)
_INCLUDE_VARIABLES = ("CPATH", "CPLUS_INCLUDE_PATH", "C_INCLUDE_PATH")


def _cuda_headers(context: Context) -> Finding:
    """The headers that a compilation would find first, against the compiler: the record's stale headers."""
    nvcc = shutil.which("nvcc") or find_nvcc()
    if nvcc is None:
        return Finding("no CUDA toolkit, and nothing here needs one", skipped=True)
    header = _first_cuda_header(real_path(Path(nvcc)).parent.parent)
    if header is None:
        return Finding("nvcc without headers", skipped=True)
    match = _CUDA_VERSION.search(header.read_text(errors="replace"))
    number = int(match[1]) if match else 0
    version, compiler = f"{number // 1000}.{number % 1000 // 10}", _nvcc_version(nvcc)
    problem = "mismatch" if compiler not in (version, _UNKNOWN) else None
    values = {"version": version, "compiler": compiler, "header": header}
    return Finding(f"{version} in {header}", problem, values)


def _first_cuda_header(toolkit: Path) -> Path | None:
    named = [
        folder for name in _INCLUDE_VARIABLES for folder in os.environ.get(name, "").split(":") if folder
    ]
    folders = [*map(Path, named), toolkit / "include", Path("/usr/include")]
    return next((folder / "cuda.h" for folder in folders if (folder / "cuda.h").is_file()), None)


def _cache(context: Context) -> Finding:
    values = {"variable": DIRECTORY_VARIABLE, "python": THIS_PYTHON}
    try:
        directory = cache_directory()
    except DeviceError as error:
        named = named_cache_directory()
        if named is not None and is_open_to_others(named):
            return Finding(f"{named}", "open", values | {"directory": named})
        return Finding("unusable", "unusable", values | {"reason": str(error).split(";")[0]})
    return Finding(str(directory), facts={"cache": str(directory)})


def named_cache_directory() -> Path:
    """Where the cache is to be, whether or not it can be used."""
    named = os.environ.get(DIRECTORY_VARIABLE)
    if named:
        return Path(os.path.expanduser(named))
    base = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    if base.startswith("~"):  # without a home, as `flashmoe_science.jit.cache` has it
        return Path(tempfile.gettempdir()) / f"flashmoe_science-{os.geteuid()}"
    return Path(base) / "flashmoe_science"


def is_open_to_others(directory: Path) -> bool:
    """Whether this user owns the directory and others may write to it."""
    try:
        status = directory.stat()
    except OSError:
        return False
    return status.st_uid == os.getuid() and bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


DEFINITIONS = (
    Definition(
        "compiler",
        "compiles the CPU kernel at first use",
        _compiler,
        (
            Problem(
                "missing",
                Status.FAIL,
                "{reason}",
                "{python} -m pip install ziglang",
            ),
            Problem(
                "missing-gpu",
                Status.WARN,
                "{reason}, so kernels run on the GPU only",
                "{python} -m pip install ziglang",
            ),
        ),
    ),
    Definition(
        "nvrtc",
        "compiles the CUDA kernels at first use",
        _nvrtc,
        (
            Problem(
                "missing",
                Status.FAIL,
                "NVRTC, which compiles the CUDA kernels, is not installed",
                "{python} -m pip install 'cuda-bindings>=13.0.3,<14' 'nvidia-cuda-nvrtc>=13.0,<14'",
            ),
        ),
    ),
    Definition(
        "nvcc",
        "only peers that compile with it need it",
        _nvcc,
        (
            Problem(
                "off-path",
                Status.WARN,
                "nvcc is installed in {folder} but not on PATH; what compiles with it will not find it",
                "export PATH={folder}:$PATH",
            ),
        ),
    ),
    Definition(
        "cuda-headers",
        "peers compile against them",
        _cuda_headers,
        (
            Problem(
                "mismatch",
                Status.WARN,
                "{header} is of CUDA {version} and nvcc of {compiler}: what is compiled with both may not load",
                "unset CPATH CPLUS_INCLUDE_PATH C_INCLUDE_PATH",
            ),
        ),
    ),
    Definition(
        "cache",
        "keeps compiled kernels",
        _cache,
        (
            Problem(
                "open",
                Status.FAIL,
                "others can write to the compile cache {directory}, so code in it cannot be trusted",
                "{python} -m cudadent42 cache clear",
            ),
            Problem(
                "unusable",
                Status.FAIL,
                "{reason}",
                "export {variable}=$HOME/flashmoe-cache",
            ),
        ),
    ),
)

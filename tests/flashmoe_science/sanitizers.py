"""The CPU kernels with AddressSanitizer and UBSan, called in a process of its own that preloads their runtime.

Compiling takes most of such a test, so the library is in the compile cache, as those of users are.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from flashmoe_science.jit import host
from flashmoe_science.jit.cache import Compilation, default_cache
from flashmoe_science.jit.host import InstructionSet
from flashmoe_science.jit.records import Recipe

_WITH_MATRIX_UNIT = Path(__file__).with_name("with_matrix_unit.py")
_SANITIZERS = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")


def output_under_sanitizers(
    source: Path,
    program: Path,
    *arguments: str,
    macros: Mapping[str, int] | None = None,
    further_features: Sequence[str] = (),
) -> str:
    """What the program prints, called with the arguments and the library of this kernel; it ends without an error."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++ for its sanitizer runtime")
    runtime = _output(compiler, "-print-file-name=libasan.so").strip()
    if not Path(runtime).is_absolute():
        pytest.skip("g++ has no AddressSanitizer runtime")
    library = _sanitized(source, compiler, {} if macros is None else macros, further_features)
    asks = [str(_WITH_MATRIX_UNIT)] if host.choose_instruction_set() is InstructionSet.AMX else []
    done = subprocess.run(
        [sys.executable, *asks, str(program), *arguments, str(library)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "LD_PRELOAD": runtime,
            "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def _sanitized(
    source: Path, compiler: str, macros: Mapping[str, int], further_features: Sequence[str]
) -> Path:
    instruction_set = host.choose_instruction_set()
    files = (source, *sorted(source.parent.glob("*.h")))
    recipe = Recipe(
        kernel=f"sanitized {source.stem}",
        backend="host",
        architecture="+".join(
            (f"{platform.machine()}:{instruction_set.value}", *instruction_set.features, *further_features)
        ),
        configuration=dict(macros),
        compiler=compiler,
        compiler_version=_output(compiler, "--version").splitlines()[0],
        flags=(
            *(flag for flag in host.COMMON_FLAGS if flag != "-O3"),
            *_SANITIZERS,
            *instruction_set.flags,
            *host.feature_flags(further_features),
            *(f"-D{name}={value}" for name, value in macros.items()),
        ),
        sources={file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files},
    )

    def compile_to(path: Path) -> Compilation:
        done = subprocess.run(
            [compiler, *recipe.flags, str(source), "-o", str(path)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return Compilation()

    return default_cache().get_or_build(recipe, ".so", compile_to).artifact


def _output(compiler: str, argument: str) -> str:
    return subprocess.run([compiler, argument], capture_output=True, text=True, check=True).stdout

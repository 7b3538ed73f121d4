"""The CPU kernels' libraries: built, found again, and run outside of PyTorch."""

from __future__ import annotations

import ctypes
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sanitizers import output_under_sanitizers

from flashmoe_science import cpu
from flashmoe_science.cpu import attention, varlen
from flashmoe_science.cpu.library import SOURCES, features_besides
from flashmoe_science.errors import BuildError
from flashmoe_science.jit import host
from flashmoe_science.jit.host import InstructionSet


def test_build_lists_every_kernel_and_finds_it_again() -> None:
    first, second = cpu.build(), cpu.build()
    kernels = [build.recipe.kernel for build in first]
    assert kernels == sorted(path.stem for path in SOURCES.glob("*.cpp"))
    assert {"attention_forward", "moe_forward", "topk_routing"} < set(kernels)
    assert all(build.cached for build in second)
    for build in second:
        assert build.artifact.read_bytes()[:4] == b"\x7fELF"
        assert build.resources is None
        assert set(host.choose_instruction_set().flags) <= set(build.recipe.flags)


@pytest.mark.parametrize("instruction_set", list(InstructionSet))
def test_attention_takes_products_of_integers_where_there_are_none_of_bf16(
    instruction_set: InstructionSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "cpu_features", lambda: frozenset({"avx512_vnni"}))
    in_integers = instruction_set is InstructionSet.AVX512
    assert features_besides("attention_forward", instruction_set) == (("avx512_vnni",) if in_integers else ())
    assert features_besides("attention_varlen", instruction_set) == ()


def test_own_threads_where_no_openmp_runtime_is_loaded() -> None:
    build = next(build for build in cpu.build() if build.recipe.kernel == "attention_forward")
    program = Path(__file__).with_name("own_threads.py")
    done = subprocess.run(
        [sys.executable, str(program), str(build.artifact)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "passed" in done.stdout


def passes_with_a_team_of_its_own(program: str, folder: Path) -> None:
    """Run the program with the library, and with late_team.cpp in place of OpenMP's teams."""
    if not sys.platform.startswith("linux") or shutil.which("g++") is None:
        pytest.skip("needs Linux and g++")
    team = folder / "late_team.so"
    source = Path(__file__).with_name("late_team.cpp")
    subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(team)], check=True)
    build = next(build for build in cpu.build() if build.recipe.kernel == "attention_forward")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(program)), str(build.artifact)],
        env={**os.environ, "LD_PRELOAD": str(team)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "passed" in done.stdout


@pytest.mark.usefixtures("fresh_processes")  # it is about what the loader finds first
def test_a_call_does_not_wait_again_for_a_thread_that_other_programs_keep_from_beginning(
    tmp_path: Path,
) -> None:
    """On a busy machine each call of OpenMP's team took a time slice of the others, whatever its size."""
    passes_with_a_team_of_its_own("late_threads.py", tmp_path)


@pytest.mark.usefixtures("fresh_processes")
def test_the_keys_of_few_rows_are_shared_by_a_team(tmp_path: Path) -> None:
    """One head of one row would otherwise be one task, whatever the number of threads."""
    passes_with_a_team_of_its_own("split_keys.py", tmp_path)


@pytest.mark.parametrize(
    ("program", "structure", "library"),
    [
        ("sanitized_calls.py", "Problem", attention._Problem),
        ("sanitized_varlen_calls.py", "Problem", varlen._Problem),
        ("sanitized_varlen_calls.py", "Call", varlen._Call),
    ],
)
def test_the_sanitized_programs_pass_what_the_library_does(
    program: str, structure: str, library: type[ctypes.Structure]
) -> None:
    own = runpy.run_path(str(Path(__file__).with_name(program)))[structure]
    fields, expected = (
        [(name, getattr(each, name).offset) for name, *_ in each._fields_] for each in (own, library)
    )
    assert fields == expected
    assert ctypes.sizeof(own) == ctypes.sizeof(library)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "calls"),
    [
        ("attention_forward", "sanitized_calls.py"),
        ("attention_backward", "sanitized_backward_calls.py"),
        ("attention_varlen", "sanitized_varlen_calls.py"),
    ],
)
def test_no_undefined_behaviour_under_the_sanitizers(kernel: str, calls: str) -> None:
    further = features_besides(kernel, host.choose_instruction_set())
    source, program = SOURCES / f"{kernel}.cpp", Path(__file__).with_name(calls)
    assert "passed" in output_under_sanitizers(source, program, further_features=further)


def test_a_source_that_does_not_compile_is_reported_with_its_first_error(tmp_path: Path) -> None:
    (tmp_path / "broken.cpp").write_text("int f() { return undeclared; }\n")
    with pytest.raises(BuildError, match="undeclared") as raised:
        host.build(tmp_path / "broken.cpp", "broken", InstructionSet.PORTABLE)
    assert "broken.cpp" in raised.value.log

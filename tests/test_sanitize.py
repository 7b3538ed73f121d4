"""tools/sanitize.sh runs every program of CUDA calls by both tools, and says which of them found something."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tools" / "sanitize.sh"
KERNELS = ROOT / "src" / "flashmoe_science" / "kernels" / "cuda"
PROGRAMS = sorted((ROOT / "tests" / "flashmoe_science").glob("sanitized_*_calls.py"))

STAND_IN = """#!/bin/sh
case "$*" in *"$BAD"*) [ -z "$BAD" ] || { echo "what it found"; exit 1; };; esac
echo "passed; launches: 1"
"""


def sanitize(folder: Path, *kernels: str, python: str = "", tool: str = "") -> tuple[int, str]:
    """With stand-ins for Python and compute-sanitizer, which fail where their arguments hold these words."""
    for name in ("python", "compute-sanitizer"):
        (folder / name).write_text(STAND_IN if name != "python" else STAND_IN.replace("$BAD", "$BAD_PYTHON"))
        (folder / name).chmod(0o755)
    done = subprocess.run(
        ["sh", str(SCRIPT), *kernels],
        env={
            **os.environ,
            **{"CUDADENT42_PYTHON": str(folder / "python"), "BAD": tool, "BAD_PYTHON": python},
            "COMPUTE_SANITIZER": str(folder / "compute-sanitizer"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_every_program_is_run_by_both_tools(tmp_path: Path) -> None:
    code, said = sanitize(tmp_path)
    assert code == 0
    for program in PROGRAMS:
        for tool in ("memcheck", "racecheck"):
            assert re.search(rf"^{program.name}, kernels \w+\*, {tool}: passed$", said, re.MULTILINE)


def test_every_program_has_what_it_imports(tmp_path: Path) -> None:
    """With the search path that the script gives it, and no other."""
    (tmp_path / "python").write_text('#!/bin/sh\nprintf %s "$PYTHONPATH" > "${0%/*}/path"\necho passed\n')
    (tmp_path / "python").chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    tools = dict.fromkeys(("CUDADENT42_PYTHON", "COMPUTE_SANITIZER"), str(tmp_path / "python"))
    subprocess.run(["sh", str(SCRIPT)], env={**environment, **tools}, capture_output=True, check=True)
    subprocess.run(
        [sys.executable, "-c", f"import {', '.join(path.stem for path in PROGRAMS)}"],
        env={**environment, "PYTHONPATH": f"{(tmp_path / 'path').read_text()}:{PROGRAMS[0].parent}"},
        check=True,
    )


def test_every_kernel_is_looked_at_by_a_program() -> None:
    """By what its name begins with: the others are not instrumented."""
    rows = re.findall(r'^ *echo "(sanitized_\w+_calls\.py) (\w+)"$', SCRIPT.read_text(), re.MULTILINE)
    names = {path.stem for path in KERNELS.glob("*.cu")}
    assert {program for program, _ in rows} == {path.name for path in PROGRAMS}
    assert not [name for name in names if not name.startswith(tuple(prefix for _, prefix in rows))]


@pytest.mark.parametrize(
    ("selection", "program"),
    [
        ("cuda.attention import KernelKind", "sanitized_cuda_calls.py"),
        ("cuda.attention.gradients.problem import GradientKind", "sanitized_backward_calls.py"),
        ("cuda.varlen.select import MODULES, VarlenKernel", "sanitized_varlen_calls.py"),
        ("cuda.moe import MoeKind", "sanitized_moe_calls.py"),
        ("cuda.moe.gradients import MoeBackwardKind", "sanitized_moe_backward_calls.py"),
    ],
)
def test_every_way_that_can_be_chosen_is_called(selection: str, program: str) -> None:
    """Each program goes through an enumeration of kernels, so that a new one is called too."""
    assert (
        f"from flashmoe_science.{selection}"
        in (SCRIPT.parents[1] / "tests/flashmoe_science" / program).read_text()
    )
    packages = {path.parent for path in (ROOT / "src/flashmoe_science/cuda").rglob("select.py")}
    assert len(packages) == 5  # one more operation needs one more program, and a row here


def test_what_is_found_is_shown_and_named(tmp_path: Path) -> None:
    code, said = sanitize(tmp_path, tool="racecheck")
    assert code == 1
    assert "sanitized_moe_calls.py, kernels topk_*, racecheck: FAILED" in said
    assert "sanitized_moe_calls.py, kernels topk_*, memcheck: passed" in said
    assert "what it found" in said


def test_a_program_that_fails_by_itself_is_no_finding(tmp_path: Path) -> None:
    code, said = sanitize(tmp_path, python="varlen")
    assert code == 2
    assert "sanitized_varlen_calls.py failed without the sanitizer" in said
    assert not re.search("^sanitized_varlen_calls.py, ", said, re.MULTILINE)
    assert "sanitized_moe_calls.py, kernels moe_*, racecheck: passed" in said


def test_kernels_of_attention_that_are_named(tmp_path: Path) -> None:
    code, said = sanitize(tmp_path, "hopper", "portable")
    assert code == 0
    assert set(re.findall(r"^(\S+),", said, re.MULTILINE)) == {"sanitized_cuda_calls.py"}

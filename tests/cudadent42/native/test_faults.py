"""A kernel file that crashes, hangs or is wrong costs what it deserves and no more."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from cudadent42.model.records import Plan, VerifiedCase, VerifyReport
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.scaffold import Kind, create
from cudadent42.stages.verify import verify
from cudadent42.timing.processor_time import descendants
from cudadent42.worker.parent import Worker
from cudadent42.worker.stages import run_stage

ROOT = Path(__file__).resolve().parents[3]
SUITE = """
name = "unit"
dtypes = ["fp32"]
repeats = 3
warmup = 1
case = [
    { name = "bad", batch = 1, num_heads = 2, seqlen = 17, head_dim = 64 },
    { name = "good", batch = 1, num_heads = 2, seqlen = 32, head_dim = 64 },
]
"""


def faulty(folder: Path, fault: str) -> Path:
    """The starting point for two lengths, to be quick, with a fault where seqlen_q is 17."""
    create("mine", Kind.CPU, folder)
    source = folder / "mine" / "mine.cpp"
    head = "CUDADENT42_EXPORT int mine(const Cudadent42Attention *problem) {\n"
    text = source.read_text()
    assert head in text
    only = "    if (problem->seqlen_q != 17 && problem->seqlen_q != 32) return CUDADENT42_UNSUPPORTED;\n"
    source.write_text(text.replace(head, f"{head}{only}    if (problem->seqlen_q == 17) {{ {fault} }}\n"))
    return folder / "mine" / "mine.toml"


def plan_for(kernel: Path) -> Plan:
    cases = tuple(
        AttentionCase(name, "fp32", 1, 2, 2, length, length, 64)
        for name, length in (("bad", 17), ("good", 32))
    )
    return Plan("unit", "cpu", cases, "pytorch", ("pytorch", str(kernel)), repeats=2, warmup=0, seed=0)


def of_kernel(report: VerifyReport, kernel: Path) -> dict[str, VerifiedCase]:
    return {case.case: case for case in report.cases if case.implementation == str(kernel)}


@pytest.mark.parametrize(
    ("fault", "detail"),
    [("return CUDADENT42_DONE;", "entries wrong"), ("return 5;", "mine returned 5")],
)
def test_what_is_wrong_or_reports_an_error_fails_its_case(tmp_path: Path, fault: str, detail: str) -> None:
    kernel = faulty(tmp_path, fault)
    by_case = of_kernel(verify(plan_for(kernel), emit=lambda event: None), kernel)
    assert [case for case, result in by_case.items() if not result.passed] == ["bad/fp32"]
    assert detail in by_case["bad/fp32"].detail


def processor_s(keeper: int | None) -> float:
    """That the processes below a worker's keeper have had; 0 where there are none."""
    total_s = 0.0
    for process in descendants(str(keeper)) if keeper is not None else ():
        with contextlib.suppress(OSError):
            total_s += time.clock_gettime((~process << 3) | 2)  # clock_getcpuclockid(3)
    return total_s


@pytest.mark.parametrize(
    ("fault", "detail"),
    [
        ("*(volatile int *)0 = 1;", "SIGSEGV"),
        pytest.param("for (volatile int i = 0;; i = 0) {}", "no sign of life", marks=pytest.mark.slow),
    ],
    ids=["crash", "hang"],
)
def test_a_crash_or_a_hang_costs_its_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, detail: str
) -> None:
    kernel = faulty(tmp_path, fault)
    with Worker(timeout_s=8.0) as worker:
        # By processor time: a worker that is left waiting for a processor does not hang.
        clock = SimpleNamespace(monotonic=lambda: processor_s(worker.pid))
        monkeypatch.setattr("cudadent42.worker.parent.time", clock)
        report = run_stage("verify", plan_for(kernel), on_event=lambda event: None, worker=worker)
    by_case = of_kernel(report, kernel)
    assert [case for case, result in by_case.items() if not result.passed] == ["bad/fp32"]
    assert detail in by_case["bad/fp32"].detail


def test_a_kernel_that_does_not_compile_ends_the_run_before_anything_is_measured(tmp_path: Path) -> None:
    kernel = faulty(tmp_path, "this is no C++")
    (tmp_path / "unit.toml").write_text(SUITE)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "cudadent42", "bench", "--suite", "unit.toml", "--device", "cpu"),
            *("--implementations", str(kernel), "--output-dir", "run"),
        ],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 5, done.stderr
    assert "error" in done.stderr
    assert (tmp_path / "run" / "samples.csv").read_text().count("\n") == 1


def test_a_kernel_for_a_gpu_on_a_cpu(tmp_path: Path) -> None:
    create("mine", Kind.CUDA, tmp_path)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "cudadent42", "run", "--device", "cpu"),
            *("--implementations", str(tmp_path / "mine" / "mine.toml")),
        ],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "runs on cuda, not on cpu" in done.stderr

"""Files that a run rests on: who writes to one while candidates run is found, and what decides was loaded before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import lab
import pytest

from cudadent42.base.errors import ExitCode
from cudadent42.base.observer import Quiet
from cudadent42.flows import groundwork, pipeline
from cudadent42.integrity.files import Files
from cudadent42.model.integrity import Breach, Grade
from cudadent42.model.records import BuildReport, TimerKind
from cudadent42.plan import Choices, RunOptions
from flashmoe_science.jit.cache import cache_directory


def test_what_was_written_to_is_named(tmp_path: Path) -> None:
    for name in ("kept", "rewritten", "put_back", "removed"):
        (tmp_path / name).write_text("as it was")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "kept.pyc").write_text("Python's own")
    files = Files([tmp_path, tmp_path / "nowhere"])
    assert len(files) == 4
    assert files.written() == []
    (tmp_path / "rewritten").write_text("another")
    before = os.stat(tmp_path / "put_back")
    (tmp_path / "put_back").write_text("another")
    (tmp_path / "put_back").write_text("as it was")
    os.utime(tmp_path / "put_back", ns=(before.st_atime_ns, before.st_mtime_ns))
    (tmp_path / "removed").unlink()
    (tmp_path / "__pycache__" / "kept.pyc").write_text("newer")
    assert files.written() == [str(tmp_path / name) for name in ("put_back", "rewritten")]


def test_only_a_run_with_somebody_elses_code_has_a_finding(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("")
    files = Files([file])
    file.write_text("other")
    (finding,) = groundwork.written_while_run(lab.plan_for([f"{file}:attention"]), files)
    assert (finding.breach, finding.grade) == (Breach.REPLACED_FUNCTION, Grade.SUSPECT)
    assert finding.implementation == f"{file}:attention"
    assert str(file) in finding.evidence
    assert groundwork.written_while_run(lab.plan_for(["cudadent42"]), files) == ()


def test_what_the_environment_takes_from_pytorch_is_said() -> None:
    """As tried, a kernel in a file was 3.9 times as fast as PyTorch that way, and 2.1 times without."""
    assert groundwork.held_back({"OMP_NUM_THREADS": "2"}) == ""
    said = groundwork.held_back({"ATEN_CPU_CAPABILITY": "default", "CUDA_LAUNCH_BLOCKING": "1"})
    assert said.startswith("ATEN_CPU_CAPABILITY=default, CUDA_LAUNCH_BLOCKING=1: PyTorch is held to that")


def test_the_lab_and_its_kernels_are_among_them() -> None:
    import cudadent42
    import flashmoe_science

    files = groundwork.files_of(lab.plan_for(["mine.py:attention"]), BuildReport(()))
    for module in (cudadent42, flashmoe_science):
        assert str(Path(module.__file__)) in files._seen


def test_a_rival_that_was_compiled_again_is_no_rival(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The candidate changes what the baseline loads, in the audit too."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("FLASHMOE_CACHE_SEED", str(cache_directory()))
    monkeypatch.setenv("FLASHMOE_CACHE_DIR", str(tmp_path / "cache"))
    suite = tmp_path / "against-ours.toml"
    suite.write_text(f'baseline = "cudadent42"\n{lab.SUITE}')
    name = lab.cheat("rival_recompiled")
    options = RunOptions(
        choices=Choices(suite=str(suite), implementations=(name,), timer=TimerKind.CPU),
        device="cpu",
        ignore_preflight=True,
        output=tmp_path / "run",
        with_report=False,
        command=("test",),
    )
    outcome = pipeline.run(options, Quiet(), lambda opened: None)
    assert outcome.exit_code is ExitCode.UNTRUSTED_RESULT
    (line,) = (
        each.line for each in outcome.results.integrity.findings if str(tmp_path / "cache") in each.evidence
    )
    assert "replaced function (suspect)" in line
    assert not outcome.results.claim_allowed


IMPORTS = """
import os, sys
from cudadent42.flows import pipeline
ahead = set()
look = pipeline.files_of
def spy(plan, built):
    ahead.update(sys.modules)
    return look(plan, built)
pipeline.files_of = spy
from cudadent42.__main__ import main
try:
    main()
finally:
    late = sorted(set(sys.modules) - ahead)
    print("LATE", *(name for name in late if getattr(sys.modules[name], "__file__", None)), flush=True)
"""


@pytest.mark.slow
def test_nothing_is_imported_behind_a_candidates_start(tmp_path: Path) -> None:
    """Whoever wrote to a file meanwhile would else decide in this process."""
    suite = tmp_path / "adversaries.toml"
    suite.write_text(lab.SUITE)
    plug_in = lab.candidate(lab.FOLDER / "honest" / "ordinary.py", "plain")
    command = [sys.executable, "-c", IMPORTS, "run", "--suite", str(suite), "--implementation", plug_in]
    command += ["--device", "cpu", "--ignore-preflight", "--output-dir", str(tmp_path / "run"), "--sealed"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    (late,) = (line for line in done.stdout.splitlines() if line.startswith("LATE"))
    assert late == "LATE", done.stderr[-2000:]

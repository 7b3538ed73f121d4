"""Runs and races whose cases real workers of this machine share."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from cudadent42.base.errors import BuildFailedError, LabError
from cudadent42.base.files import read_record
from cudadent42.base.observer import Quiet
from cudadent42.fleet.engine import Joined
from cudadent42.fleet.folder import FolderEngine
from cudadent42.fleet.local import LocalEngine, slots
from cudadent42.fleet.spread import MACHINES, MOST_ATTEMPTS, Machines, Spread
from cudadent42.fleet.task import Returned, Task, Worker
from cudadent42.fleet.worker import tree_digest
from cudadent42.flows import pipeline
from cudadent42.model.records import BuildFailure, BuildReport, MachineReport, TimerKind
from cudadent42.plan import Choices, RunOptions
from cudadent42.runs.run_folder import RunStatus, RunWriter, load_manifest, load_run

SUITE = """
name = "unit"
dtypes = ["fp32"]
baseline = "pytorch"
implementations = ["pytorch", "cudadent42"]
repeats = 8
warmup = 1
case = [
    { name = "one", batch = 1, num_heads = 1, seqlen = 16, head_dim = 32 },
    { name = "two", batch = 1, num_heads = 1, seqlen = 24, head_dim = 32 },
    { name = "three", batch = 1, num_heads = 1, seqlen = 32, head_dim = 32 },
]
"""


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunOptions:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3] / "src"))
    (tmp_path / "suite.toml").write_text(SUITE)
    return RunOptions(
        choices=Choices(suite=str(tmp_path / "suite.toml"), timer=TimerKind.CPU),
        device="cpu",
        ignore_preflight=True,
        output=tmp_path / "run",
        audits=False,
        with_report=True,
    )


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two devices need two cores")
def test_cases_are_shared_and_one_run_folder_comes_back(options: RunOptions, tmp_path: Path) -> None:
    spread = Spread(lambda root: LocalEngine(root, slots("cpu", 2, "--fleet local:2"), ignore_preflight=True))
    outcome = pipeline.run(options, Quiet(), lambda folder: None, execute=spread.execute)
    run = load_run(tmp_path / "run")
    assert run.manifest.status is RunStatus.FINISHED
    assert outcome.verify.passed
    assert run.results is not None
    assert [case.name for case in run.results.cases] == ["one", "two", "three"]
    assert len(run.samples) == 3 * 8 * 3  # two implementations and the control
    assert (tmp_path / "run/report.html").is_file()
    machines = read_record(Machines, tmp_path / "run" / MACHINES, 1)
    assert machines is not None
    assert {each.case for each in machines.measured} == {case.id for case in run.plan.cases}
    for each in machines.measured:
        part = load_run(tmp_path / "run" / each.run)
        assert [case.id for case in part.plan.cases] == [each.case]
        assert part.results is not None
        (own,) = part.results.cases
        (row,) = (row for row in run.results.cases if (row.name, row.dtype) == (own.name, own.dtype))
        assert row.speedup == own.speedup
        assert (row.ci_low, row.ci_high) == (own.ci_low, own.ci_high)
    # Nobody is left over.
    assert list((tmp_path / "run/fleet/workers").iterdir()) == []


class Failing(FolderEngine):
    """A worker that is always there and cannot do anything."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.root = root
        self.offered: list[Task] = []
        self.joined = False

    def offer(self, task: Task) -> None:
        self.offered.append(task)

    def wait(self, seconds: float):  # type: ignore[no-untyped-def]
        if not self.joined:
            self.joined = True
            return [Joined(Worker("w", "here", "cpu", "k", "u", tree_digest()))]
        tasks, self.offered = self.offered, []
        return [Returned(task.key, "w", 0.1, error=self.failed(task)) for task in tasks]

    def failed(self, task: Task) -> str:
        return f"broken {task.attempt}"


def test_what_fails_again_and_again_is_said(options: RunOptions, tmp_path: Path) -> None:
    with pytest.raises(LabError, match=f"{MOST_ATTEMPTS} attempts failed, the last: broken {MOST_ATTEMPTS}"):
        pipeline.run(options, Quiet(), lambda folder: None, execute=Spread(Failing).execute)
    assert load_run(tmp_path / "run").manifest.status is RunStatus.FAILED


class Unbuilt(Failing):
    """Its compiler refuses a kernel, as that of any other machine would."""

    def failed(self, task: Task) -> str:
        assert task.attempt == 1
        machine = MachineReport((), "", {})
        with (
            suppress(BuildFailedError),
            RunWriter(self.root / task.run, task.plan, machine, None, ()) as part,
        ):
            part.set_build(BuildReport((), (BuildFailure("k.cpp", "x86_64", "a semicolon is missing"),)))
            raise BuildFailedError("1 of the kernels could not be built")
        return "1 of the kernels could not be built"


def test_a_kernel_that_does_not_compile_ends_the_run_as_it_does_on_one_device(
    options: RunOptions, tmp_path: Path
) -> None:
    notes: list[str] = []

    class Listening(Quiet):
        def note(self, text: str) -> None:
            notes.append(text)

    with pytest.raises(BuildFailedError, match="1 of the kernels could not be built"):
        pipeline.run(options, Listening(), lambda folder: None, execute=Spread(Unbuilt).execute)
    assert "k.cpp for x86_64: a semicolon is missing" in notes
    manifest = load_manifest(tmp_path / "run")
    assert manifest.status is RunStatus.FAILED
    assert manifest.build is not None
    assert [failure.kernel for failure in manifest.build.failures] == ["k.cpp"]


class Unlike(Failing):
    """Workers of which two are not like the first."""

    def wait(self, seconds: float):  # type: ignore[no-untyped-def]
        if self.joined:
            return super().wait(seconds)
        self.joined = True
        first = Worker("first", "here", "cuda:0", "k", "1", tree_digest(), driver="570.1")
        others = (
            {"name": "second", "kind": "another"},
            {"name": "third", "driver": "580.2"},
            {"name": "fourth", "tree": "other"},
        )
        return [Joined(first), *(Joined(replace(first, **other)) for other in others)]


def test_workers_that_are_not_alike_share_no_run(options: RunOptions, tmp_path: Path) -> None:
    notes: list[str] = []

    class Listening(Quiet):
        def note(self, text: str) -> None:
            notes.append(text)

    with pytest.raises(LabError, match="attempts failed"):
        pipeline.run(options, Listening(), lambda folder: None, execute=Spread(Unlike).execute)
    refused = [note for note in notes if "is not taken on" in note]
    assert refused == [
        "second is not taken on: it has another, others of the fleet have k",
        "third is not taken on: it has driver 580.2, others of the fleet have 570.1",
        "fourth is not taken on: it runs other sources of this project than this command",
    ]

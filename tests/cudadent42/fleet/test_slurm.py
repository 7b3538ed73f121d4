"""The engine for Slurm with a stand-in for its commands, and real workers in processes."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from cudadent42.base.errors import LabError, UsageError
from cudadent42.commands.fleet import engines
from cudadent42.fleet import slurm
from cudadent42.fleet.engine import Joined
from cudadent42.fleet.queue import Queue
from cudadent42.fleet.slurm import Partition, SlurmEngine
from cudadent42.fleet.task import Returned, Task, Way
from cudadent42.model.records import Plan
from cudadent42.operations.attention.case import AttentionCase

PLAN = Plan(
    "unit", "cpu", (AttentionCase("c", "fp32", 1, 1, 1, 8, 8, 8),), "a", ("a",), repeats=4, warmup=0, seed=1
)

WORKER = """
import sys
from pathlib import Path
from cudadent42.fleet.queue import Queue
from cudadent42.fleet.task import Returned, Worker
from cudadent42.fleet import worker
from cudadent42.base.observer import Quiet
import os
root = Path(sys.argv[sys.argv.index("work") + 1])
name = "element" + os.environ["SLURM_ARRAY_TASK_ID"]
me = Worker(name, "node", "cpu", "k", name, "tree")
identity = worker.Identity(me, None)
worker.work(root, Queue(root / "fleet"), identity, Quiet(), perform=lambda task: Returned(task.key, name, 0.0))
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands of Slurm on the path; its nodes have a Python whose lab measures nothing."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sbatch", "squeue", "scancel"):
        shutil.copy(Path(__file__).parent / "slurm_stand_in.py", programs / name)
        (programs / name).chmod(0o755)
    (tmp_path / "worker.py").write_text(WORKER)
    python = programs / "lab-python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path / "worker.py"} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "state").mkdir()
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3] / "src"))
    monkeypatch.setenv("SLURM_STAND_IN", str(tmp_path / "state"))
    monkeypatch.setattr(slurm.sys, "executable", str(python))
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def test_elements_of_an_array_do_every_task_once_and_end(cluster: Path) -> None:
    engine = SlurmEngine(cluster, Partition("debug", 3, gpus=False))
    tasks = [Task(f"t{number}", 1, Way.RACE, PLAN, f"races/{number}") for number in range(40)]
    for task in tasks:
        engine.offer(task)
    returned: list[Returned] = []
    joined: set[str] = set()
    while len(returned) < len(tasks):
        for message in engine.wait(1.0):
            if isinstance(message, Joined):
                joined.add(message.worker.name)
                engine.admit(message.worker.name)
            elif isinstance(message, Returned):
                returned.append(message)
    assert Counter(each.key for each in returned) == dict.fromkeys((task.key for task in tasks), 1)
    assert {each.worker for each in returned} <= {"element0", "element1", "element2"}
    engine.close()
    assert engine.queue.workers() == {}


def test_the_command_line_names_a_partition(cluster: Path) -> None:
    engine = engines("slurm:debug:2", "cpu", ignore_preflight=True)(cluster)
    try:
        assert isinstance(engine, SlurmEngine)
        names: set[str] = set()
        while len(names) < 2:
            names |= {each.worker.name for each in engine.wait(1.0) if isinstance(each, Joined)}
        assert names == {"element0", "element1"}
    finally:
        engine.close()
    with pytest.raises(UsageError, match="expected the name of a partition"):
        engines("slurm:", "cpu", ignore_preflight=True)
    with pytest.raises(UsageError, match="expected a number of workers, 1 or more, in place of 'many'"):
        engines("slurm:debug:many", "cpu", ignore_preflight=True)
    with pytest.raises(UsageError, match=r"expected local\[:N\], slurm:PARTITION"):
        engines("kubernetes", "cpu", ignore_preflight=True)


def wait_for_ever(engine: SlurmEngine) -> None:
    while True:
        engine.wait(0.2)
        time.sleep(0.05)


def test_an_array_that_ended_is_an_error_and_not_a_wait_for_ever(cluster: Path) -> None:
    engine = SlurmEngine(cluster, Partition("debug", 1, gpus=False), ask_every_s=0.2)
    while not any(isinstance(message, Joined) for message in engine.wait(0.2)):
        pass
    engine.queue.close()
    with pytest.raises(LabError, match="have ended"):
        wait_for_ever(engine)


def test_a_slurm_that_does_not_answer_is_asked_again_and_then_told(
    cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SlurmEngine(cluster, Partition("debug", 1, gpus=False), ask_every_s=0.0)
    while not any(isinstance(message, Joined) for message in engine.wait(0.2)):
        pass
    engine.queue.close()
    answer, asked = slurm._call, 0

    def call(*command: str, given: str = "", missing: str | None = None) -> str:
        nonlocal asked
        asked += command[0] == "squeue"
        if command[0] == "squeue" and (asked <= 3 or broken):
            raise UsageError("squeue ended with exit code 1: Socket timed out on send/recv operation")
        return answer(*command, given=given, missing=missing)

    broken = False
    monkeypatch.setattr(slurm, "_call", call)
    with pytest.raises(LabError, match="have ended"):
        wait_for_ever(engine)
    assert asked > 3
    broken = True
    with pytest.raises(LabError, match=r"squeue failed \d+ times .*Socket timed out"):
        wait_for_ever(engine)
    monkeypatch.setattr(slurm, "_call", answer)
    engine.close()


def test_what_slurm_says_against_it_is_passed_on(cluster: Path) -> None:
    with pytest.raises(UsageError, match="Invalid partition name"):
        SlurmEngine(cluster, Partition("none", 1, gpus=True))


def test_a_machine_without_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="there is no sbatch here"):
        SlurmEngine(tmp_path, Partition("debug", 1, gpus=True))


def test_many_workers_are_several_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, ...]] = []

    def call(*command: str, given: str = "", missing: str | None = None) -> str:
        calls.append(command)
        return "7;cluster\n"

    monkeypatch.setattr(slurm, "_call", call)
    engine = SlurmEngine(tmp_path, Partition("gpu", 2500, gpus=True))
    arrays = [next(word for word in command if word.startswith("--array")) for command in calls]
    assert arrays == ["--array=0-999", "--array=0-999", "--array=0-499"]
    assert all("--gres=gpu:1" in command for command in calls)
    assert engine.jobs == ["7"] * 3


def test_an_array_that_is_refused_takes_those_before_it_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of the site, say. Elements that were submitted would wait for tasks that nobody hands out."""
    calls: list[tuple[str, ...]] = []

    def call(*command: str, given: str = "", missing: str | None = None) -> str:
        calls.append(command)
        if len(calls) == 3:
            raise UsageError("sbatch ended with exit code 1: Job violates accounting/QOS policy")
        return f"{len(calls)}\n"

    monkeypatch.setattr(slurm, "_call", call)
    with pytest.raises(UsageError, match="violates accounting"):
        SlurmEngine(tmp_path, Partition("gpu", 2500, gpus=True))
    assert [command[0] for command in calls] == ["sbatch", "sbatch", "sbatch", "scancel"]
    assert calls[-1][1:] == ("1", "2")
    assert Queue(tmp_path / "fleet").is_over("any")


def test_a_slurm_that_cannot_cancel_costs_no_result(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured is put together behind the end of the workers, who end by themselves."""
    engine = SlurmEngine(cluster, Partition("debug", 2, gpus=False))
    while not any(isinstance(message, Joined) for message in engine.wait(0.2)):
        pass
    answer = slurm._call

    def call(*command: str, given: str = "", missing: str | None = None) -> str:
        if command[0] == "scancel":
            raise UsageError("scancel ended with exit code 1: Socket timed out on send/recv operation")
        return answer(*command, given=given, missing=missing)

    monkeypatch.setattr(slurm, "_call", call)
    engine.close()
    assert engine.queue.is_over("any")
    assert engine.queue.workers() == {}

"""Machines that ssh reaches as a fleet's workers, over a real sshd."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import ROOT, finished, started
from sshd import Server

from cudadent42.base.errors import LabError, UsageError
from cudadent42.commands.fleet import engines
from cudadent42.fleet import relay
from cudadent42.fleet.engine import Alive, Claimed, Joined, Left, Message
from cudadent42.fleet.packing import LIMITS
from cudadent42.fleet.relay import Heard, say
from cudadent42.fleet.task import Returned, Task, Way
from cudadent42.model.records import Plan
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.remote.core.address import parse
from cudadent42.remote.core.hosts import Remote, save
from cudadent42.remote.core.tree import read_tree
from cudadent42.remote.flows import line, workers
from cudadent42.remote.flows.line import Device
from cudadent42.remote.flows.workers import SshEngine

PLAN = Plan(
    "unit", "cpu", (AttentionCase("c", "fp32", 1, 1, 1, 8, 8, 8),), "a", ("a",), repeats=4, warmup=0, seed=1
)

# Stands for a Python with the lab: two workers whose tasks leave a file, except that one ends its worker.
FAR = """#!{python}
import os, sys, time
from io import FileIO
sys.path.insert(0, {src!r})
from pathlib import Path
from cudadent42.base import parcels
from cudadent42.base.errors import LabError
from cudadent42.fleet.engine import Alive, Claimed, Joined, Left
from cudadent42.fleet.relay import relay
from cudadent42.fleet.task import Returned, Worker

if "{marker}" and Path("{marker}").exists():
    sys.exit(9)
root = Path(sys.argv[5])
(root / "closed").unlink(missing_ok=True)
os.environ[parcels.FOLDER_VARIABLE] = str(root / "parcels")

class Invented:
    def __init__(self):
        self.begun = [Joined(Worker(n, "h", "cpu", "k", "{unit}/" + n, "tree")) for n in ("a", "b")]
        self.tasks, self.admitted = [], set()
    def offer(self, task):
        self.tasks.append(task)
    def admit(self, worker):
        self.admitted.add(worker)
    def dismiss(self, worker):
        self.admitted.discard(worker)
    def wait(self, seconds):
        time.sleep(0.02)
        told, self.begun = self.begun, []
        told.append(Alive("a"))
        for task in [task for task in self.tasks if task.worker in self.admitted]:
            self.tasks.remove(task)
            told.append(Claimed(task.key, task.worker))
            if task.name == "endless":
                continue
            (root / task.run).mkdir(parents=True)
            (root / task.run / "name.txt").write_text(task.name)
            if task.name == "meddled":  # a kernel that was raced before changed what lies there
                parcels.path_of(task.parcels[0].name).write_text("other")
            try:
                for parcel in task.parcels:
                    parcels.check(parcel)
                    path = parcels.path_of(parcel.name)
                    (root / task.run / "file.txt").write_bytes(path.read_bytes())
            except LabError as error:
                told.append(Returned(task.key, task.worker, 0.01, error=str(error)))
                continue
            if task.name == "deadly":
                told.append(Left(task.worker, "it ended"))
            else:
                told.append(Returned(task.key, task.worker, 0.01, parcels=task.parcels))
        return told
    def close(self):
        Path({closed!r}).touch()

relay(Invented(), root, FileIO(0, closefd=False), sys.stdout.buffer)
"""


@pytest.fixture
def far(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., SshEngine]]:
    """Makes an engine for machines of these names, which all are this server with a folder of their own."""
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "file").write_text("x")
    for words in (
        ("init", "-q"),
        ("add", "."),
        ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"),
    ):
        subprocess.run(["git", "-C", str(tree), *words], check=True)
    monkeypatch.setattr(workers, "working_tree", lambda: read_tree(tree))
    monkeypatch.setattr(line, "_PAUSE_S", 0.05)
    made: list[SshEngine] = []

    def make(*names: str) -> SshEngine:
        for name in names:
            python = tmp_path / f"python-{name}"
            python.write_text(
                FAR.format(
                    python=sys.executable,
                    src=str(ROOT / "src"),
                    marker=tmp_path / f"broken-{name}",
                    unit=name,
                    closed=str(tmp_path / f"closed-{name}"),
                )
            )
            python.chmod(0o755)
            save(Remote(name, parse(server.address), folder=f"work-{name}", python=str(python)))
        made.append(SshEngine(tmp_path / "root", names, Device("cpu")))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def task(name: str, worker: str = "") -> Task:
    return Task(name, 1, Way.RACE, PLAN, f"races/{name}", worker)


def until(engine: SshEngine, enough: Callable[[list[Message]], bool]) -> list[Message]:
    """All that was told, until it is enough. Whoever joins is admitted."""
    told: list[Message] = []
    while not enough(told):
        for message in engine.wait(0.5):
            told.append(message)
            if isinstance(message, Joined) and message.worker.ready:
                engine.admit(message.worker.name)
    return told


def of(kind: type, told: list[Message]) -> list[Message]:
    return [message for message in told if isinstance(message, kind)]


def test_devices_of_all_machines_join_and_each_task_is_done_once(
    far: Callable[..., SshEngine], tmp_path: Path
) -> None:
    engine = far("one", "two")
    told = until(engine, lambda told: len(of(Joined, told)) == 4)
    names = {message.worker.name for message in of(Joined, told)}  # type: ignore[attr-defined]
    assert names == {"one-a", "one-b", "two-a", "two-b"}
    tasks = [task(f"t{number}") for number in range(20)] + [task("mine", "two-b")]
    for each in tasks:
        engine.offer(each)
    assert engine.withdraw(tasks[0].key)
    assert not engine.withdraw(tasks[0].key)
    told = until(engine, lambda told: len(of(Returned, told)) == 20)
    returned = {each.key: each.worker for each in told if isinstance(each, Returned)}
    assert returned.keys() == {each.key for each in tasks[1:]}
    assert returned[tasks[-1].key] == "two-b"
    assert set(returned.values()) <= names
    claimed = {each.key: each.worker for each in told if isinstance(each, Claimed)}
    assert claimed == returned
    for each in tasks[1:]:
        assert (tmp_path / "root" / each.run / "name.txt").read_text() == each.name


def test_a_dismissed_worker_gets_nothing_and_closing_leaves_nothing_there(
    far: Callable[..., SshEngine], server: Server, tmp_path: Path
) -> None:
    engine = far("one")
    until(engine, lambda told: len(of(Joined, told)) == 2)
    engine.dismiss("one-a")
    for number in range(3):
        engine.offer(task(f"t{number}"))
    told = until(engine, lambda told: len(of(Returned, told)) == 3)
    assert {each.worker for each in told if isinstance(each, Returned)} == {"one-b"}
    engine.close()
    assert (tmp_path / "closed-one").exists()
    assert not list((server.folder / "home/work-one/jobs").iterdir())


def test_a_worker_that_ends_leaves_what_it_measured(far: Callable[..., SshEngine], tmp_path: Path) -> None:
    engine = far("one")
    until(engine, lambda told: len(of(Joined, told)) == 2)
    engine.offer(task("deadly"))
    told = until(engine, lambda told: bool(of(Left, told)))
    (left,) = (each for each in told if isinstance(each, Left))
    assert left.worker in ("one-a", "one-b")
    assert (tmp_path / "root/races/deadly/name.txt").exists()


def test_workers_of_a_connection_that_is_cut_leave_and_join_again(
    far: Callable[..., SshEngine], server: Server
) -> None:
    engine = far("one")
    until(engine, lambda told: len(of(Joined, told)) == 2)
    engine.offer(task("endless"))
    until(engine, lambda told: bool(of(Claimed, told)))
    server.cut()
    told = until(engine, lambda told: len(of(Joined, told)) == 2)
    assert {each.worker for each in told if isinstance(each, Left)} == {"one-a", "one-b"}
    engine.offer(task("after"))
    assert of(Returned, until(engine, lambda told: bool(of(Returned, told))))


def test_a_machine_that_cannot_work_is_told_and_the_others_go_on(
    far: Callable[..., SshEngine], tmp_path: Path
) -> None:
    (tmp_path / "broken-two").touch()
    engine = far("one", "two")
    told = until(engine, lambda told: len(of(Joined, told)) == 3)
    (worker,) = (each.worker for each in told if isinstance(each, Joined) and not each.worker.ready)
    assert worker.name == "two"
    assert "exit code 9" in worker.trouble
    engine.offer(task("t"))
    assert of(Returned, until(engine, lambda told: bool(of(Returned, told))))


def test_a_fleet_without_a_machine_that_works_ends(far: Callable[..., SshEngine], tmp_path: Path) -> None:
    (tmp_path / "broken-one").touch()
    engine = far("one")
    with pytest.raises(LabError, match=r"no machine of the fleet is left; the last was one: .*exit code 9"):
        until(engine, lambda told: False)


def test_a_machine_with_a_run_is_busy(
    far: Callable[..., SshEngine], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = far("one")
    until(engine, lambda told: len(of(Joined, told)) == 2)
    with pytest.raises(LabError, match="is busy with fleet-"):
        until(SshEngine(engine._root, ("one",), Device("cpu")), lambda told: False)


def kernel_task(engine: SshEngine, name: str, kernel: Path) -> Task:
    """A task of a kernel in a file of this machine."""
    plan = replace(PLAN, implementations=("a", f"{kernel}:attention"))
    return replace(task(name), plan=plan, parcels=engine.parcels(plan))


def returned_of(engine: SshEngine, *tasks: Task) -> dict[str, Returned]:
    """By name, what came of them."""
    for each in tasks:
        engine.offer(each)
    told = until(engine, lambda told: len(of(Returned, told)) == len(tasks))
    results = {each.key: each for each in told if isinstance(each, Returned)}
    return {each.name: results[each.key] for each in tasks}


def test_files_of_this_machine_travel_with_the_tasks_and_go_with_the_workers(
    far: Callable[..., SshEngine], server: Server, tmp_path: Path
) -> None:
    engine = far("one")
    until(engine, lambda told: len(of(Joined, told)) == 2)
    kernel = tmp_path / "mine.py"
    kernel.write_text("def attention(): ...\n")
    first = kernel_task(engine, "first", kernel)
    (returned,) = returned_of(engine, first).values()
    assert (returned.error, returned.parcels) == ("", first.parcels)
    assert (tmp_path / "root/races/first/file.txt").read_bytes() == kernel.read_bytes()
    placed = [path for path in (server.folder / "home").rglob("parcels") if path.is_dir()]
    assert [oct(path.stat().st_mode & 0o777) for path in placed] == ["0o700"]
    kernel.write_text("def attention(): return 1\n")  # edited while the command works
    (returned,) = returned_of(engine, kernel_task(engine, "second", kernel)).values()
    assert returned.parcels == first.parcels
    engine.close()
    assert not [path for path in (server.folder / "home").rglob("*") if path.name in ("parcels", "mine.py")]


def test_files_are_sent_again_over_another_connection(
    far: Callable[..., SshEngine], server: Server, tmp_path: Path
) -> None:
    engine = far("one")
    until(engine, lambda told: len(of(Joined, told)) == 2)
    kernel = tmp_path / "mine.py"
    kernel.write_text("def attention(): ...\n")
    assert not returned_of(engine, kernel_task(engine, "before", kernel))["before"].error
    server.cut()
    until(engine, lambda told: len(of(Joined, told)) == 2)
    assert not returned_of(engine, kernel_task(engine, "after", kernel))["after"].error


def test_files_that_change_there_or_on_the_way_are_not_raced(
    far: Callable[..., SshEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = far("one")
    until(engine, lambda told: len(of(Joined, told)) == 2)
    kernel, damaged = tmp_path / "mine.py", tmp_path / "damaged.py"
    kernel.write_text("def attention(): ...\n")
    damaged.write_text("def attention(): ... # damaged\n")
    assert not returned_of(engine, kernel_task(engine, "good", kernel))["good"].error
    meddled = returned_of(engine, kernel_task(engine, "meddled", kernel))["meddled"]
    assert "are not those that were sent" in meddled.error
    monkeypatch.setattr(engine._cargo, "packed", lambda parcel: b"no archive")
    lost = returned_of(engine, kernel_task(engine, "lost", damaged))["lost"]
    assert "did not come as they were sent" in lost.error
    assert returned_of(engine, task("other"))["other"].error == ""


def test_a_disk_that_takes_no_files_costs_a_machine_its_workers_and_no_task_an_attempt(
    far: Callable[..., SshEngine], server: Server, tmp_path: Path
) -> None:
    """A full disk refuses within milliseconds: one such machine would have had all tasks, and failed them."""
    engine = far("one")
    until(engine, lambda told: len(of(Joined, told)) == 2)
    kernel = tmp_path / "mine.py"
    kernel.write_text("def attention(): ...\n")
    wanted = kernel_task(engine, "t", kernel)
    (trees,) = (path for path in (server.folder / "home").rglob("trees") if path.parent.name == "parcels")
    trees.joinpath(wanted.parcels[0].digest).touch()  # in the place of the folder
    engine.offer(wanted)
    told = until(engine, lambda told: len(of(Left, told)) == 2)
    assert of(Returned, told) == []
    assert all("cannot be written here" in each.reason for each in told if isinstance(each, Left))
    until(engine, lambda told: len(of(Joined, told)) == 2)
    assert not returned_of(engine, kernel_task(engine, "again", kernel))["again"].error


def test_a_task_whose_files_were_not_sent_is_no_task(
    far: Callable[..., SshEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = far("one")
    until(engine, lambda told: len(of(Joined, told)) == 2)
    kernel = tmp_path / "mine.py"
    kernel.write_text("def attention(): ...\n")
    wanted = kernel_task(engine, "t", kernel)
    for sent in engine._sent.values():
        sent.update(wanted.parcels)
    assert returned_of(engine, wanted)["t"].error == "the files of this task were not sent"


@pytest.mark.parametrize("fleet", ["ssh", "ssh:", "ssh:a,a"])
def test_machines_are_named_each_once(fleet: str) -> None:
    with pytest.raises(UsageError, match=r"names of `remote add`, each once"):
        engines(fleet, "cpu", ignore_preflight=False)


def test_messages_come_whole_however_they_are_cut() -> None:
    written = io.BytesIO()
    said = [(Left("w", "a\nb"), b""), (Returned("k", "w", 1.0), b"\n{}\n" * 99), (Alive("ü"), b"")]
    for message, packed in said:
        say(written, message, packed)
    data = written.getvalue()
    for size in (1, 7, 64, len(data)):
        heard = Heard()
        got = [each for at in range(0, len(data), size) for each in heard.of(data[at : at + size])]
        assert got == said


@pytest.mark.parametrize(
    "said",
    [
        b"hello\n",
        b'{"kind": "joined", "bytes": 0}\n',
        b'{"kind": "x", "bytes": 0, "record": {}}\n',
        *(
            b'{"kind": "alive", "bytes": %s, "record": {"worker": "w"}}\n' % size
            for size in (b"1e400", b"1.0", b"true", b'"0"', b"null")
        ),
        b"[" * 100_000 + b"\n",
        b"\xff\n",
    ],
)
def test_what_is_no_message_is_refused(said: bytes) -> None:
    with pytest.raises(LabError, match="expected a message"):
        list(Heard().of(said))


@pytest.mark.parametrize("size", [-1, LIMITS.most_bytes + 1])
def test_more_than_is_taken_is_refused_before_it_comes(size: int) -> None:
    with pytest.raises(LabError, match=f"announced {size} bytes"):
        list(Heard().of(b'{"kind": "alive", "bytes": %d, "record": {"worker": "w"}}\n' % size))


def test_a_line_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "_MOST_LINE_BYTES", 1000)
    heard = Heard()
    assert list(heard.of(b"x" * 1000)) == []
    with pytest.raises(LabError, match="a line without an end"):
        list(heard.of(b"x"))


def test_a_machine_whose_run_folder_cannot_be_kept_ends_no_fleet(
    far: Callable[..., SshEngine], tmp_path: Path
) -> None:
    """What it sends is its own word: a name that is taken, an archive that is none."""
    engine = far("one")
    until(engine, lambda told: len(of(Joined, told)) == 2)
    (tmp_path / "root/races/taken").mkdir(parents=True)
    engine.offer(task("taken"))
    told = until(engine, lambda told: bool(of(Returned, told)))
    (returned,) = (each for each in told if isinstance(each, Returned))
    assert "one sent no run folder that can be kept" in returned.error
    engine.offer(task("after"))
    told = until(engine, lambda told: bool(of(Returned, told)))
    assert [each.error for each in told if isinstance(each, Returned)] == [""]


@pytest.mark.slow
def test_a_suite_over_ssh_comes_back_as_one_run_through_a_cut(server: Server, tmp_path: Path) -> None:
    done = finished(
        started("remote", "add", "there", server.address, "--python", sys.executable, cwd=tmp_path)
    )
    assert done.returncode == 0, done.stderr
    process = started(
        *("run", "--fleet", "ssh:there", "--suite", "small", "--case", "tiny", "--dtype", "fp32,bf16"),
        *("--repeats", "5", "--device", "cpu", "--ignore-preflight", "--output-dir", "here", "--json"),
        cwd=tmp_path,
    )
    jobs = server.folder / "home/cudadent42-remote/jobs"
    while process.poll() is None and not list(jobs.glob("fleet-*/parts/*")):
        time.sleep(0.1)
    server.cut()
    done = finished(process)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "here/results.json").read_text())
    assert {case["dtype"] for case in results["cases"]} == {"fp32", "bf16"}
    assert not list(jobs.iterdir())

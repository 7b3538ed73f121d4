"""The shared folder, with real processes."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from cudadent42.base.errors import UsageError
from cudadent42.base.observer import Quiet
from cudadent42.base.parcels import Parcel
from cudadent42.fleet.desk import LEASE_S, Admitted, Desk, Gone, Refused
from cudadent42.fleet.engine import Alive, Claimed, Joined, Left
from cudadent42.fleet.folder import FolderEngine
from cudadent42.fleet.queue import Queue
from cudadent42.fleet.task import Returned, Task, Way, Worker
from cudadent42.fleet.worker import Identity, work
from cudadent42.model.records import Plan
from cudadent42.operations.attention.case import AttentionCase

PLAN = Plan(
    "unit", "cpu", (AttentionCase("c", "fp32", 1, 1, 1, 8, 8, 8),), "a", ("a",), repeats=4, warmup=0, seed=1
)


def task(name: str, worker: str = "") -> Task:
    return Task(name, 1, Way.RACE, PLAN, f"races/{name}", worker)


def claim_all(folder: Path, name: str, until: int) -> None:
    queue = Queue(folder)
    while True:
        taken = queue.claim(name)
        if taken is not None:
            queue.give_back(Returned(taken.key, name, 0.0))
        elif len(os.listdir(folder / "returned")) >= until:
            return


def test_eight_processes_do_each_of_a_thousand_tasks_once(tmp_path: Path) -> None:
    queue = Queue(tmp_path)
    queue.open()
    (tmp_path / "offered").mkdir(exist_ok=True)
    keys = set()
    for number in range(1000):
        each = task(f"case#{number}")
        keys.add(each.key)
        queue.offer(each)
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=claim_all, args=(tmp_path, f"w{n}", 1000)) for n in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 8
    counted = Counter(record.key for record in queue.returned())
    assert set(counted) == keys
    assert set(counted.values()) == {1}
    assert queue.claims() == {}
    assert list((tmp_path / "offered").iterdir()) == []


def test_a_task_for_one_worker_is_no_other_s(tmp_path: Path) -> None:
    queue = Queue(tmp_path)
    queue.open()
    queue.offer(task("one", worker="me"))
    assert queue.claim("you") is None
    mine = queue.claim("me")
    assert mine == task("one", worker="me")
    assert queue.claims() == {mine.key: "me"}


def test_what_is_withdrawn_cannot_be_claimed_and_the_other_way_round(tmp_path: Path) -> None:
    queue = Queue(tmp_path)
    queue.open()
    first, second = task("first"), task("second")
    queue.offer(first)
    queue.offer(second)
    assert queue.withdraw(first.key)
    assert queue.claim("w") == second
    assert not queue.withdraw(second.key)
    assert queue.claim("w") is None


def test_names_that_a_file_system_would_mind(tmp_path: Path) -> None:
    queue = Queue(tmp_path)
    queue.open()
    names = ["a/b", "a-b", "a@b", "ä" * 300]
    for name in names:
        queue.offer(task(name))
    claimed = [queue.claim("w") for _ in names]
    assert sorted(each.name for each in claimed if each) == sorted(names)
    assert len({each.key for each in claimed if each}) == len(names)


def test_a_result_that_was_told_is_there_until_it_is_on_record(tmp_path: Path) -> None:
    """A coordinator that is killed between hearing of a result and writing it down has lost nothing."""
    engine = FolderEngine(tmp_path)
    queue = Queue(tmp_path / "fleet")
    engine.offer(task("t"))
    taken = queue.claim("w")
    assert taken is not None
    queue.give_back(Returned(taken.key, "w", 1.0))
    assert [each for each in engine.wait(0.0) if isinstance(each, Returned)] == [
        Returned(taken.key, "w", 1.0)
    ]
    assert FolderEngine(tmp_path).held() == {taken.key: "w"}
    queue = Queue(tmp_path / "fleet")
    assert list(queue.returned()) == [Returned(taken.key, "w", 1.0)]
    assert list(queue.returned()) == []
    queue.acknowledge()
    assert queue.waiting() == {}


def test_who_hands_out_tasks_no_longer_ends_nobody_s_workers(tmp_path: Path) -> None:
    first = FolderEngine(tmp_path)
    second = FolderEngine(tmp_path)
    with pytest.raises(UsageError, match="another process hands out"):
        first.wait(0.0)
    first.close()
    assert not second.queue.is_over("w")
    second.close()
    assert second.queue.is_over("w")


def test_a_worker_that_is_not_taken_on_yet_claims_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have other sources, or another device: what it measured would count."""
    looks = threading.Semaphore(0)
    is_admitted = Queue.is_admitted

    def looked(each: Queue, name: str) -> bool:
        looks.release()
        return is_admitted(each, name)

    monkeypatch.setattr(Queue, "is_admitted", looked)
    engine = FolderEngine(tmp_path)
    engine.offer(task("t"))
    queue, done = Queue(tmp_path / "fleet"), []
    performed = threading.Event()

    def perform(each: Task) -> Returned:
        done.append(each.key)
        performed.set()
        return Returned(each.key, "w", 0.0)

    thread = threading.Thread(
        target=work, args=(tmp_path, queue, Identity(worker("w"), None), Quiet()), kwargs={"perform": perform}
    )  # type: ignore[arg-type]
    thread.start()
    try:
        for _ in range(3):  # when it looks again, it has passed over what is on offer
            looks.acquire()
        assert not done
        engine.admit("w")
        performed.wait()
    finally:
        engine.close()
        thread.join()
    assert done == [task("t").key]


def test_files_of_somebody_else_are_passed_over(tmp_path: Path) -> None:
    queue = Queue(tmp_path)
    queue.open()
    for folder in ("offered", "claimed"):
        for name in ("Thumbs.db", "note.json", "a@b@c@d.json", "00000001@key@.json~"):
            (tmp_path / folder / name).touch()
    assert queue.claims() == {}
    assert queue.claim("w") is None
    assert not queue.withdraw("key")


def test_a_result_that_cannot_be_read_is_a_failure_of_its_task(tmp_path: Path) -> None:
    engine = FolderEngine(tmp_path)
    desk = Desk(engine, lambda each: "")
    desk.offer(task("t"))
    queue = Queue(tmp_path / "fleet")
    queue.enter(worker("w"))
    assert queue.claim("w") is not None
    desk.turn(0.0)
    (tmp_path / "fleet/returned" / f"{task('t').key}.json").write_text("{")
    (returned,) = desk.turn(0.0)
    assert isinstance(returned, Returned)
    assert (returned.key, returned.worker) == (task("t").key, "w")
    assert "cannot be read" in returned.error
    assert engine.held() == {task("t").key: "w"}  # the claim
    assert desk.held == 0


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot make the fleet's folder"):
        Queue(tmp_path / "file" / "fleet")


# ---------------------------------------------------------------- the desk


class Told:
    """An engine that says what a test wants."""

    def __init__(self) -> None:
        self.messages: list[object] = []
        self.offered: list[Task] = []
        self.admitted: list[str] = []
        self.dismissed: list[str] = []

    def offer(self, each: Task) -> None:
        self.offered.append(each)

    def withdraw(self, key: str) -> bool:
        free = [each for each in self.offered if each.key == key]
        self.offered = [each for each in self.offered if each.key != key]
        return bool(free)

    def held(self) -> dict[str, str]:
        return {}

    def wait(self, seconds: float):  # type: ignore[no-untyped-def]
        messages, self.messages = self.messages, []
        return messages

    def admit(self, worker: str) -> None:
        self.admitted.append(worker)

    def dismiss(self, worker: str) -> None:
        self.dismissed.append(worker)

    def close(self) -> None:
        return


class At:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def worker(name: str, kind: str = "k") -> Worker:
    return Worker(name, "host", "cpu", kind, f"unit of {name}", "tree")


def desk_with(*messages: object) -> tuple[Desk, Told, At]:
    engine, clock = Told(), At()
    desk = Desk(engine, lambda each: "" if each.kind == "k" else "of another kind", clock)  # type: ignore[arg-type]
    engine.messages = [Joined(worker("w")), *messages]
    return desk, engine, clock


def test_a_silent_worker_loses_its_task_and_what_comes_later_does_not_count() -> None:
    desk, engine, clock = desk_with()
    desk.offer(task("t"))
    key = task("t").key
    assert desk.turn(0.0) == [Admitted(worker("w"))]
    engine.offered.clear()
    engine.messages = [Claimed(key, "w")]
    assert desk.turn(0.0) == []
    clock.now_s = LEASE_S - 1
    engine.messages = [Alive("w")]
    assert desk.turn(0.0) == []
    clock.now_s = 2 * LEASE_S
    gone, lost = desk.turn(0.0)
    assert isinstance(gone, Gone)
    assert isinstance(lost, Returned)
    assert (lost.key, lost.lost) == (key, True)
    assert engine.dismissed == ["w"]
    engine.messages = [Returned(key, "w", 5.0)]
    assert desk.turn(0.0) == []
    assert desk.in_play == 0


def test_a_task_beyond_its_limit_ends_its_worker() -> None:
    desk, engine, clock = desk_with()
    desk.offer(task("t"))
    desk.turn(0.0)
    engine.messages = [Claimed(task("t").key, "w")]
    desk.turn(0.0)
    while clock.now_s < task("t").limit_s + LEASE_S:
        clock.now_s += 20.0
        engine.messages = [Alive("w")]
        changes = desk.turn(0.0)
    assert "took more than" in changes[-1].error  # type: ignore[union-attr]


def test_who_is_of_another_kind_gets_nothing() -> None:
    desk, engine, _ = desk_with(Joined(worker("x", kind="another")))
    admitted, refused = desk.turn(0.0)
    assert isinstance(admitted, Admitted)
    assert refused == Refused(worker("x", kind="another"), "of another kind")
    assert engine.dismissed == ["x"]
    assert engine.admitted == ["w"]
    assert [each.name for each in desk.workers] == ["w"]


def test_what_waits_for_a_worker_that_leaves_comes_back() -> None:
    desk, engine, _ = desk_with()
    desk.turn(0.0)
    desk.offer(task("t", worker="w"))
    engine.messages = [Left("w", "preempted")]
    gone, lost = desk.turn(0.0)
    assert isinstance(gone, Gone)
    assert isinstance(lost, Returned)
    assert lost.lost
    assert desk.in_play == 0


def test_the_hour_of_other_machines_does_not_matter(tmp_path: Path) -> None:
    """Whether a worker lives is told by a change of its file's time, whatever the time is."""
    engine = FolderEngine(tmp_path)
    queue = Queue(tmp_path / "fleet")
    queue.enter(worker("w"))
    path = tmp_path / "fleet/workers/w.json"
    os.utime(path, (0, 0))
    assert list(engine.wait(0.0)) == [Joined(worker("w"))]
    assert list(engine.wait(0.0)) == []
    os.utime(path, (time.time() + 10**6, time.time() + 10**6))
    assert list(engine.wait(0.0)) == [Alive("w")]


def test_a_result_that_does_not_name_the_files_that_were_sent_is_none() -> None:
    desk, told, _ = desk_with()
    desk.turn(0.0)
    parcel = Parcel("0" * 64, "/here/k.toml", "k.toml")
    sent = replace(task("t"), parcels=(parcel,))
    for key, parcels in (("one", ()), ("two", (replace(parcel, digest="1" * 64),)), ("three", (parcel,))):
        each = replace(sent, name=key)
        desk.offer(each)
        told.messages = [Claimed(each.key, "w"), Returned(each.key, "w", 0.1, parcels=parcels)]
        (change,) = desk.turn(0.0)
        assert isinstance(change, Returned)
        assert bool(change.error) == (key != "three")

"""Tunings by fleets whose machines, and whose clock, are invented; journal, state and coordinator are the real ones."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from fleet_tunings import GAINS, RULES, assert_nothing_is_missing_or_twice, tune, virtual
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulated import setup
from virtual_fleet import Compiling, Nature, VirtualFleet

from cudadent42.base.errors import UnwritableError, UsageError
from cudadent42.base.files import write_json
from cudadent42.base.observer import Quiet
from cudadent42.fleet.desk import Desk
from cudadent42.fleet.engine import Joined, Message
from cudadent42.fleet.folder import FolderEngine
from cudadent42.fleet.queue import Queue
from cudadent42.fleet.task import Returned, Worker
from cudadent42.tune import journal as events
from cudadent42.tune.coordinator import STOP, Limits
from cudadent42.tune.fleet import FleetCoordinator
from cudadent42.tune.journal import Setup, TuningJournal, read
from cudadent42.tune.prune import CompiledArm
from cudadent42.tune.space import DEFAULT
from cudadent42.tune.state import fold


class Killed(BaseException):
    """Stands for a kill: nothing of the process goes on behind it."""


class Dying(TuningJournal):
    """A journal whose process is killed behind a write, or in the middle of one."""

    def __init__(self, folder: Path, about: Setup, clock: object, chance: random.Random, writes: int) -> None:
        super().__init__(folder, about, clock)  # type: ignore[arg-type]
        self._chance = chance
        self._writes = writes

    def extend(self, happened):  # type: ignore[no-untyped-def]
        some = tuple(happened)
        self._writes -= 1
        if self._writes > 0 or not some:
            return super().extend(some)
        super().extend(some[: self._chance.randrange(len(some) + 1)])
        raise Killed


@pytest.mark.parametrize(
    ("machines", "words"),
    [
        (1, "confirmed on this device"),
        (3, "confirmed on each of 3 devices"),
        (6, "on this kind of device, by 6"),
    ],
)
def test_the_best_arm_is_confirmed_by_as_many_machines_as_there_are(
    tmp_path: Path, machines: int, words: str
) -> None:
    about = setup(arms=14, rules=RULES)
    state = tune(tmp_path / "t", about, virtual(about, machines))
    assert {(each.case, each.arm) for each in state.winners} == {
        ("short/fp32", "BLOCK=3"),
        ("long/fp32", "BLOCK=3"),
    }
    for winner in state.winners:
        assert words in winner.reason
        assert winner.machines == machines
        assert len(winner.evidence) == machines
        units = {each.unit for each in state.cases[winner.case].on_machines}
        assert len(units) == machines
    assert_nothing_is_missing_or_twice(state)
    assert fold(*read(tmp_path / "t")) == state


def test_a_hostile_world_loses_nothing_and_counts_nothing_twice(tmp_path: Path) -> None:
    """Workers vanish, results come twice or late, tasks fail half way."""
    about = setup(arms=14, rules=RULES)
    lost = 0
    for seed in range(5):
        fleet = virtual(about, 6, seed, lost_per_hour=40.0, failing=0.05, twice=0.2, late=0.5, start_s=40.0)
        state = tune(tmp_path / f"t{seed}", about, fleet)
        assert {each.arm for each in state.winners} <= {"BLOCK=3"}
        lost += sum(job.losses for job in state.jobs.values())
        for case in state.cases.values():
            if not case.out:
                assert len(case.rows["BLOCK=3"]) == about.rules.rungs[case.rung - 1]
    assert lost


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.randoms(use_true_random=False))
def test_kills_of_the_coordinator_at_any_write(
    tmp_path_factory: pytest.TempPathFactory, chance: random.Random
) -> None:
    """Four kills in each of 25 tunings: a hundred."""
    folder = tmp_path_factory.mktemp("fleet") / "t"
    about = setup(arms=13, rules=RULES)
    now_s = 0.0
    for number in range(4):
        fleet = virtual(about, 4, number, now_s)
        journal = Dying(folder, about, fleet.clock, chance, chance.randrange(1, 60))
        with suppress(Killed):
            tune(folder, about, fleet, journal=journal)
        now_s = fleet.now_s
    state = tune(folder, about, virtual(about, 4, 9, now_s))
    assert_nothing_is_missing_or_twice(state)
    assert {each.arm for each in state.winners} == {"BLOCK=3"}
    assert fold(*read(folder)) == state


@pytest.mark.parametrize("seed", range(20))
def test_neither_time_nor_money_is_passed(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    about = setup(arms=13, rules=RULES)
    limits = Limits(budget_s=chance.uniform(60, 400), usd=chance.uniform(0.1, 1.5), usd_per_hour=4.0)
    fleet = virtual(about, chance.randrange(1, 9), seed, lost_per_hour=20.0)
    state = tune(tmp_path / "t", about, fleet, limits)
    assert limits.budget_s is not None
    assert limits.usd is not None
    assert state.spent_s <= limits.budget_s
    assert state.spent_usd <= limits.usd
    assert fleet.closed
    if not state.finished:
        assert "budget is used up" in state.paused
        assert tune(tmp_path / "t", about, virtual(about, 4, seed, fleet.now_s)).finished


def test_what_is_measured_within_the_budget_counts(tmp_path: Path) -> None:
    about = setup(arms=13, rules=RULES)
    state = tune(tmp_path / "t", about, virtual(about, 2), Limits(budget_s=120.0))
    assert state.paused
    assert state.arm_blocks > 50


def test_a_machine_whose_baseline_is_far_off_is_quarantined(tmp_path: Path) -> None:
    about = setup(arms=60, rules=RULES)
    fleet = virtual(about, 8, slow_share=0.0, speed_spread=0.01, start_s=0.5)
    plain = fleet._join

    def join(number: int, messages: object) -> None:
        plain(number, messages)  # type: ignore[arg-type]
        machine = list(fleet.machines.values())[-1]
        machine.speed = 1.5 if number == 2 else machine.speed

    fleet._join = join  # type: ignore[method-assign, assignment]
    state = tune(tmp_path / "t", about, fleet)
    assert set(state.quarantined) == {"gpu2"}
    assert "against the median of its kind" in state.quarantined["gpu2"]
    for case in state.cases.values():
        assert "gpu2" not in {each.unit for each in case.on_machines}
    assert state.finished


class FullDisk(VirtualFleet):
    """Of one machine: whatever it does ends with an error."""

    def wait(self, seconds: float) -> Sequence[Message]:
        return [
            replace(each, blocks=(), error="No space left on device", unwritable=True)
            if isinstance(each, Returned) and each.worker.startswith("w2-")
            else each
            for each in super().wait(seconds)
        ]


def test_a_machine_whose_disk_is_full_is_quarantined_and_costs_no_arm(tmp_path: Path) -> None:
    about = setup(arms=14, rules=RULES)
    fleet = FullDisk(4, Nature(gains=GAINS), 1, about.arms, about.device.name, 0.0)
    state = tune(tmp_path / "t", about, fleet)
    assert state.quarantined == {"gpu2": "No space left on device"}
    assert not any(case.out for case in state.cases.values())
    assert len(state.winners) == 2
    assert_nothing_is_missing_or_twice(state)


def test_a_full_disk_of_the_tuning_pauses_it_before_arms_are_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that share it fail, or end as they cannot say so."""

    def full(folder: Path) -> None:
        raise UnwritableError(f"cannot write to {folder}: No space left on device")

    about = setup(arms=14, rules=RULES)
    with monkeypatch.context() as patch:
        patch.setattr("cudadent42.tune.fleet.require_room", full)
        with pytest.raises(UnwritableError):
            tune(tmp_path / "t", about, virtual(about, 4, failing=1.0))
    state = fold(*read(tmp_path / "t"))
    assert "No space left on device" in state.paused
    assert not any(case.out for case in state.cases.values())
    assert len(tune(tmp_path / "t", about, virtual(about, 4, began_s=1000.0)).winners) == 2


def test_workers_that_are_not_alike_are_not_mixed(tmp_path: Path) -> None:
    about = setup(rules=RULES)
    fleet = virtual(about, 3)
    notes: list[str] = []

    class Listening(Quiet):
        def note(self, text: str) -> None:
            notes.append(text)

    with TuningJournal(tmp_path / "t", about, fleet.clock) as journal:
        coordinator = FleetCoordinator(
            tmp_path / "t",
            journal,
            about,
            Limits(budget_s=100.0),
            Listening(),
            tree="other sources",
            clock=fleet.clock,
            judge=fleet.judge,
        )
        state = coordinator.run(fleet, fleet.compile([case.id for case in about.plan.cases]))
    assert sum("other sources of this project" in note for note in notes) == 3
    assert state.members == {}
    assert state.arm_blocks == 0


def test_another_kind_of_device_another_driver_and_a_quarantined_device_are_not_taken_on(
    tmp_path: Path,
) -> None:
    about = setup(rules=RULES)
    kind = about.device.name
    with TuningJournal(tmp_path / "t", about) as journal:
        coordinator = FleetCoordinator(tmp_path / "t", journal, about, Limits(), Quiet())
        coordinator._record(
            events.Opened("here"),
            events.Joined("first", "unit 1", kind, "host", "570.1"),
            events.Quarantined("unit 2", "3 jobs failed on it"),
        )
        worker = Worker("second", "host", "cuda:1", kind, "unit 3", "", driver="570.1")
        assert coordinator._why_not(worker) == ""
        for other, reason in (
            ({"kind": "another GPU"}, f"it has another GPU, and this tuning is of {kind}"),
            ({"driver": "580.2"}, "it has driver 580.2, others of the fleet have 570.1"),
            ({"driver": ""}, "it has driver unknown, others of the fleet have 570.1"),
            ({"unit": "unit 2"}, "its device is quarantined: 3 jobs failed on it"),
        ):
            assert coordinator._why_not(replace(worker, **other)) == reason


def test_workers_that_join_in_one_turn_have_one_driver(tmp_path: Path) -> None:
    """None of them is on record yet when the next is looked at."""
    about = setup(rules=RULES)
    fleet = virtual(about, 6)
    plain = fleet.wait

    def wait(seconds: float) -> list[Message]:
        messages = plain(60.0 if fleet.now_s == 0 else seconds)
        return [
            replace(each, worker=replace(each.worker, driver="580.2" if index % 2 else "570.1"))
            if isinstance(each, Joined)
            else each
            for index, each in enumerate(messages)
        ]

    fleet.wait = wait  # type: ignore[method-assign]
    state = tune(tmp_path / "t", about, fleet)
    entries = [entry.event for entry in read(tmp_path / "t")[1]]
    assert len({event.driver for event in entries if isinstance(event, events.Joined)}) == 1
    assert state.finished


def test_it_stops_when_it_is_asked_to(tmp_path: Path) -> None:
    about = setup(rules=RULES)
    fleet = virtual(about, 2)
    plain = fleet.wait

    def wait(seconds: float) -> object:
        if fleet.now_s > 30:
            (tmp_path / "t" / STOP).touch()
        return plain(seconds)

    fleet.wait = wait  # type: ignore[method-assign, assignment]
    state = tune(tmp_path / "t", about, fleet)
    assert state.paused == "it was asked to stop"
    assert tune(tmp_path / "t", about, virtual(about, 2, 3, fleet.now_s)).finished


def test_a_result_that_came_while_nobody_listened_counts(tmp_path: Path) -> None:
    """A worker goes on behind a coordinator that was killed; the next one takes what it returned."""
    about = setup(arms=3, rules=RULES)
    folder = tmp_path / "t"
    fleet = virtual(about, 1)
    with TuningJournal(folder, about, fleet.clock) as journal:
        coordinator = FleetCoordinator(folder, journal, about, Limits(), Quiet(), clock=fleet.clock)
        coordinator._compile(
            fleet.compile([case.id for case in about.plan.cases]),
            Desk(fleet, lambda worker: "", fleet.clock),
        )
        started = events.JobStarted(
            "long/fp32#0.0", 1, "long/fp32", ("BLOCK=0", "BLOCK=1", "BLOCK=2"), 5, "r"
        )
        coordinator._record(events.Opened("here"), started)
    queue = Queue(folder / "fleet")
    with TuningJournal(folder, about) as journal:
        coordinator = FleetCoordinator(folder, journal, about, Limits(), Quiet())
        job = coordinator.state.jobs["long/fp32#0.0"]
        assert set(job.open) == {1}
        from cudadent42.tune.state import Job

        work = Job("long/fp32#0.0", "long/fp32", 0, job.arms, 6, 1)
        key = coordinator._task(work).key
        write_json(queue.folder / "returned" / f"{key}.json", Returned(key, "w", 1.0, error="a cable"))
        engine = FolderEngine(folder)
        assert engine.held() == {key: "w"}
        (folder / STOP).touch()
        desk = Desk(engine, lambda worker: "")
        coordinator._expect(desk, engine)
        coordinator._take(desk.turn(0.1), desk)
        assert coordinator.state.jobs["long/fp32#0.0"].failures == 1
        assert not coordinator.state.jobs["long/fp32#0.0"].open
        desk.turn(0.0)  # by which the engine knows that it is on record
        assert engine.held() == {}


def test_what_workers_cost_before_they_joined_counts(tmp_path: Path) -> None:
    """Once: a worker that is there for another coordinator too was paid for before."""
    about = setup(arms=3, rules=RULES)
    limits = Limits(usd_per_hour=3600.0)
    state = tune(tmp_path / "t", about, virtual(about, 4, up_s=30.0), limits)
    without = tune(tmp_path / "u", about, virtual(about, 4), limits)
    assert state.spent_usd - without.spent_usd == pytest.approx(4 * 30.0)
    joined = events.Entry("2026-01-01T00:00:00+00:00", 0.0, events.Joined("w", "u", "k", "h", "", 5.0))
    opened = replace(joined, event=events.Opened("h", 3600.0))
    assert (
        fold(about, [opened, joined, replace(joined, event=events.Paused("")), opened, joined]).spent_usd
        == 5.0
    )


@pytest.mark.parametrize("seed", range(10))
def test_workers_that_join_at_once_keep_the_limit_together(tmp_path: Path, seed: int) -> None:
    about = setup(arms=13, rules=RULES)
    limits = Limits(usd=random.Random(seed).uniform(0.1, 1.0), usd_per_hour=4.0)
    state = tune(tmp_path / "t", about, virtual(about, 16, seed, up_s=20.0, lost_per_hour=30.0), limits)
    assert limits.usd is not None
    assert state.spent_usd <= limits.usd


def test_while_kernels_compile_workers_see_that_somebody_is_there(tmp_path: Path) -> None:
    """A worker ends where nobody gave a sign of life for ten minutes; some spaces compile for longer."""
    about = setup(arms=3, rules=RULES)
    fleet = virtual(about, 2)
    turns: list[float] = []
    waited = threading.Event()
    plain = fleet.wait

    def wait(seconds: float) -> object:
        turns.append(seconds)
        waited.set()
        return plain(seconds)

    class Slow(Compiling):
        def compile(self, arm: str) -> CompiledArm:
            if arm == "BLOCK=2":  # no end before the desk has taken a turn
                assert waited.wait()
            return super().compile(arm)

    fleet.wait = wait  # type: ignore[method-assign, assignment]
    with TuningJournal(tmp_path / "t", about, fleet.clock) as journal:
        coordinator = FleetCoordinator(
            tmp_path / "t", journal, about, Limits(), Quiet(), clock=fleet.clock, judge=fleet.judge
        )
        assert coordinator.run(fleet, Slow(tuple(case.id for case in about.plan.cases))).finished


def test_a_tuning_that_is_asked_to_stop_while_it_compiles_pauses(tmp_path: Path) -> None:
    about = setup(arms=30, rules=RULES)
    fleet = virtual(about, 2)

    class Stopping(Compiling):
        def compile(self, arm: str) -> CompiledArm:
            (tmp_path / "t" / STOP).touch()
            return super().compile(arm)

    with TuningJournal(tmp_path / "t", about, fleet.clock) as journal:
        coordinator = FleetCoordinator(tmp_path / "t", journal, about, Limits(), Quiet(), clock=fleet.clock)
        compiler = Stopping(tuple(case.id for case in about.plan.cases))
        assert coordinator.run(fleet, compiler).paused == "it was asked to stop"
    assert tune(tmp_path / "t", about, virtual(about, 2, 3, fleet.now_s)).finished


def test_of_two_coordinators_over_a_shared_folder_the_elder_ends(tmp_path: Path) -> None:
    """Also where the lock of the journal is none, as on some network file systems."""
    first, second = Queue(tmp_path / "fleet"), Queue(tmp_path / "fleet")
    first.open()
    first.touch()
    second.open()
    second.touch()
    with pytest.raises(UsageError, match="another process hands out the tasks"):
        first.touch()


def test_returns_are_idempotent() -> None:
    about = setup(arms=2, rules=RULES)
    entries = [
        events.JobStarted("short/fp32#0.0", 1, "short/fp32", ("BLOCK=0",), 5, "r"),
        events.JobReturned(
            "short/fp32#0.0", 1, "w", (DEFAULT, "BLOCK=0"), tuple((1.0, 0.9) for _ in range(9)), {}, 3.0
        ),
    ]
    wrapped = [events.Entry("2026-01-01T00:00:00+00:00", 0.0, event) for event in entries]
    once, twice = fold(about, wrapped), fold(about, [*wrapped, wrapped[1]])
    assert once == twice
    assert once.jobs["short/fp32#0.0"].blocks == 6
    assert len(once.cases["short/fp32"].rows["BLOCK=0"]) == 6
    assert replace(once, cases={}) == replace(twice, cases={})

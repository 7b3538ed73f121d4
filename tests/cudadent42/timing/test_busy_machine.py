"""Which timer a busy machine gets, and what processor time counts."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest

from cudadent42.flows import pipeline
from cudadent42.flows.pipeline import Prepared
from cudadent42.model.records import MachineReport, Plan, TimerKind
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.plan import Choices, RunOptions
from cudadent42.timing import contention, processor_time
from cudadent42.timing.contention import Contention, judge, probe, waited_s
from cudadent42.timing.processor_time import ProcessorClock, descendants, idle_share
from cudadent42.timing.timers import MOST_PASSES, PASSES_S, passes_for

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's /proc")

SPIN = "import time\nstop = time.process_time() + {seconds}\nwhile time.process_time() < stop: pass\n"
SPUN_S = 0.2


def spin(seconds: float = SPUN_S) -> None:
    stop = time.thread_time() + seconds
    while time.thread_time() < stop:
        pass


def measured_s(work: Callable[[], object]) -> float:
    clock = ProcessorClock()
    clock.look_around()
    before = clock()
    work()
    return (clock() - before) / 1e9


@pytest.fixture
def competitors() -> Iterator[None]:
    """Four for every processor, which have begun."""
    program = [sys.executable, "-S", "-c", "print(flush=True)\n" + SPIN.format(seconds=60)]
    running = [subprocess.Popen(program, stdout=subprocess.PIPE) for _ in range(4 * (os.cpu_count() or 1))]
    for each in running:
        assert each.stdout is not None
        each.stdout.readline()
    yield
    for each in running:
        each.kill()
        each.communicate()


@linux
@pytest.mark.usefixtures("competitors")
def test_a_probe_among_competitors_finds_the_machine_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contention, "PROBE_S", 0.4)  # as users have it: a hundred time slices
    probed = probe()
    assert probed.busy
    assert probed.waited_share > 0.3


def test_a_few_disturbed_windows_are_not_a_busy_machine() -> None:
    quiet = [contention.Window(0.01, 0.0)] * 80
    disturbed = [contention.Window(0.01, 0.005)] * 20
    assert not judge(quiet + disturbed).busy
    assert judge(quiet + disturbed + disturbed[:2]).busy
    assert judge(quiet + disturbed).waited_share == pytest.approx(0.1)
    assert not judge([]).busy  # a system that does not tell


class Notes:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def stage(self, name: str) -> None:
        return

    def advance(self, fraction: float, what: str) -> None:
        return

    def note(self, text: str) -> None:
        self.lines.append(text)

    def detail(self, text: str) -> None:
        return


CASES = (AttentionCase("a", "fp32", 1, 1, 1, 8, 8, 32),)
PREPARED = Prepared(
    Plan("test", "cpu", CASES, "pytorch", ("pytorch", "ours"), 25, 1, seed=0), MachineReport((), "", {})
)


@pytest.mark.parametrize(
    ("disturbed", "asked", "timer", "notes"),
    [
        (90, None, TimerKind.CPU, 1),
        (10, None, TimerKind.CALL, 0),
        (90, TimerKind.CALL, TimerKind.CALL, 1),
    ],
)
def test_the_timer_follows_the_machine_unless_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, disturbed: int, asked: TimerKind | None, timer: TimerKind, notes: int
) -> None:
    monkeypatch.setattr(pipeline, "probe", lambda: Contention(100, disturbed, 0.5))
    observer = Notes()
    request = RunOptions(choices=Choices(timer=asked), device="cpu")
    assert pipeline.with_timer(PREPARED, request, observer).plan.timer is timer
    assert len(observer.lines) == notes
    assert all("--timer" in line for line in observer.lines)


def test_a_gpu_and_a_chosen_timer_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "probe", lambda: pytest.fail("nothing to look for"))
    for plan in (replace(PREPARED.plan, device="cuda:0"), replace(PREPARED.plan, timer=TimerKind.CPU)):
        prepared = replace(PREPARED, plan=plan)
        assert pipeline.with_timer(prepared, RunOptions(), Notes()) is prepared


@linux
def test_processor_time_counts_a_helper_thread() -> None:
    def work() -> None:
        helper = threading.Thread(target=spin)
        helper.start()
        helper.join()

    assert measured_s(work) >= SPUN_S


@linux
def test_processor_time_counts_a_child_that_ends() -> None:
    program = [sys.executable, "-S", "-c", SPIN.format(seconds=SPUN_S)]
    assert measured_s(lambda: subprocess.run(program, check=True)) >= SPUN_S


GRANDCHILD = """
import sys, time
for line in sys.stdin:
    stop = time.process_time() + float(line)
    while time.process_time() < stop: pass
    print(flush=True)
"""
CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', sys.argv[1]])"


@linux
def test_processor_time_counts_children_that_live_on_and_theirs() -> None:
    """A call that has its work done by a process which was started before."""
    command = [sys.executable, "-S", "-c", CHILD, GRANDCHILD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:

        def ask(seconds: float) -> None:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write(f"{seconds}\n".encode())
            child.stdin.flush()
            child.stdout.readline()

        ask(0.0)  # both are there
        assert child.pid in descendants()
        assert measured_s(lambda: ask(SPUN_S)) >= SPUN_S


@pytest.mark.parametrize(
    ("running_s", "ready_s", "idle"),
    [(0.0, 0.0, 1.0), (0.01, 0.0, 0.0), (0.0, 0.01, 0.0), (0.004, 0.002, 0.4)],
    ids=["waiting for others' work", "computing", "waiting for a processor", "some of each"],
)
def test_what_is_idle(monkeypatch: pytest.MonkeyPatch, running_s: float, ready_s: float, idle: float) -> None:
    """Of calls that take 10 ms."""
    now = {"wall": 0.0, "running": 0.0, "ready": 0.0}

    def call() -> None:
        now["wall"] += 0.01
        now["running"] += running_s
        now["ready"] += ready_s

    monkeypatch.setattr(processor_time, "time", SimpleNamespace(perf_counter=lambda: now["wall"]))
    monkeypatch.setattr(ProcessorClock, "__call__", lambda clock: round(now["running"] * 1e9))
    assert idle_share(call, lambda: now["ready"]) == pytest.approx(idle)


@linux
def test_time_that_this_process_was_ready_is_told() -> None:
    assert waited_s() >= 0.0


def test_long_calls_have_fewer_windows_in_a_block() -> None:
    assert passes_for(TimerKind.CALL, 1e-3) == passes_for(TimerKind.GRAPH, 1e-3) == 1
    assert passes_for(TimerKind.CPU, 3e-4) == MOST_PASSES
    assert passes_for(TimerKind.CPU, PASSES_S / 3) == 3
    assert passes_for(TimerKind.CPU, 1.0) == 1

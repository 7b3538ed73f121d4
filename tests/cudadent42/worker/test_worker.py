"""The worker loses real processes to real faults, and the run goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cudadent42.base import output
from cudadent42.base.errors import ExitCode, LabError
from cudadent42.model.events import BenchLog, BlockMeasured, Event, Progress, Skipped, WorkerLost
from cudadent42.model.integrity import Breach, peer_in
from cudadent42.model.records import BenchReport, Plan, VerifiedCase, VerifyReport
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.worker.parent import SILENT_CALLS, LostError, Worker, case_limits
from cudadent42.worker.stages import MAX_LOSSES, measure_peaks, run_stage
from worker_candidates import CANDIDATES, GPU_CANDIDATES

FIRST = AttentionCase("first", "fp32", 1, 2, 2, 64, 64, 32)
SECOND = AttentionCase("second", "fp32", 1, 2, 2, 80, 80, 32)
"""The larger one, so adversarial values are put into it; the candidates go wrong at length 64."""


@pytest.fixture(autouse=True)
def single_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def candidate(tmp_path: Path) -> Callable[[str], str]:
    file = tmp_path / "candidates.py"
    file.write_text(CANDIDATES)
    return lambda name: f"{file}:{name}"


def make_plan(*names: str) -> Plan:
    return Plan("test", "cpu", (FIRST, SECOND), "pytorch", ("pytorch", *names), 10, 1, seed=2)


@pytest.fixture
def silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent's clock goes on only while a candidate hangs, and then fast.

    A worker that is left waiting for a processor is not one that hangs.
    """
    note, now_s = tmp_path / "candidates.py.hang", 0.0

    def clock() -> float:
        nonlocal now_s
        text = note.read_text() if note.exists() else ""
        if text and _runs(int(text)):
            now_s += 100.0
        return now_s

    monkeypatch.setattr("cudadent42.worker.parent.time", SimpleNamespace(monotonic=clock))


def verdict(report: VerifyReport, case: AttentionCase, implementation: str) -> VerifiedCase:
    [result] = [c for c in report.cases if (c.case, c.implementation) == (case.id, implementation)]
    return result


def by_case(report: BenchReport) -> dict[str, set[str]]:
    implementations: dict[str, set[str]] = {}
    for sample in report.samples:
        implementations.setdefault(sample.case, set()).add(sample.implementation)
    return implementations


def test_both_stages_in_one_process(candidate: Callable[[str], str], tmp_path: Path) -> None:
    name = candidate("right")
    plan = make_plan(name)
    events: list[Event] = []
    pids: set[int | None] = set()
    with Worker(log_path=tmp_path / "worker.log") as worker:

        def listen(event: Event) -> None:
            events.append(event)
            pids.add(worker.pid)

        verified = run_stage("verify", plan, on_event=listen, worker=worker)
        bench = run_stage("bench", plan, on_event=listen, verified=verified, worker=worker)
    assert len(pids) == 1
    assert verdict(verified, FIRST, name).passed
    assert by_case(bench) == {c.id: {"pytorch", "pytorch_control", name} for c in plan.cases}
    assert len(bench.samples) == 2 * 10 * 3
    assert len(bench.conditions) == 2 * 10
    assert {(c.implementation, c.passed) for c in bench.rechecked} == {("pytorch", True), (name, True)}
    fractions = [e.fraction for e in events if isinstance(e, Progress) and e.stage == "bench"]
    assert fractions == sorted(fractions)
    assert fractions[-1] == pytest.approx(1.0)
    assert "a candidate may print" in (tmp_path / "worker.log").read_text()
    for block in (e for e in events if isinstance(e, BlockMeasured)):
        assert [sample.position for sample in block.samples] == [0, 1, 2]


def test_a_process_that_was_begun_ahead_does_the_first_stage(candidate: Callable[[str], str]) -> None:
    with Worker() as worker:
        worker.start()
        begun = worker.pid
        worker.start()
        report = run_stage(
            "verify", make_plan(candidate("right")), on_event=lambda event: None, worker=worker
        )
        assert worker.pid == begun is not None
    assert report.passed
    assert report.cases


def test_segfault_fails_that_case_only(candidate: Callable[[str], str]) -> None:
    name = candidate("segfault")
    plan = make_plan(name)
    events: list[Event] = []
    with Worker() as worker:
        verified = run_stage("verify", plan, on_event=events.append, worker=worker)
        bench = run_stage("bench", plan, on_event=events.append, verified=verified, worker=worker)
    assert verdict(verified, FIRST, name).detail == "worker died: signal 11 (SIGSEGV)"
    assert not verdict(verified, FIRST, name).passed
    assert verdict(verified, SECOND, name).passed
    assert verdict(verified, FIRST, "pytorch").passed
    assert by_case(bench) == {SECOND.id: {"pytorch", "pytorch_control", name}}
    assert "signal 11" in bench.skipped[f"{FIRST.id}/{name}"]
    assert sum(isinstance(event, WorkerLost) for event in events) == 1


@pytest.mark.usefixtures("silence")
def test_hang_is_killed_and_recorded(candidate: Callable[[str], str]) -> None:
    name = candidate("hangs")
    with Worker(timeout_s=6.0) as worker:
        verified = run_stage("verify", make_plan(name), on_event=lambda event: None, worker=worker)
    assert verdict(verified, FIRST, name).detail == "no sign of life for 6 s; killed"
    assert verdict(verified, SECOND, name).passed


@pytest.mark.skipif(sys.platform != "linux", reason="the candidate looks for the pipe in /proc")
@pytest.mark.parametrize("how", ["says_that_it_passed", "says_that_it_was_interrupted", "says_999"])
def test_a_failure_that_no_stage_has_is_a_forged_one(candidate: Callable[[str], str], how: str) -> None:
    name = candidate(how)
    verified = run_stage("verify", make_plan(name), on_event=lambda event: None)
    assert "another process wrote to its event pipe" in verdict(verified, FIRST, name).detail
    assert verdict(verified, FIRST, "pytorch").passed
    assert not verified.passed


@pytest.mark.skipif(sys.platform != "linux", reason="the candidate looks for the pipe in /proc")
def test_what_a_candidate_writes_as_an_error_is_short_and_plain(candidate: Callable[[str], str]) -> None:
    with pytest.raises(LabError) as caught:
        run_stage(
            "verify", make_plan(candidate("says_that_it_was_used_wrongly")), on_event=lambda event: None
        )
    assert len(str(caught.value)) <= 300
    assert str(caught.value).isprintable()


def test_a_long_case_is_given_its_time() -> None:
    long = AttentionCase("long", "bf16", 1, 64, 64, 16384, 16384, 64)
    limits = case_limits(replace(make_plan("cudadent42"), cases=(FIRST, long)))
    assert limits[FIRST.id] < 1.0
    assert limits[long.id] > 600.0
    # Gradients in bf16 at what PyTorch reaches on one thread with AVX2, of which other programs take half.
    assert limits[long.id] >= SILENT_CALLS * long.flops / 2.5e9
    assert case_limits(replace(make_plan("cudadent42"), cases=(long,), device="cuda:0"))[long.id] < 60.0


def test_ceilings_that_cannot_be_measured_cost_a_worker_and_no_run(tmp_path: Path) -> None:
    """Those of a GPU, asked of a CPU: the worker is lost, the next request gets another."""
    with Worker(tmp_path / "worker.log") as worker:
        with pytest.raises(LostError):
            measure_peaks(make_plan("pytorch"), worker)
        assert worker.pid is None
        assert run_stage("verify", make_plan("pytorch"), on_event=lambda event: None, worker=worker).cases


def test_hopeless_candidate_is_left_out(candidate: Callable[[str], str]) -> None:
    name = candidate("always_aborts")
    events: list[Event] = []
    verified = run_stage("verify", make_plan(name), on_event=events.append)
    assert sum(isinstance(event, WorkerLost) for event in events) == MAX_LOSSES
    failed = [case for case in verified.cases if case.implementation == name]
    said = "worker died: signal 6 (SIGABRT): double free or corruption"  # not only in the worker's log
    assert [case.detail for case in failed] == [said] * MAX_LOSSES
    assert any("left out" in reason for reason in verified.skipped.values())
    assert all(case.passed for case in verified.cases if case.implementation == "pytorch")


BORROWS_AND_DIES = """
import os
from torch.nn.functional import scaled_dot_product_attention

def attention(q, k, v, *, causal, softmax_scale):
    if q.shape[2] != %d:
        os._exit(9)
    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale)
"""


@pytest.mark.parametrize("peer", ["", "PyTorch"])
def test_whose_work_it_is_outlives_the_worker(tmp_path: Path, peer: str) -> None:
    """It is told when it is decided, so nobody loses it by dying in a later case."""
    file = tmp_path / "borrows.py"
    says_whose = f"attention.peer_of = {peer!r}\n" if peer else ""
    file.write_text(BORROWS_AND_DIES % FIRST.seqlen_q + says_whose)
    name = f"{file}:attention"
    verified = run_stage("verify", make_plan(name), on_event=lambda event: None)
    assert "worker died" in verdict(verified, SECOND, name).detail
    accusations = [(each.breach, each.implementation) for each in verified.findings]
    assert accusations == ([] if peer else [(Breach.ANOTHER_NAME, name)])
    assert [peer_in(verified.kept_apart, name)] == [peer]


def test_death_while_timing_keeps_the_rest(candidate: Callable[[str], str]) -> None:
    name = candidate("dies_later")
    bench = run_stage("bench", make_plan(name), on_event=lambda event: None, verified=VerifyReport(()))
    said = "worker died: exit code 9: a candidate may print"
    assert bench.skipped == {FIRST.id: said, f"{FIRST.id}/{name}": said}
    assert [(c.case, c.implementation, c.detail) for c in bench.rechecked if not c.passed] == [
        (FIRST.id, name, said)
    ]
    assert by_case(bench)[SECOND.id] == {"pytorch", "pytorch_control", name}


def test_only_the_one_that_died_goes(candidate: Callable[[str], str]) -> None:
    """The third goes on with the block after its last: none is missing, none is there twice."""
    dead, third = candidate("dies_later"), candidate("right")
    plan = replace(make_plan(dead, third), repeats=18)
    bench = run_stage("bench", plan, on_event=lambda event: None, verified=VerifyReport(()))
    assert set(bench.skipped) == {f"{FIRST.id}/{dead}"}
    for case in plan.cases:
        blocks = [s.block for s in bench.samples if (s.case, s.implementation) == (case.id, third)]
        assert blocks == list(range(18))
    assert {
        (c.case, c.implementation) for c in bench.rechecked if c.passed and c.implementation == third
    } == {(case.id, third) for case in plan.cases}


@pytest.mark.usefixtures("silence")
def test_an_endless_loop_costs_little_more_than_one_silence(candidate: Callable[[str], str]) -> None:
    name = candidate("hangs_always")
    with Worker(timeout_s=6.0) as worker:
        verified = run_stage("verify", make_plan(name), on_event=lambda event: None, worker=worker)
    failed = [case.detail for case in verified.cases if case.implementation == name]
    assert failed == ["no sign of life for 6 s; killed", "no sign of life for 3 s; killed"]


def test_what_a_candidate_prints_has_an_end(
    candidate: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "MOST_BYTES", 4 << 20)
    path = tmp_path / "worker.log"
    with Worker(path) as worker:
        verified = run_stage("verify", make_plan(candidate("prints")), on_event=lambda e: None, worker=worker)
    assert path.stat().st_size < 5 << 20
    assert b"bytes left out" in path.read_bytes()
    assert "exit code 9: xxx" in verdict(verified, FIRST, candidate("prints")).detail


@pytest.mark.usefixtures(
    "fresh_processes"
)  # by what the system keeps of the environment that a process began with
@pytest.mark.parametrize("worker_dies", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_daemon_of_a_candidate_ends_with_the_worker(
    candidate: Callable[[str], str], tmp_path: Path, worker_dies: bool
) -> None:
    if worker_dies:
        (tmp_path / "candidates.py.die").touch()
    run_stage("verify", make_plan(candidate("leaves_a_daemon")), on_event=lambda event: None)
    pids = [int(line) for line in (tmp_path / "candidates.py.daemon").read_text().split()]
    assert pids
    assert not any(_runs(pid) for pid in pids)


@pytest.mark.parametrize("worker_dies", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_daemon_that_sheds_its_environment_ends_with_the_worker(
    candidate: Callable[[str], str], tmp_path: Path, worker_dies: bool
) -> None:
    """The process above the worker is the parent of what has lost its own: nothing else tells whose it was."""
    (tmp_path / "candidates.py.anonymous").touch()
    if worker_dies:
        (tmp_path / "candidates.py.die").touch()
    run_stage("verify", make_plan(candidate("leaves_a_daemon")), on_event=lambda event: None)
    [pid] = map(int, (tmp_path / "candidates.py.daemon").read_text().split())
    assert not _runs(pid)


def test_cases_take_turns_and_a_death_in_a_later_round_costs_one_case(
    candidate: Callable[[str], str],
) -> None:
    name = candidate("dies_on_a_sign")
    turns: list[tuple[str, int]] = []

    def listen(event: Event) -> None:
        if isinstance(event, BlockMeasured):
            turns.append((event.conditions.case, event.conditions.block))
            if turns[-1] == (SECOND.id, 5):
                Path(name.partition(".py:")[0] + ".py.sign").touch()

    bench = run_stage("bench", replace(make_plan(name), repeats=18), on_event=listen)
    first_round = [(case.id, block) for case in (FIRST, SECOND) for block in range(6)]
    assert turns == first_round + [(SECOND.id, block) for block in range(6, 18)]
    assert set(bench.skipped) == {FIRST.id, f"{FIRST.id}/{name}"}
    assert [check.case for check in bench.rechecked if check.passed] == [SECOND.id, SECOND.id]
    assert [check.case for check in bench.rechecked if not check.passed] == [FIRST.id]


def test_output_that_turns_wrong_while_timed_is_caught(candidate: Callable[[str], str]) -> None:
    name = candidate("turns_wrong")
    bench = run_stage("bench", make_plan(name), on_event=lambda event: None, verified=VerifyReport(()))
    assert "timed is wrong" in bench.skipped[f"{FIRST.id}/{name}"]
    assert [c.implementation for c in bench.rechecked if not c.passed] == [name, name]


def test_crash_on_import_is_laid_to_the_plug_in(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("import os; os.abort()")
    name = f"{file}:attention"
    verified = run_stage("verify", make_plan(name), on_event=lambda event: None)
    assert "loading it: worker died: signal" in verified.skipped[name]
    assert verdict(verified, FIRST, "pytorch").passed


def test_unknown_implementation_is_a_usage_error() -> None:
    with pytest.raises(LabError, match="unknown implementation 'nobody'") as caught:
        run_stage("verify", make_plan("nobody"), on_event=lambda event: None)
    assert caught.value.exit_code is ExitCode.USAGE


def test_unavailable_implementation_is_skipped_with_its_reason() -> None:
    bench = run_stage(
        "bench", make_plan("pytorch_cudnn"), on_event=lambda event: None, verified=VerifyReport(())
    )
    assert bench.samples == ()
    assert bench.skipped[FIRST.id] == "pytorch_cudnn runs on cuda, not on cpu"


def test_interrupt_ends_the_worker_and_keeps_the_blocks(candidate: Callable[[str], str]) -> None:
    plan = make_plan(candidate("right"))
    log = BenchLog()
    pids: list[int] = []
    with Worker() as worker:

        def listen(event: Event) -> None:
            log.add(event)
            if isinstance(event, BlockMeasured) and event.conditions.block == 3:
                assert worker.pid is not None
                pids.append(worker.pid)
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run_stage("bench", plan, on_event=listen, worker=worker)
        assert len(log.report().samples) == 4 * 3
        with pytest.raises(ProcessLookupError):
            os.kill(pids[0], 0)
        verified = run_stage("verify", make_plan(), on_event=lambda event: None, worker=worker)
    assert verified.passed  # the same Worker starts a new process


@pytest.mark.usefixtures("warm_texts")
@pytest.mark.parametrize("how", ["sleeps", "holds_the_lock", "stops_itself"])
def test_worker_ends_when_its_parent_is_killed(
    candidate: Callable[[str], str], tmp_path: Path, how: str
) -> None:
    script = textwrap.dedent(
        f"""
            from cudadent42.operations.attention.case import AttentionCase
            from cudadent42.model.records import Plan
            from cudadent42.worker.parent import Worker
            from cudadent42.worker.stages import run_stage
            plan = Plan("t", "cpu", (AttentionCase("first", "fp32", 1, 2, 2, 64, 64, 32),), "pytorch",
                        ("pytorch", {candidate(how)!r}), 10, 1, seed=2)
            with Worker() as worker:
                run_stage("verify", plan, on_event=lambda e: print(worker.pid, flush=True), worker=worker)
            """
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        while not (tmp_path / "candidates.py.there").exists():  # until the time limit of a test
            time.sleep(0.01)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    while _runs(pid):  # until the time limit of a test
        time.sleep(0.01)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", ["faults", "spins"])
def test_gpu_fault_and_hang_are_contained(tmp_path: Path, name: str) -> None:
    file = tmp_path / "gpu_candidates.py"
    file.write_text(GPU_CANDIDATES)
    name = f"{file}:{name}"
    events: list[Event] = []
    plan = replace(make_plan(name), device="cuda:0")
    with Worker(timeout_s=15.0) as worker:
        verified = run_stage("verify", plan, on_event=events.append, worker=worker)
        bench = run_stage("bench", plan, on_event=events.append, verified=verified, worker=worker)
    assert not verdict(verified, FIRST, name).passed
    assert verdict(verified, SECOND, name).passed
    assert by_case(bench) == {SECOND.id: {"pytorch", "pytorch_control", name}}
    assert sum(isinstance(event, WorkerLost) for event in events) == 1


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_messages_name_implementations_that_fail_verification(candidate: Callable[[str], str]) -> None:
    name = candidate("right")
    failed = VerifiedCase(FIRST.id, name, "random", None, None, None, False, "max error 3")
    events: list[Event] = []
    run_stage("bench", make_plan(name), on_event=events.append, verified=VerifyReport((failed,)))
    assert Skipped("bench", f"{FIRST.id}/{name}", "failed verification: max error 3") in events

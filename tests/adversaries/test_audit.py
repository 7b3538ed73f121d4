"""What only shows from outside: the candidate in a process apart, without the clock, the seeds and the answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import audits
import lab
import pytest
from control_groups import half_a_processor

from cudadent42.audit.race import BLOCKS, Race
from cudadent42.audit.stage import (
    Audited,
    as_much_faster,
    comparable,
    contradicted,
    slower_than_said,
    speed_is_confirmed,
    wants_another,
)
from cudadent42.base import output
from cudadent42.model.integrity import Breach, Grade, Way

WRONG = {
    # It forges from the seventh call on, which may be one of a shape that the plan does not show.
    "answer_forged": {Breach.FAST_ONLY_IN_RUN, Breach.HIDDEN_SHAPE, Breach.LATE_WORK},
    "thread_fills_later": {Breach.FAST_ONLY_IN_RUN},
    "hard_coded_shape": {Breach.HIDDEN_SHAPE},
    "now_and_then": {Breach.FAST_ONLY_IN_RUN},
    "wrong_when_large": {Breach.FAST_ONLY_IN_RUN},
}
"""Their results show it."""

SLOW = (
    *("kept_by_content", "batched_in_first", "child_works", "locals_rewritten"),
    *("only_last_of_window", "slots_batched", "helper_escaped"),
)
"""Their time shows it: nothing is saved where each call has inputs of its own, and the clock is another's."""


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Audited:
    """One audit of them all."""
    names = [lab.cheat(name) for name in WRONG]
    log = tmp_path_factory.mktemp("wrong") / "audit.log"
    return audits.audited(names, log, results=audits.claim(names, 0.2, 0.002), sealed=True)


@pytest.mark.parametrize("name", WRONG)
def test_a_result_that_was_never_computed(name: str, wrong: Audited) -> None:
    findings = [each for each in wrong.findings if each.implementation == lab.cheat(name)]
    assert WRONG[name] & {each.breach for each in findings if each.grade is Grade.FAILED}
    assert not any(each.confirmed for each in wrong.confirmations)


@pytest.mark.parametrize("name", [*SLOW, pytest.param("observer_left", marks=pytest.mark.slow)])
def test_a_saving_that_is_none(name: str, tmp_path: Path) -> None:
    # Far more than the tenth or two of a millisecond by which calls differ that others displace.
    results = audits.claim([lab.cheat(name)], 0.5, 0.005)
    audit = audits.audited([lab.cheat(name)], tmp_path / "audit.log", results=results)
    assert {each.breach for each in audit.findings} & {Breach.FAST_ONLY_IN_RUN, Breach.BASELINE_SLOWED}
    assert not any(each.confirmed for each in audit.confirmations)


@pytest.mark.parametrize("begins", ["", "start()\ntime.sleep(1.0)\n"], ids=["when called", "when loaded"])
def test_a_helper_that_no_clock_may_count(begins: str, tmp_path: Path) -> None:
    """When it is loaded nobody has looked yet whether the clock counts all, and without that one children that end in
    between are not counted at all."""
    file = tmp_path / "candidate.py"
    file.write_text((lab.FOLDER / "cheats" / "helper_unreadable.py").read_text() + begins)
    name = lab.candidate(file)
    audit = audits.audited([name], tmp_path / "audit.log", results=audits.claim([name], 0.5, 0.005))
    (finding,) = audit.findings
    assert finding.breach is Breach.FAST_ONLY_IN_RUN
    assert "the audit's clock of all of them counted" in finding.evidence


def race(baseline_ms: float, candidate_ms: float) -> Race:
    return Race(baseline_ms, candidate_ms, (baseline_ms - candidate_ms,) * BLOCKS, ())


def test_which_side_is_to_blame() -> None:
    row = replace(audits.claim(["mine"], 10.0, 1.0).cases[0])
    assert contradicted(row, race(10.0, 1.0), "a") is None
    assert contradicted(row, race(12.0, 4.0), "a") is None  # colder, and still most of it
    only_in_run = contradicted(row, race(10.0, 11.0), "a")
    assert only_in_run is not None
    assert only_in_run.breach is Breach.FAST_ONLY_IN_RUN
    slowed = contradicted(row, race(1.1, 1.0), "a")
    assert slowed is not None
    assert slowed.breach is Breach.BASELINE_SLOWED
    assert "10 ms beside it and 1.1 ms" in slowed.evidence
    small = replace(row, speedup=1.05, latency_ms=9.5)
    assert contradicted(small, race(10.0, 10.0), "a") is None  # not confirmed, and no accusation


def test_half_of_what_was_saved_does_not_bear_out_any_speed_up() -> None:
    """A kernel that is three times as fast, and was forged to be thirty: most of the saving is true."""
    forged = audits.claim(["mine"], 3.0, 0.1).cases[0]
    assert not as_much_faster(forged, race(3.0, 1.0))
    assert as_much_faster(forged, race(3.0, 0.4))
    for ratio, own_ms in ((1.05, 0.97), (2.0, 0.6), (3.0, 0.5)):
        honest = audits.claim(["mine"], 1.0, 1.0 / ratio).cases[0]
        assert as_much_faster(honest, race(1.1, own_ms))
    short = audits.claim(["mine"], 0.06, 0.01).cases[0]
    assert as_much_faster(short, race(0.07, 0.035))  # a third of it is waking
    as_seen = audits.claim(["mine"], 0.2166, 0.0093).cases[0]  # forged; it takes 0.066
    assert not as_much_faster(as_seen, race(0.2533, 0.0703))
    assert as_much_faster(forged, race(3.0, -0.1))  # less than copying took


def test_what_another_clock_saw_neither_confirms_nor_accuses() -> None:
    """On a GPU: calls that no graph takes, and whose launches take longer than the GPU works."""
    row = audits.claim(["mine"], 0.06, 0.02).cases[0]
    launches = replace(race(0.3, 0.3), way=Way.QUEUED)
    assert not comparable(row, launches)
    assert contradicted(row, launches, "a") is None
    same_clock = replace(race(0.07, 0.07), way=Way.GRAPH)
    assert comparable(row, same_clock)
    assert contradicted(row, same_clock, "a") is not None
    on_a_busy_cpu = race(0.3, 0.3)
    assert not comparable(row, on_a_busy_cpu)
    assert contradicted(row, on_a_busy_cpu, "a") is None
    on_cpu = race(0.1, 0.1)
    assert comparable(row, on_cpu)
    assert contradicted(row, on_cpu, "a") is None
    assert contradicted(row, race(0.08, 0.08), "a") is not None


def test_a_race_on_a_gpu_that_somebody_else_used_is_made_again() -> None:
    """Two audits at once on one GPU: an honest kernel was not confirmed, since its one race was disturbed."""
    row = audits.claim(["mine"], 0.31, 0.05).cases[0]
    for way in (Way.ALONE, Way.GRAPH):
        assert wants_another(row, replace(race(0.6, 0.1), way=way), "a")
        assert not wants_another(row, replace(race(0.32, 0.06), way=way), "a")
    assert not wants_another(
        row, replace(race(0.6, 0.1), way=Way.QUEUED), "a"
    )  # launching takes as long again
    assert wants_another(row, race(0.6, 0.1), "a")  # on a CPU too
    assert wants_another(row, race(0.31, 0.31), "a")  # nobody is accused of what one race saw


def test_what_is_called_as_fast_is_looked_at_too(tmp_path: Path) -> None:
    name = lab.cheat("as_fast_as_the_baseline")
    audit = audits.audited([name], tmp_path / "audit.log", results=audits.equal([name], 0.1))
    (finding,) = audit.findings
    assert (finding.breach, finding.grade) == (Breach.FAST_ONLY_IN_RUN, Grade.SUSPECT)
    assert "it takes 0.1 ms in the run" in finding.evidence
    assert not any(each.confirmed for each in audit.confirmations)


def test_an_honest_kernel_that_is_as_fast_or_slower_is_confirmed(tmp_path: Path) -> None:
    names = [lab.candidate(lab.FOLDER / "honest" / "ordinary.py", "plain")]
    audit = audits.audited(names, tmp_path / "audit.log", results=audits.equal(names, 0.1))
    assert not audit.findings
    assert [each.confirmed for each in audit.confirmations] == [True]


@pytest.mark.parametrize(
    ("speedup", "own_ms", "confirmed"),
    [
        (1.0, 10.0, True),
        (1.0, 14.0, True),  # what differs by less than half is no cheat
        (1.0, 17.0, False),
        (0.5, 20.0, True),  # it was called half as fast
        (0.5, 40.0, False),
        (1.0, 5.0, True),
    ],
)
def test_what_is_called_as_fast_may_not_be_much_slower(
    speedup: float, own_ms: float, confirmed: bool
) -> None:
    row = audits.claim(["mine"], 10.0, 10.0 / speedup).cases[0]
    seen = race(10.0, own_ms)
    assert speed_is_confirmed(row, seen) is confirmed
    assert (slower_than_said(row, seen, "a") is None) is confirmed
    assert slower_than_said(row, replace(seen, way=Way.GRAPH), "a") is None


def test_short_calls_that_wake_late_are_not_called_slower() -> None:
    row = audits.claim(["mine"], 0.008, 0.008).cases[0]
    assert slower_than_said(row, race(0.01, 0.31), "a") is None


def test_what_waking_takes_accuses_nobody() -> None:
    """As seen of an honest kernel, at a load of 18: 0.020 ms of processor time in the run, 0.148 in the audit."""
    row = audits.claim(["mine"], 0.0332, 0.0196).cases[0]
    assert contradicted(row, race(0.0593, 0.1476), "a") is None
    assert contradicted(row, race(0.0332, 0.1476), "a") is None


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of the old kind with little processor time."""
    with ExitStack() as stack:
        try:
            made = stack.enter_context(half_a_processor())
        except OSError as error:
            pytest.skip(f"no control groups that this process may make: {error}")
        yield made


def test_who_bounds_the_baselines_processor_time_is_accused(tmp_path: Path, group: Path) -> None:
    source = lab.FOLDER / "cheats/judge_in_a_group.py"
    cheat = tmp_path / source.name
    cheat.write_text(source.read_text().replace("cudadent42-test", group.name))
    name = lab.candidate(cheat)
    audit = audits.audited([name], tmp_path / "audit.log", results=audits.claim([name], 0.2, 0.1))
    (finding,) = audit.findings
    assert (finding.breach, finding.grade) == (Breach.BASELINE_SLOWED, Grade.FAILED)
    assert f"in control group cpu:/{group.name}" in finding.evidence


def test_who_changes_how_the_baseline_is_run_is_accused(tmp_path: Path) -> None:
    name = lab.cheat("judge_slowed")
    audit = audits.audited([name], tmp_path / "audit.log", results=audits.claim([name], 0.2, 0.1))
    (finding,) = audit.findings
    assert (finding.breach, finding.grade) == (Breach.BASELINE_SLOWED, Grade.FAILED)
    assert "niceness 19" in finding.evidence
    assert not audit.confirmations


PRINTS = """
import os
from torch.nn.functional import scaled_dot_product_attention

def attention(query, key, value, *, causal, softmax_scale):
    os.write(1, b"x" * 999_999 + b"\\n")
    return scaled_dot_product_attention(query, key, value, is_causal=causal, scale=softmax_scale)
"""


def test_what_a_candidate_prints_in_the_audit_has_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "MOST_BYTES", 4 << 20)
    (tmp_path / "prints.py").write_text(PRINTS)
    name, log = lab.candidate(tmp_path / "prints.py"), tmp_path / "audit.log"
    audits.audited([name], log, results=audits.claim([name], 0.2, 0.1))
    assert log.stat().st_size < 5 << 20
    assert b"bytes left out" in log.read_bytes()

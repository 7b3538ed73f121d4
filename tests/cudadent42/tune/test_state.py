"""Journals that do not follow from what their tuning is about: damaged ones, and those of somebody else's hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from simulated import Simulated, setup

from cudadent42.base.errors import UsageError
from cudadent42.base.observer import Quiet
from cudadent42.model.records import Verdict
from cudadent42.tune import journal as events
from cudadent42.tune.coordinator import Coordinator, Limits
from cudadent42.tune.journal import Entry, Event, TuningJournal, read
from cudadent42.tune.prune import CompiledArm
from cudadent42.tune.space import DEFAULT
from cudadent42.tune.state import fold

TIME = "2026-01-01T00:00:00+00:00"
CASE = setup().plan.cases[0].id
JOB = f"{CASE}#0.0"


def folded(*said: Event) -> None:
    fold(setup(), [Entry(TIME, 1.0, each) for each in said])


@pytest.mark.parametrize(
    "said",
    [
        (events.JobStarted("no job", 1, CASE, ("BLOCK=1",), 1, "races/x"),),
        (events.JobStarted("nowhere#0.0", 1, CASE, ("BLOCK=1",), 1, "races/x"),),
        (events.BlockMeasured("#", 1, 0, {}),),
        (
            events.JobStarted(f"{CASE}#x", 1, CASE, ("BLOCK=1",), 1, "races/x"),
            events.JobReturned(f"{CASE}#x", 1, "w", ("BLOCK=1",), ((1.0,),), {}, 1.0),
        ),
        (
            events.JobStarted(JOB, 1, CASE, ("BLOCK=1",), 1, "races/x"),
            events.JobReturned(JOB, 1, "w", (DEFAULT, "BLOCK=1"), ((1.0,),), {}, 1.0),
        ),
        (events.JobStarted(JOB, 1, CASE, ("another",), 1, "races/x"),),
        (events.BlockMeasured(JOB, 1, 0, {DEFAULT: 1.0, "another": 1.0}),),
        (events.Settled(CASE, "another", (), "it leads"),),
        (events.Settled(CASE, DEFAULT, ("another",), "it leads"),),
        (events.Settled(CASE, "BLOCK=0", (), "it leads", blocks=0),),
        (events.Settled(CASE, "BLOCK=0", (), "it leads", blocks=-54),),
        (events.Confirmed(CASE, "another", 1, "confirmed/x", 1.2, 1.1, 1.3, Verdict.FASTER, True, ""),),
        (events.RungDone(CASE, 0, "another", ()),),
        (
            events.Joined("w", "u", "k", "h"),
            events.Opened("h"),
        ),
    ],
    ids=lambda said: type(said[-1]).__name__,
)
def test_events_that_do_not_follow_are_an_error(said: tuple[Event, ...]) -> None:
    times = [TIME, "yesterday"] if isinstance(said[0], events.Joined) else [TIME] * len(said)
    entries = [Entry(time, 1.0, each) for time, each in zip(times, said, strict=True)]
    with pytest.raises(UsageError, match=r"the tuning's journal.jsonl does not follow from its tuning.json"):
        fold(setup(), entries)


def test_a_setup_whose_arms_lack_settings_is_an_error() -> None:
    about = setup()
    for wrong in (replace(about, settings={}), replace(about, arms={}), replace(about, arms={DEFAULT: "x"})):
        with pytest.raises(UsageError, match="not every arm has its settings"):
            fold(wrong, ())


def test_what_follows_is_no_error(tmp_path: Path) -> None:
    folded(
        events.Opened("h"),
        *(events.Compiled(CompiledArm(arm, {CASE: arm})) for arm in setup().arms),
        events.JobStarted(JOB, 1, CASE, ("BLOCK=1",), 1, "races/x"),
        events.BlockMeasured(JOB, 1, 0, {DEFAULT: 1.0, "BLOCK=1": 0.9}),
        events.ArmOut(CASE, "BLOCK=2", "wrong"),
    )
    about = setup()
    with TuningJournal(tmp_path, about) as journal:
        Coordinator(tmp_path, journal, about, Limits(), Quiet()).run(Simulated({"BLOCK=3": 0.06}))
    assert fold(*read(tmp_path)).finished


def test_a_quarantine_lasts_for_as_long_as_the_process() -> None:
    """Else a fleet of one device, which was mended since, could never go on."""
    said = [events.Opened("h"), events.Quarantined("unit 1", "3 jobs failed on it")]
    assert set(fold(setup(), [Entry(TIME, 1.0, each) for each in said]).quarantined) == {"unit 1"}
    again = [*said, events.Opened("h")]
    assert fold(setup(), [Entry(TIME, 1.0, each) for each in again]).quarantined == {}

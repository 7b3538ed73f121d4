"""The state is a function of the events, whatever order they come in and wherever the log ends."""

from __future__ import annotations

import itertools
import math
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudadent42.base.errors import NewerVersionError, UsageError
from cudadent42.session import protocol
from cudadent42.session.clock import Instant, between, now
from cudadent42.session.events import (
    KINDS,
    Attempted,
    BudgetReached,
    Decision,
    End,
    Ended,
    Entry,
    Event,
    Judged,
    Kept,
    LessonsFired,
    Noted,
    Overridden,
    Passed,
    Profiled,
    Reverted,
    Reverting,
    Settings,
    Started,
    Warned,
    WorkEnded,
    WorkOutcome,
    WorkStarted,
    from_line,
    to_line,
)
from cudadent42.session.log import parse
from cudadent42.session.protocol import Protocol, Work
from cudadent42.session.report import html, markdown
from cudadent42.session.report.view import View
from cudadent42.session.state import State, replay, tick
from cudadent42.session.words import next_step

PROTOCOL: Protocol = protocol.load("default")[0]
STARTED = Started(1, "0", "x", PROTOCOL, Settings("default", "race", budget_minutes=80.0), "c0", "b0")
NAMES = tuple(checkpoint.name for checkpoint in PROTOCOL.checkpoints)
BASE_S = datetime(2026, 1, 1, tzinfo=timezone.utc).timestamp()

names, numbers, texts = st.sampled_from(NAMES), st.integers(1, 3), st.text(max_size=20)
runs = st.sampled_from(("", "runs/01-baseline", "runs/02-fix-1"))
speeds = st.none() | st.floats(0.01, 100)
EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(WorkStarted, names, runs, st.none() | numbers),
    st.builds(
        WorkEnded,
        st.sampled_from(WorkOutcome),
        texts,
        st.integers(0, 9),
        st.booleans(),
        speeds,
        speeds,
        speeds,
        st.sampled_from(("", "faster", "equal")),
    ),
    st.builds(Profiled, runs, texts),
    st.builds(Attempted, numbers, texts, texts, st.integers(0, 5), texts),
    st.builds(Judged, runs, st.sampled_from(Decision), st.just(1), st.just(("line",)), st.none() | numbers),
    st.builds(Kept, numbers, st.booleans()),
    st.builds(Reverting, numbers),
    st.builds(Reverted, numbers),
    st.builds(Passed, names),
    st.builds(Overridden, texts, texts),
    st.builds(Warned, texts),
    st.builds(Noted, texts),
    st.builds(LessonsFired, st.dictionaries(texts, texts, max_size=2)),
    st.builds(BudgetReached, st.sampled_from(("minutes", "usd")), st.floats(0, 100), st.floats(1, 100)),
    st.builds(Ended, st.sampled_from(End), texts),
)


def instant(wall_s: float, uptime_s: float, boot: str) -> Instant:
    return Instant(datetime.fromtimestamp(BASE_S + wall_s, timezone.utc).isoformat(), uptime_s, boot, "host")


@st.composite
def logs(draw: Any) -> list[Entry]:
    """A log in which time passes, machines restart and clocks are set."""
    wall, uptime, boot = 0.0, 100.0, 0
    entries = [Entry(0, instant(wall, uptime, str(boot)), STARTED)]
    for event in draw(st.lists(EVENTS, max_size=25)):
        passed = draw(st.floats(0, 5000))
        wall, uptime = wall + passed, uptime + passed
        what = draw(st.integers(0, 9))
        if what == 0:
            boot, uptime = boot + 1, draw(st.floats(0, 50))
        elif what == 1:
            wall = draw(st.floats(-(10**8), 10**8))
        entries.append(Entry(len(entries), instant(wall, uptime, str(boot)), event))
    return entries


def measured_s(entries: list[Entry]) -> float:
    """Time on the machine up to the end of the session, computed the plain way."""
    total = 0.0
    for earlier, later in itertools.pairwise(entries):
        if isinstance(earlier.event, Ended):
            break
        if earlier.at.boot == later.at.boot:
            total += later.at.uptime_s - earlier.at.uptime_s
    return total


@given(logs())
def test_minutes_are_those_that_the_machine_ran(entries: list[Entry]) -> None:
    state = replay(entries)
    assert math.isclose(state.seconds, measured_s(entries), abs_tol=1e-3)
    assert all(item.seconds >= 0 for item in state.checkpoints)
    assert state.away_s >= 0
    assert state.usd == 0


@given(logs(), st.data())
def test_every_beginning_of_a_log_is_a_session(entries: list[Entry], data: Any) -> None:
    length = data.draw(st.integers(1, len(entries)))
    state = replay(entries[:length])
    assert 0 <= state.position <= len(state.checkpoints)
    assert [item.passed for item in state.checkpoints] == [
        index < state.position for index in range(len(state.checkpoints))
    ]
    assert isinstance(next_step(state), str)
    view = View("x", state)
    assert markdown.render(view)
    assert "</html>" in html.render(view)


@given(logs(), st.data())
def test_a_log_read_back_from_any_cut_gives_the_same_state(entries: list[Entry], data: Any) -> None:
    lines = [to_line(entry).encode() + b"\n" for entry in entries]
    text = b"".join(lines)
    cut = data.draw(st.integers(len(lines[0]), len(text)))
    whole = text[:cut].count(b"\n")
    assert replay(parse(text[:cut], Path("log"))) == replay(entries[:whole])


@given(logs())
def test_looking_changes_nothing(entries: list[Entry]) -> None:
    """What the time until now adds, an event now adds too."""
    state = replay(entries)
    last = entries[-1].at
    later = Instant(last.time, last.uptime_s + 60, last.boot, last.host)
    looked: State = tick(state, later)
    assert looked.seconds == pytest.approx(state.seconds + (0 if state.end else 60))
    assert looked.runs == state.runs
    assert replay(entries) == state


@given(EVENTS)
def test_events_are_read_as_they_were_written(event: Event) -> None:
    entry = Entry(3, now(), event)
    assert from_line(to_line(entry)) == entry


def test_every_kind_of_event_is_tried() -> None:
    tried = {type(event) for event in (STARTED,)} | {
        WorkStarted, WorkEnded, Profiled, Attempted, Judged, Kept, Reverting, Reverted,
        Passed, Overridden, Warned, Noted, LessonsFired, BudgetReached, Ended,
    }  # fmt: skip
    assert tried == set(KINDS.values())


@given(st.text(max_size=100))
def test_a_line_is_an_event_or_a_value_error(line: str) -> None:
    with pytest.raises(ValueError, match=r"[a-zE]"):  # of json or of this module, in words
        from_line(line)


def test_two_clocks() -> None:
    start = instant(0, 100, "a")
    assert between(start, instant(600, 700, "a")).seconds == 600
    jumped = between(start, instant(600 + 3600, 700, "a"))
    assert (jumped.seconds, jumped.jump_s) == (600, 3600)
    back = between(start, instant(-3600, 700, "a"))
    assert (back.seconds, back.jump_s) == (600, -4200)
    restarted = between(start, instant(900, 20, "b"))
    assert (restarted.seconds, restarted.away_s, restarted.jump_s) == (0, 900, 0)
    assert between(start, instant(-50, 20, "b")).jump_s == -50
    real = now()
    assert real.boot
    assert between(real, now()).seconds < 60


# ---------------------------------------------------------------- the protocol

TEXT = """
schema_version = 1
name = "mine"

[[checkpoint]]
name = "base"
work = "measure"
minutes = 5

[[checkpoint]]
name = "fix"
work = "change"
minutes = 2.5
gates = "default"
"""


def test_the_default_protocol_is_the_five_checkpoints() -> None:
    assert [(item.name, item.minutes) for item in PROTOCOL.checkpoints] == [
        ("baseline", 25), ("profile", 15), ("fix", 20), ("validate", 10), ("document", 10),
    ]  # fmt: skip
    assert PROTOCOL.budget_minutes == 80
    assert PROTOCOL.profile_below == 0.5


def test_a_protocol_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text(TEXT)
    loaded, text = protocol.load(str(path))
    assert text == TEXT
    assert loaded.checkpoints[1].work is Work.CHANGE
    assert loaded.budget_minutes == 7.5


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("schema_version = 1", "", "schema_version"),
        ('name = "mine"', 'name = "mine"\nbudget = 3', "unknown key 'budget'.*did you mean 'budget_minutes'"),
        ('name = "mine"', 'name = "mine"\nbudget_minutes = 0', "above 0"),
        ('name = "mine"', 'name = "mine"\nprofile_below = inf', "above 0"),
        ("minutes = 5", "minutes = -5", "above 0"),
        ("minutes = 5", "minutes = true", "above 0"),
        ("minutes = 5", "", "minutes = None"),
        ("minutes = 5", "minutes = nan", "above 0"),
        ('work = "measure"', 'work = "mesure"', "expected measure, profile, change, document"),
        ('work = "measure"', 'work = "change"', "expected 'measure'"),
        ('name = "fix"', 'name = "base"', "given twice"),
        ('name = "fix"', 'name = "../fix"', "letters, digits"),
        ("[[checkpoint]]", "[checkpoint]", "TOML"),
        ('gates = "default"', "gates = 3", "the name of gates"),
    ],
)
def test_a_wrong_protocol_is_refused_with_the_reason(old: str, new: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        protocol.parse(TEXT.replace(old, new, 1), "p.toml")


def test_a_protocol_without_checkpoints_and_of_a_newer_version() -> None:
    with pytest.raises(UsageError, match="at least one"):
        protocol.parse('schema_version = 1\nname = "x"\ncheckpoint = []', "p")
    with pytest.raises(NewerVersionError, match="upgrade"):
        protocol.parse(TEXT.replace("= 1", "= 2", 1), "p")


@given(st.text(max_size=200))
def test_any_text_is_a_protocol_or_a_clear_error(text: str) -> None:
    for document in (text, TEXT + text, TEXT.replace('"measure"', text)):
        assert refusal(document).startswith("file")


def refusal(document: str) -> str:
    try:
        protocol.parse(document, "file")
    except UsageError as error:
        return str(error)
    return "file is a protocol"


def test_the_gates_of_the_default_protocol_are_gates() -> None:
    from cudadent42.stages.gates.loader import parse as parse_gates

    for checkpoint in PROTOCOL.checkpoints:
        if checkpoint.gates:
            assert parse_gates(protocol.gate_text(checkpoint.gates, Path()), checkpoint.gates).gates
    with pytest.raises(UsageError, match="unknown gates"):
        protocol.gate_text("session-basline", Path())

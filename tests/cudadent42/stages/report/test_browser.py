"""The page in a real browser: does it fit, does it show, does it stay silent."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import browser, look

from cudadent42.ledger.queries import Point
from cudadent42.model.history import tracks
from cudadent42.runs.run_folder import RunFolder
from cudadent42.session import protocol
from cudadent42.session.clock import Instant
from cudadent42.session.events import Entry, Noted, Settings, Started, WorkEnded, WorkOutcome, WorkStarted
from cudadent42.session.report import html as session_html
from cudadent42.session.report.view import View as SessionView
from cudadent42.session.state import replay
from cudadent42.stages import report
from cudadent42.stages.report import history


@pytest.fixture(autouse=True, scope="module")
def _with_a_browser() -> None:
    """Pages that none would open are not drawn."""
    browser()


@pytest.mark.parametrize(("width", "shown", "hidden"), [(1280, "wide", "narrow"), (390, "narrow", "wide")])
def test_page_fits_and_shows_the_verdict(
    run: RunFolder, tmp_path_factory: pytest.TempPathFactory, width: int, shown: str, hidden: str
) -> None:
    report.write_run(run)
    layout = look(run.path, width, tmp_path_factory.mktemp("profile"))
    assert layout["width"] == width
    assert layout["content"] <= width, "the page scrolls sideways"
    assert layout["verdict"].startswith("cudadent42 is faster than pytorch: ")
    assert layout["inside"]
    assert layout["outside"] == 0
    assert layout["smallest"] >= 9, "text in a picture is too small to read"
    assert any(f"speedup-{shown}" in name for name in layout["pictures"])
    assert not any(f"-{hidden}-" in name for name in layout["pictures"])
    assert layout["requests"] == []


def test_long_names_do_not_widen_a_phone(make, tmp_path_factory: pytest.TempPathFactory) -> None:  # type: ignore[no-untyped-def]
    run = make(names=("x" * 200, "<b>bold</b>"), implementations=("pytorch", "y" * 120 + ".py:attention"))
    report.write_run(run)
    layout = look(run.path, 360, tmp_path_factory.mktemp("profile"))
    assert layout["content"] <= 360


LONG = "cudadent42@" + "feature/ping-pong-with-a-long-name-" * 6


@pytest.mark.parametrize("width", [320, 390])
def test_no_page_of_a_run_cuts_its_headline_on_a_phone(
    make,  # type: ignore[no-untyped-def]
    tmp_path_factory: pytest.TempPathFactory,
    width: int,
) -> None:
    rivals = ("flash_attn", "flashinfer", "xformers", LONG + "-and-back")
    run = make(
        implementations=("pytorch@0123abcd", LONG, *rivals), names=("tiny", "x" * 90), dtypes=("bf16",)
    )
    report.write_run(run)
    layout = look(run.path, width, tmp_path_factory.mktemp("profile"))
    assert layout["content"] <= width
    assert layout["cut"] == layout["outside"] == 0
    assert layout["inside"]


def test_a_history_fits_a_phone(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    numbers = (1.5, 1.4, 1.6, "faster", 1.0)
    points = [
        Point(
            *(f"r{day}", f"2026-01-{day:02d}T00:00:00.000+00:00", "runs/" + "a" * 120, "abc", "GPU " * 20),
            *("dev=GPU A", "call", "warm", "{}", "x" * 80, "bf16", LONG, "pytorch", *numbers),
        )
        for day in range(1, 9)
    ]
    (tmp_path / "history.html").write_text(history.page(tracks(points), "x" * 80), encoding="utf-8")
    layout = look(tmp_path, 320, tmp_path_factory.mktemp("profile"), page="history.html")
    assert layout["content"] <= 320
    assert layout["cut"] == layout["outside"] == 0


def test_a_session_fits_a_phone_and_looks_like_a_run(
    small: RunFolder, tmp_path_factory: pytest.TempPathFactory
) -> None:
    chosen = protocol.load("default")[0]
    name = chosen.checkpoints[0].name
    begin = Started(1, "0", "x" * 90, chosen, Settings("default", "race", budget_minutes=80.0), "c0", "b0")
    events = (
        begin,
        WorkStarted(name, "runs/" + "y" * 90, None),
        WorkEnded(WorkOutcome.FINISHED, "", 9, True, 1.5, 1.4, 1.6, "faster"),
        Noted("z" * 300),
    )
    entries = [
        Entry(number, Instant(f"2026-01-01T00:0{number}:00+00:00", 60.0 * number, "0", "host"), event)
        for number, event in enumerate(events)
    ]
    (small.path / "session.html").write_text(session_html.render(SessionView("x" * 90, replay(entries))))
    report.write_run(small)
    profile = tmp_path_factory.mktemp("profile")
    layout = look(small.path, 320, profile, page="session.html")
    assert layout["content"] <= 320
    assert layout["cut"] == 0
    run = look(small.path, 320, profile)
    assert (layout["background"], layout["font"]) == (run["background"], run["font"])


def test_dark_and_light_differ(small: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> None:
    report.write_run(small)
    light = look(
        small.path, 800, tmp_path_factory.mktemp("profile"), "--blink-settings=preferredColorScheme=1"
    )
    dark = look(
        small.path, 800, tmp_path_factory.mktemp("profile"), "--blink-settings=preferredColorScheme=0"
    )
    assert light["background"] == "rgb(255, 255, 255)"
    assert dark["background"] == "rgb(20, 23, 27)"
    assert light["ink"] != dark["ink"]


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize(
    "blocks",
    [
        pytest.param(5, marks=pytest.mark.slow),
        25,
        pytest.param(108, marks=pytest.mark.slow),
        pytest.param(400, marks=pytest.mark.slow),
    ],
)
def test_every_figure_is_drawn_whatever_the_number_of_blocks(
    make,  # type: ignore[no-untyped-def]
    tmp_path_factory: pytest.TempPathFactory,
    blocks: int,
    width: int,
) -> None:
    """From 64 blocks on, "The samples" had one dot of 990: lines of no length had been simplified away."""
    names, implementations = ("tiny", "large", "heads8-2048"), ("pytorch", "cudadent42", "flash_attn")
    run = make(repeats=blocks, names=names, dtypes=("bf16",), implementations=implementations)
    report.write_run(run)
    layout = look(run.path, width, tmp_path_factory.mktemp("profile"), figures=True)
    assert layout["content"] <= width
    assert layout["cut"] == layout["outside"] == 0
    figures = {each["name"].partition("-")[0]: each for each in layout["figures"]}
    panels = [f"s{number}" for number in range(len(names))]
    assert {"speedup", "control", "roofline", "errors", *panels} == figures.keys()
    for name, figure in figures.items():
        assert figure["marks"] > 3, name
        assert figure["ink"] > 300, name
        assert figure["stray"] == [], name
    for name in panels:
        assert figures[name]["dots"] == blocks * (len(implementations) + 1)  # and the control
        assert figures[name]["ink_of_dots"] > 5 * min(100, figures[name]["dots"])

"""What a terminal is shown: other people's text as it is, and what must be known before a verdict."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest
from rich.console import Console
from rich.table import Table

from cudadent42.commands import tables
from cudadent42.model.records import Comparison, Results, Verdict, VerifiedCase, VerifyReport

STRANGE = ["[/foo]", "[bold]x", "a[/]b", "path[0].py:f", "\\[red]"]


def shown(table: Table) -> str:
    console = Console(file=io.StringIO(), width=400)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def comparison(
    name: str, implementation: str, flagged: int = 0, disturbances: tuple[str, ...] = ()
) -> Comparison:
    return Comparison(
        *(name, "fp32", implementation, "pytorch", 2.0, 1.9, 2.1, Verdict.FASTER, 1.0, 2.0, 25, flagged),
        disturbances=disturbances,
    )


def results(
    candidate: str = "ours", noise_floor: float = 0.01, flagged: int = 0, disturbances: tuple[str, ...] = ()
) -> Results:
    return Results(
        "pytorch",
        candidate,
        2.0,
        1.9,
        2.1,
        Verdict.FASTER,
        0.02,
        noise_floor,
        (comparison("one", candidate, flagged, disturbances),),
        others=(comparison("one", f"other{candidate}"),),
    )


@pytest.mark.parametrize("text", STRANGE)
def test_what_looks_like_markup_is_shown_as_it_is(text: str) -> None:
    failed = VerifiedCase(f"case{text}/fp32", text, "random", None, None, None, False, f"raised {text}")
    page = shown(tables.verify_table(VerifyReport((failed,)), everything=False))
    assert f"case{text}/fp32" in page
    assert f"FAILED: raised {text}" in page
    assert "pattern" not in page  # a death has no largest error, nor any other size of one
    page = shown(tables.results_table(results(text), with_control=True))
    assert f"other{text}" in page
    assert f"{text} ms" in shown(tables.results_table(replace(results(text), others=()), with_control=True))


def test_rivals_times_do_not_stand_in_the_candidates_column() -> None:
    page = shown(tables.results_table(results("ours"), with_control=False)).splitlines()
    assert "ours ms" not in page[0] + page[1]
    assert "its ms" in page[0] + page[1]
    rows = [line.split() for line in page if line.strip().startswith("one")]
    assert [row[2] for row in rows] == ["ours", "otherours"]


def test_cautions_name_noise_and_disturbances() -> None:
    assert tables.caution_lines(results()) == []
    assert tables.caution_lines(results(noise_floor=math.nan)) == []
    [noise] = tables.caution_lines(results(noise_floor=0.07))
    assert "the baseline against itself is off by up to 7" in noise
    [disturbed] = tables.caution_lines(results(flagged=9))
    assert disturbed == "9 of 25 paired blocks saw a disturbance"
    [named] = tables.caution_lines(results(flagged=9, disturbances=("throttled", "clock")))
    assert named == "9 of 25 paired blocks saw a disturbance (throttled, clock)"
    assert tables.caution_lines(results(flagged=1)) == []  # few: the report counts them

"""Regions of winners, and the tables that they are written to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import Simulated, setup

from cudadent42.base.errors import UsageError
from cudadent42.base.observer import Quiet
from cudadent42.model import text
from cudadent42.model.cases import is_plain, plain_fields
from cudadent42.operations import definition
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.plan import Choices, make_plan
from cudadent42.registry import registry
from cudadent42.tune.coordinator import Coordinator, Limits
from cudadent42.tune.journal import Setup, TuningJournal
from cudadent42.tune.regions import Cell, areas
from cudadent42.tune.report.page import render
from cudadent42.tune.report.view import view_of
from cudadent42.tune.space import DEFAULT
from cudadent42.tune.state import CaseState, State
from cudadent42.tune.table import entries_of, install, table_text
from flashmoe_science.cuda.device import GPUS
from flashmoe_science.tuned.lookup import TunedEntry
from flashmoe_science.tuned.table import Region, TableEntry, Value, parse_table

ALONG = ("rows", "keys")

cells = st.lists(
    st.tuples(
        st.integers(1, 6),
        st.integers(1, 6),
        st.sampled_from(["bf16", "fp16"]),
        st.sampled_from([DEFAULT, "a", "b"]),
    ),
    max_size=14,
    unique_by=lambda item: item[:3],
).map(
    lambda items: [
        Cell(f"{rows}x{keys}/{dtype}", {"rows": rows, "keys": keys, "dtype": dtype}, winner)
        for rows, keys, dtype, winner in items
    ]
)


@given(cells)
def test_a_region_holds_its_cases_and_none_with_another_outcome(raced: list[Cell]) -> None:
    made = areas(raced, ALONG, DEFAULT)
    assert sorted(case for area in made for case in area.cases) == sorted(
        cell.case for cell in raced if cell.winner != DEFAULT
    )
    for area in made:
        inside = [cell for cell in raced if area.region.holds(cell.fields)]
        assert {cell.winner for cell in inside} == {area.winner}
        assert set(area.cases) <= {cell.case for cell in inside}
        for name, (low, high) in area.region.between.items():
            own = [cell.fields[name] for cell in raced if cell.case in area.cases]
            assert (min(own), max(own)) == (low, high)  # type: ignore[type-var]


@given(cells, st.integers(0, 7), st.integers(0, 7))
def test_at_most_one_winner_is_looked_up_anywhere(raced: list[Cell], rows: int, keys: int) -> None:
    problem = {"rows": rows, "keys": keys, "dtype": "bf16"}
    winners = {area.winner for area in areas(raced, ALONG, DEFAULT) if area.region.holds(problem)}
    assert len(winners) <= 1


def test_neighbours_are_joined_and_a_gap_with_another_winner_is_not_bridged() -> None:
    def line(*winners: str) -> list[Cell]:
        return [
            Cell(str(rows), {"rows": rows, "keys": 8, "dtype": "bf16"}, arm)
            for rows, arm in enumerate(winners, 1)
        ]

    joined = areas(line("a", "a", DEFAULT, "a", "b"), ALONG, DEFAULT)
    assert [(area.winner, area.region.between["rows"]) for area in joined] == [
        ("a", (1, 2)),
        ("a", (4, 4)),
        ("b", (5, 5)),
    ]
    apart = areas(line("a", "a"), (), DEFAULT)
    assert [area.region.same["rows"] for area in apart] == [1, 2]


def test_cases_of_one_problem_that_do_not_agree_have_no_region() -> None:
    """As of a suite that has it under two names: what one said is not installed against the other."""
    problem: dict[str, Value] = {"rows": 1, "keys": 8, "dtype": "bf16"}
    other = Cell("c", {**problem, "rows": 2}, "a")
    for outcome in (DEFAULT, "b"):
        made = areas([Cell("x", problem, "a"), Cell("y", problem, outcome), other], ALONG, DEFAULT)
        assert [area.cases for area in made] == [("c",)]
    assert len(areas([Cell("x", problem, "a"), Cell("y", problem, "a")], ALONG, DEFAULT)) == 1


def test_a_cases_fields_are_all_but_its_name() -> None:
    case = AttentionCase("n", "bf16", 1, 2, 2, 3, 4, 8, causal=True)
    assert is_plain(case)
    assert not is_plain(replace(case, query_strides=(48, 24, 8)))
    assert plain_fields(case) == {
        "dtype": "bf16",
        "batch": 1,
        "num_heads": 2,
        "num_kv_heads": 2,
        "seqlen_q": 3,
        "seqlen_k": 4,
        "head_dim": 8,
        "causal": True,
    }


@pytest.mark.parametrize("suite", ["hopper", "small", "decode", "moe"])
def test_the_call_of_a_case_lies_in_the_region_of_that_case(
    suite: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A region names every field of a case: one that a call's problem lacked would keep each entry from being used."""
    asked: list[Mapping[str, Value]] = []

    def lookup(*arguments: Any) -> Iterator[TunedEntry]:
        asked.append(arguments[-1])
        return iter(())

    monkeypatch.setattr("flashmoe_science.cuda.choice.lookup", lookup)
    for case in make_plan(Choices(suite=suite), "cuda:0", registry).cases:
        definition(case.operation).configured("cudadent42", case, GPUS["H200"])
        assert Region(plain_fields(case), {}).holds(asked[-1]), case.id


words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
values = st.one_of(st.integers(-(2**40), 2**40), st.booleans(), words)


@given(
    words, words, st.dictionaries(words, values, max_size=3),
    st.dictionaries(words, st.tuples(st.integers(0, 9), st.integers(10, 99)), max_size=3), st.floats(1.01, 9.0),
)  # fmt: skip
def test_a_table_is_read_as_it_was_written(
    kernel: str,
    device: str,
    same: dict[str, int | bool | str],
    between: dict[str, tuple[int, int]],
    low: float,
) -> None:
    entry = TableEntry(
        kernel, "0" * 64, device, 132, Region(same, between), same, low, low, low + 1, ("a", "b"), "f"
    )
    assert parse_table(table_text([entry, entry]), "here") == (entry, entry)


def tuned(folder: Path, gains: dict[str, float], about: Setup | None = None) -> State:
    about = about or setup()
    with TuningJournal(folder, about) as journal:
        return Coordinator(folder, journal, about, Limits(), Quiet()).run(Simulated(gains))


def test_an_entry_quotes_its_least_certain_case_and_new_ones_take_the_place_of_old(tmp_path: Path) -> None:
    about = replace(setup(), kernel="attention.portable", kernel_digest="1" * 64)
    state = tuned(tmp_path / "t", {"BLOCK=3": 0.06}, about)
    tables = tmp_path / "tables"
    table = install(state, tmp_path / "t", tables)
    assert table.entries == parse_table(table.path.read_text(), "here")
    (entry,) = table.entries
    assert entry.region.between == {"seqlen_q": (64, 512), "seqlen_k": (64, 512)}
    assert entry.low == min(round(each.low, 4) for each in state.winners)
    assert [path.split("/")[1] for path in entry.evidence] == ["confirmed", "confirmed"]
    # Raced again with another winner, and once more for other sources: what was there makes room.
    other = install(tuned(tmp_path / "u", {"BLOCK=5": 0.07}, about), tmp_path / "u", tables)
    assert [each.settings for each in parse_table(other.path.read_text(), "here")] == [{"BLOCK": 5}]
    elsewhere = tuple(replace(case, num_heads=4, num_kv_heads=4) for case in about.plan.cases)
    more = replace(about, plan=replace(about.plan, cases=elsewhere))
    install(tuned(tmp_path / "v", {"BLOCK=1": 0.07}, more), tmp_path / "v", tables)
    assert [each.settings for each in parse_table(other.path.read_text(), "here")] == [
        {"BLOCK": 1},
        {"BLOCK": 5},
    ]


def test_what_a_budget_kept_from_its_end_leaves_the_table_as_it_is(tmp_path: Path) -> None:
    about = replace(setup(), kernel="attention.portable", kernel_digest="1" * 64, regions=())
    tables = tmp_path / "tables"
    install(tuned(tmp_path / "t", {"BLOCK=3": 0.06}, about), tmp_path / "t", tables)
    again = tuned(tmp_path / "u", {"BLOCK=5": 0.07}, about)
    short, long = (case.id for case in about.plan.cases)
    half = replace(again, cases={short: again.cases[short], long: CaseState(long)})
    table = install(half, tmp_path / "u", tables)
    now = parse_table(table.path.read_text(), "here")
    assert [(each.region.same["seqlen_q"], each.settings) for each in now] == [
        (64, {"BLOCK": 5}),
        (512, {"BLOCK": 3}),
    ]


@pytest.mark.parametrize("garbage", [b"\x8e\xff", b"schema_version = 9", b"["])
def test_a_table_that_cannot_be_read_is_left_as_it_is(tmp_path: Path, garbage: bytes) -> None:
    about = replace(setup(), kernel="attention.portable", kernel_digest="1" * 64)
    state = tuned(tmp_path / "t", {"BLOCK=3": 0.06}, about)
    table = install(state, tmp_path / "t", tmp_path / "tables").path
    table.write_bytes(garbage)
    with pytest.raises(UsageError, match="mend or remove the table"):
        install(state, tmp_path / "t", tmp_path / "tables")
    assert table.read_bytes() == garbage


def test_equal_settings_with_another_launch_are_another_file_in_the_tables(tmp_path: Path) -> None:
    """The former entry's file would say a launch that its race did not have."""
    kernel = tmp_path / "arm.toml"
    about = replace(setup(), kernel="file:k", kernel_digest="1" * 64)
    about = replace(about, arms={**dict.fromkeys(about.arms, str(kernel)), DEFAULT: about.arms[DEFAULT]})
    elsewhere = tuple(replace(case, num_heads=4, num_kv_heads=4) for case in about.plan.cases)
    other = replace(about, plan=replace(about.plan, cases=elsewhere))
    for name, setting, launch in (("t", about, "threads = 64"), ("u", other, "threads = 128")):
        kernel.write_text(launch)
        table = install(
            tuned(tmp_path / name, {"BLOCK=3": 0.06}, setting), tmp_path / name, tmp_path / "tables"
        )
    files = [
        table.path.parent / "kernels" / each.file for each in parse_table(table.path.read_text(), "here")
    ]
    assert [each.read_text() for each in files] == ["threads = 128", "threads = 64"]


def test_nothing_confirmed_is_nothing_to_install(tmp_path: Path) -> None:
    state = tuned(tmp_path / "t", {})
    assert entries_of(state, "t") == ()
    with pytest.raises(UsageError, match="nothing to install"):
        install(state, tmp_path / "t", tmp_path / "tables")


@pytest.mark.parametrize("digest", ["../../../../", "0", "A" * 64, "1" * 63 + "/"])
def test_a_tuning_from_elsewhere_writes_nothing_beside_the_tables(tmp_path: Path, digest: str) -> None:
    """Its digest becomes part of a file's name."""
    kernel = tmp_path / "kernel.toml"
    kernel.write_text("x")
    about = replace(setup(), kernel="file:k", kernel_digest=digest)
    about = replace(about, arms={**dict.fromkeys(about.arms, str(kernel)), DEFAULT: about.arms[DEFAULT]})
    state = tuned(tmp_path / "t", {"BLOCK=3": 0.06}, about)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match=r"kernel_digest is .*; expected a SHA-256"):
        install(state, tmp_path / "t", tmp_path / "a/b/tables")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path), os.mkdir])
def test_a_tuning_whose_kernel_is_no_file_is_not_installed(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    kernel = tmp_path / "kernel.toml"
    make(kernel)
    about = replace(setup(), kernel="file:k", kernel_digest="1" * 64)
    about = replace(about, arms={**dict.fromkeys(about.arms, str(kernel)), DEFAULT: about.arms[DEFAULT]})
    state = tuned(tmp_path / "t", {"BLOCK=3": 0.06}, about)
    with pytest.raises(UsageError, match=r"kernel\.toml, a kernel of the tuning, cannot be read"):
        install(state, tmp_path / "t", tmp_path / "tables")
    assert not list((tmp_path / "tables").rglob("*.toml"))


def test_the_report_says_who_left_why_and_what_was_not_separated(tmp_path: Path) -> None:
    gains = {"BLOCK=3": 0.06, "BLOCK=4": 0.0599, "BLOCK=5": -0.3, "BLOCK=6": -0.3}
    state = tuned(tmp_path / "t", gains)
    view = view_of(tmp_path / "t", state)
    assert view.headline.startswith("Faster than the default in 2 of 2 cases")
    left = {(row[0], row[1]): row[4] for row in view.departures}
    assert left["short/fp32", "BLOCK=5"] == "not faster than the default by the margin"
    assert all(row.outcome.startswith("confirmed") or "not confirmed" in row.outcome for row in view.cases)
    near = {row.near for row in view.cases}
    assert near <= {"BLOCK=3", "BLOCK=4", ""} or all("BLOCK=3" in text or "BLOCK=4" in text for text in near)
    page = render(tmp_path / "t", state)
    for words_of_the_page in ("Who left when, and why", "BLOCK=5", "Regions that would be installed", "<svg"):
        assert words_of_the_page in page


def test_the_ratio_of_a_region_is_that_of_its_least_certain_case(tmp_path: Path) -> None:
    """In the table of regions and in their picture, as in what would be installed."""
    about = setup()
    state = tuned(tmp_path / "t", {"BLOCK=3": 0.06}, about)
    (entry,) = entries_of(state, "t")
    ((number, arm, where, ratio, interval, cases),) = view_of(tmp_path / "t", state).regions
    assert (number, arm, cases) == ("1", "BLOCK=3", "short/fp32, long/fp32")
    assert "seqlen_q 64 to 512" in where
    assert (ratio, interval) == (text.ratio(entry.ratio), text.interval(entry.low, entry.high))
    page = render(tmp_path / "t", state)
    assert "What is installed against the default, by region" in page
    assert ">1: BLOCK=3<" in page


def test_a_slice_of_two_parameters_is_drawn(tmp_path: Path) -> None:
    about = setup(arms=6)
    grid = {name: {"M": 16 * (n % 3 + 1), "W": 2 + n // 3} for n, name in enumerate(about.settings)}
    state = tuned(tmp_path / "t", {"BLOCK=3": 0.06}, replace(about, settings=grid))
    page = render(tmp_path / "t", state)
    assert "ratio to the default by M and W" in page
    assert page.count("<svg") == 3 + len(state.cases)


def test_a_tuning_that_goes_on_has_a_report(tmp_path: Path) -> None:
    about = setup()
    with TuningJournal(tmp_path / "t", about):
        pass
    page = render(tmp_path / "t", State(about, cases={}))
    assert "0 of 0 cases finished" in page

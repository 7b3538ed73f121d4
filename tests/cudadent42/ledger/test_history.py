"""A case over time, from real run folders to the picture."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudadent42 import ledger
from cudadent42.ledger import queries
from cudadent42.ledger.database import connect
from cudadent42.model.history import Point, tracks
from cudadent42.stages.report.figures.history import MOST_PANELS, history
from cudadent42.stages.report.history import page

MakeRun = Callable[..., Path]

POINT = Point(
    *("r0", "2026-01-01T00:00:00.000+00:00", "runs/a", "abc", "GPU A", "dev=GPU A", "call", "warm", "{}"),
    *("one", "bf16", "ours", "pytorch", 1.5, 1.4, 1.6, "faster", 1.0),
)


def at(number: int, **changes: object) -> Point:
    started = f"2026-01-{number + 1:02d}T00:00:00.000+00:00"
    return replace(POINT, run=f"r{number}", started=started, **changes)  # type: ignore[arg-type]


@pytest.fixture
def file(make_run: MakeRun, tmp_path: Path) -> Path:
    """Four runs: three revisions on one machine, then one on another."""
    file = tmp_path / "ledger.sqlite"
    for number, (speedup, machine) in enumerate(
        [(1.0, "GPU A"), (1.2, "GPU A"), (1.1, "GPU A"), (2.5, "GPU B")]
    ):
        folder = tmp_path / "runs" / str(number)
        make_run(folder, seed=number, machine=machine, revision=f"{number}" * 40, speedup=speedup)
        assert ledger.record(folder, str(file)) is None
    return file


def test_the_points_of_a_case_in_the_order_of_time(file: Path) -> None:
    points = connect(file).read(lambda connection: queries.history(connection, "tiny", "fp16", None))
    (track,) = tracks(points)
    assert [point.speedup for point in track.points] == [1.0, 1.2, 1.1, 2.5]
    assert [point.revision for point in track.points] == ["00000000", "11111111", "22222222", "33333333"]
    assert track.changes == (3,)
    assert connect(file).read(queries.known_cases) == [("tiny", 4)]


def test_dtypes_and_other_implementations(file: Path) -> None:
    read = connect(file).read
    assert len(tracks(read(lambda connection: queries.history(connection, "tiny", None, None)))) == 2
    control = read(lambda connection: queries.history(connection, "tiny", None, "pytorch_control"))
    assert {point.speedup for point in control} == {1.0}
    assert read(lambda connection: queries.history(connection, "no such", None, None)) == []


@pytest.mark.parametrize(
    "change",
    [
        {"shape": '{"batch": 2}'},
        {"dtype": "fp16"},
        {"implementation": "x"},
        {"baseline": "x"},
        {"timer": "graph"},
    ],
)
def test_what_cannot_be_compared_is_kept_apart(change: dict[str, str]) -> None:
    all_tracks = tracks([at(0), at(1, **change), at(2)])
    assert [[point.run for point in track.points] for track in all_tracks] == [["r0", "r2"], ["r1"]]


@given(st.lists(st.sampled_from(["A", "B", "C"]), min_size=1, max_size=20), st.randoms())
def test_every_change_of_machine_is_marked(machines: list[str], random: object) -> None:
    points = [at(number, machine=machine) for number, machine in enumerate(machines)]
    random.shuffle(points)  # type: ignore[attr-defined]
    (track,) = tracks(points)
    assert [point.machine for point in track.points] == machines
    assert list(track.changes) == [i for i in range(1, len(machines)) if machines[i] != machines[i - 1]]


def test_the_picture_has_every_run_and_every_machine(file: Path) -> None:
    all_tracks = tracks(
        connect(file).read(lambda connection: queries.history(connection, "tiny", "fp16", None))
    )
    drawn = history(all_tracks, "tiny")
    root = ElementTree.fromstring(drawn)
    words = "".join(root.itertext())
    for expected in ("GPU A", "GPU B", "00000000", "33333333", "2.5", "1×"):
        assert expected in words
    tips = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title") if element.text]
    assert sum("on GPU A" in tip for tip in tips) == 3
    assert "stroke-dasharray" in drawn


def test_a_machines_name_is_whole_where_there_is_room_and_short_where_not() -> None:
    name = "NVIDIA H200 NVL"
    words = "".join(ElementTree.fromstring(history(tracks([at(0, machine=name)]), "one")).itertext())
    assert words.count(name) == 2  # above its runs, and in the tooltip
    crowded = [
        replace(POINT, run=f"r{i}", started=f"2026-01-01T{i // 60:02d}:{i % 60:02d}+00:00", machine=machine)
        for i, machine in enumerate(["A", name, "B", *["C"] * 200])
    ]
    assert "…" in "".join(ElementTree.fromstring(history(tracks(crowded), "one")).itertext())


def test_a_page_draws_the_longest_tracks_and_lists_all() -> None:
    """Each race of two versions is a track of its own."""
    points = [at(i % 28, implementation=f"race-{i}") for i in range(40)]
    drawn = page(tracks([at(0), at(1), *points]), "one")
    assert drawn.count("<table") == 41
    assert drawn.count('<h2 id="h-track-') == 41
    assert drawn.count("against pytorch") == 2 * 41 + MOST_PANELS  # heading, contents; picture
    assert "The 12 longest of 41 tracks are drawn." in drawn


def test_names_are_text_and_not_markup() -> None:
    evil = "<script>alert(1)</script>"
    all_tracks = tracks([at(0, machine=evil, revision=evil, path=evil), at(1, verdict="undecided")])
    document = page(all_tracks, evil)
    assert "<script>" not in document
    assert "&lt;script&gt;" in document
    assert "Content-Security-Policy" in document


def test_a_single_run_and_very_many() -> None:
    for count in (1, 300):
        points = [
            replace(POINT, run=str(i), started=f"2026-01-01T00:{i // 60:02d}:{i % 60:02d}+00:00")
            for i in range(count)
        ]
        ElementTree.fromstring(history(tracks(points), "one"))


def test_a_kernel_of_ones_own_has_its_own_revision(make_run: MakeRun, tmp_path: Path) -> None:
    """Not that of the lab: the kernel changes while the lab stays."""
    file = tmp_path / "ledger.sqlite"
    for number, digest in enumerate(("a" * 64, "b" * 64)):
        folder = make_run(tmp_path / str(number), seed=number)
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["sources"] = {"cudadent42": {"digest": digest}}
        (folder / "manifest.json").write_text(json.dumps(manifest))
        assert ledger.record(folder, str(file)) is None
    read = connect(file).read
    points = read(lambda connection: queries.history(connection, "tiny", "fp16", None))
    assert [point.revision for point in points] == ["file aaaaaaaa", "file bbbbbbbb"]
    control = read(lambda connection: queries.history(connection, "tiny", None, "pytorch_control"))
    assert {point.revision for point in control} == {"01234567"}


def test_classes_of_one_processor_are_machines_of_their_own(make_run: MakeRun, tmp_path: Path) -> None:
    """A ratio on AVX2 says nothing about AVX-512, nor one on AMX about a container that refuses it."""
    file, widest = tmp_path / "ledger.sqlite", "avx2 fma f16c avx512f avx512_bf16"
    runs = (
        ({}, widest),
        ({"FLASHMOE_CPU_ISA": "avx2"}, widest),
        ({}, f"{widest} amx_bf16"),
        ({"FLASHMOE_CPU_ISA": "amx"}, f"{widest} amx_bf16"),
    )
    for number, (environment, features) in enumerate(runs):
        folder = make_run(tmp_path / str(number), seed=number)
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["environment"] |= environment
        manifest["machine"]["facts"]["cpu_features"] = features
        manifest["started"] = f"2026-01-01T00:00:0{number}+00:00"
        (folder / "manifest.json").write_text(json.dumps(manifest))
        assert ledger.record(folder, str(file)) is None
    (track,) = tracks(
        connect(file).read(lambda connection: queries.history(connection, "tiny", "fp16", None))
    )
    assert [point.machine for point in track.points] == [
        "CPU A with AVX512-BF16",
        "CPU A, held to AVX2",
        "CPU A with AMX",
        "CPU A, held to AMX",
    ]
    assert track.changes == (1, 2, 3)

"""Run folders and sessions that somebody made or changed: each is left out with a line."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from ledger_files import MakeRun

from cudadent42 import ledger
from cudadent42.base.shown import MOST_LETTERS


def nested(folder: Path) -> None:
    text = json.loads((folder / "manifest.json").read_text())
    text["machine"]["facts"]["deep"] = "HERE"
    deep = "[" * 100_000 + "]" * 100_000
    (folder / "manifest.json").write_text(json.dumps(text).replace('"HERE"', deep))


def nested_a_thousand_deep(folder: Path) -> None:
    text = json.loads((folder / "manifest.json").read_text())
    text["machine"]["facts"]["deep"] = "HERE"
    (folder / "manifest.json").write_text(json.dumps(text).replace('"HERE"', "[" * 900 + "]" * 900))


def huge_numbers(folder: Path) -> None:
    text = (folder / "results.json").read_text()
    (folder / "results.json").write_text(text.replace("1.9", "1e308"))


def huge_integer(folder: Path) -> None:
    text = (folder / "results.json").read_text()
    (folder / "results.json").write_text(text.replace('"blocks": 5', '"blocks": 1' + "0" * 400))


def huge_latency(folder: Path) -> None:
    text = (folder / "samples.csv").read_text()
    (folder / "samples.csv").write_text(text.replace("4.0", "1e300"))


def long_field(folder: Path) -> None:
    with (folder / "samples.csv").open("a") as file:
        file.write("x" * 200_000 + "\n")


def long_number(folder: Path) -> None:
    text = (folder / "samples.csv").read_text()
    (folder / "samples.csv").write_text(text.replace("4.0", "x" * 5000))


def sparse(folder: Path) -> None:
    os.truncate(folder / "samples.csv", 200 << 30)


def pipe(folder: Path) -> None:
    (folder / "results.json").unlink()
    os.mkfifo(folder / "results.json")


def not_text(folder: Path) -> None:
    (folder / "verify.json").write_bytes(b"\xff\xfe" * 100)


@pytest.mark.parametrize(
    "damage",
    [
        *(nested, nested_a_thousand_deep, huge_numbers, huge_integer, huge_latency),
        *(long_field, long_number, sparse, pipe, not_text),
    ],
)
def test_one_bad_folder_is_skipped_with_a_line(
    make_run: MakeRun, tmp_path: Path, file: Path, damage: Callable[[Path], None]
) -> None:
    make_run(tmp_path / "runs" / "good", seed=1)
    bad = make_run(tmp_path / "runs" / "bad", seed=2)
    damage(bad)
    done = ledger.rebuild(str(file), [tmp_path / "runs"])
    assert done.runs == 1
    [problem] = done.problems
    assert str(bad) in problem
    assert len(problem) <= MOST_LETTERS


def test_a_session_of_impossible_times_is_skipped_with_a_line(
    make_run: MakeRun, tmp_path: Path, file: Path
) -> None:
    make_run(tmp_path / "runs" / "good")
    session = tmp_path / "runs" / "session"
    session.mkdir()
    first = {"number": 0, "time": "2026-01-01T00:00:00+00:00", "uptime_s": 1e300, "boot": "", "host": ""}
    started = {"protocol": {"checkpoints": []}, "settings": {"rate": "local"}}
    line = json.dumps({**first, "event": "Started", "data": started})
    (session / "events.jsonl").write_text(line + "\n" + "[" * 100_000 + "\n")
    done = ledger.rebuild(str(file), [tmp_path / "runs"])
    assert (done.runs, done.sessions, len(done.problems)) == (1, 0, 1)


def test_folders_1500_deep(make_run: MakeRun, tmp_path: Path, file: Path) -> None:
    make_run(tmp_path / "runs" / "good")
    before = Path.cwd()
    try:
        os.chdir(tmp_path / "runs")
        for _ in range(1500):  # longer than any path may be
            os.mkdir("deep")
            os.chdir("deep")
        assert ledger.rebuild(str(file), [tmp_path / "runs"]).runs == 1
    finally:
        os.chdir(before)
        subprocess.run(["rm", "-rf", str(tmp_path / "runs")], check=True)

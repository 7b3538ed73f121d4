"""Shares of the races on a busy machine, and what is counted as a false word."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def busy() -> Any:
    sys.path.append(str(BENCHMARKS))
    try:
        import busy as module
    finally:
        sys.path.remove(str(BENCHMARKS))
    return module


@given(count=st.integers(0, 1000), parts=st.integers(1, 64))
def test_shares_are_even_and_add_up(busy: Any, count: int, parts: int) -> None:
    shares = [busy.part_of(count, index, parts) for index in range(1, parts + 1)]
    assert sum(shares) == count
    assert max(shares) - min(shares) <= 1


def row(kind: str, verdict: str, load: int = 1) -> dict[str, Any]:
    return {
        **{"kind": kind, "load": load, "timer": "cpu", "verdict": verdict, "refused": None, "seconds": 1.0},
        **{"speedup": 1.0, "cases": {"short": verdict, "long": "undecided"}, "refused_cases": []},
    }


@pytest.mark.parametrize(
    ("kind", "false"),
    [
        ("same", ("faster", "slower")),
        ("same-call", ("faster", "slower")),
        ("slower", ("faster", "equal")),
        ("slower-call", ("faster", "equal")),
        ("truth", ("faster", "equal")),
    ],
)
def test_which_words_are_false(busy: Any, kind: str, false: tuple[str, ...]) -> None:
    for word in ("faster", "slower", "equal", "undecided"):
        (counted,) = busy.summary([row(kind, word), row(kind, word)]).values()
        assert counted["races"] == 2
        assert counted["false_share"] == float(word in false)
        assert counted["false_share_of_cases"] == float(word in false) / 2


def test_shares_of_one_machine_become_one(busy: Any) -> None:
    about = {"blocks": 25, "revision": "abc", "machine": "a", "date": "2026-01-01"}
    shares = [{**about, "rows": [row("same", "equal")]}, {**about, "rows": [row("same", "slower")] * 3}]
    together = busy.merged(shares)
    assert [each["verdict"] for each in together["rows"]] == ["equal", "slower", "slower", "slower"]
    assert together["shares"] == 2
    with pytest.raises(SystemExit, match="differ in machine"):
        busy.merged([shares[0], {**shares[1], "machine": "b"}])


@pytest.mark.parametrize(
    "wrong", ["--races=nope=3", "--races=same", "--share=0/2", "--share=3/2", "--share=a"]
)
def test_wrong_shares_and_counts_are_refused(wrong: str, tmp_path: Path) -> None:
    command = [sys.executable, BENCHMARKS / "busy.py", "--output", tmp_path / "out", wrong]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "expected" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_share_keeps_to_its_processors_and_is_merged(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    program = [sys.executable, str(BENCHMARKS / "busy.py"), "--output"]
    options = ["--races", "same=2", "--loads", "1", "--no-truth", "--share", "2/2", "--cores", str(core)]
    subprocess.run([*program, tmp_path / "a", *options], check=True)
    subprocess.run([*program, tmp_path / "all", "--merge", tmp_path / "a"], check=True)
    whole = json.loads((tmp_path / "all" / "busy.json").read_text())
    assert [(each["kind"], each["load"]) for each in whole["rows"]] == [("same", 1)]
    assert whole["rows"][0]["timer"] == "cpu"  # of one processor, with a load of one, half is to be had
    assert whole["summary"]["1 per processor, same"]["races"] == 1

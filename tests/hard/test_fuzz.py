"""A few of the cases that a nightly run has thousands of; the full counts: python tests/hard/fuzz.py."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy")

FUZZ = Path(__file__).with_name("fuzz.py")


@pytest.mark.parametrize("kind", ["options", "files", "folders"])
def test_no_crash_no_traceback_no_control_character_no_long_message(kind: str, tmp_path: Path) -> None:
    output = tmp_path / "fuzzed.json"
    command = [sys.executable, str(FUZZ), kind, "--seed", "1000000", "--count", "12", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(output.read_text())
    assert document["count"] == 12
    assert sum(document["exit_codes"].values()) == 12
    assert set(document["faults"].values()) == {0}


def test_faults_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the fuzzers look for, on what a command might have said."""
    monkeypatch.syspath_prepend(str(FUZZ.parent))
    import forked

    def seen(code: int, out: str, err: str, *arguments: str) -> list[str]:
        return forked.faults(forked.Ended(arguments, code, out, err, 0.0))

    assert seen(2, "", "error: x\n") == []
    assert seen(70, "", "error: x\n") == ["crash: exit code 70"]
    assert seen(-11, "", "") == ["crash: exit code -11"]
    assert seen(1, "", "Traceback (most recent call last):\n") == ["traceback"]
    assert seen(2, "\x1b[2J", "") == ["control character"]
    assert seen(2, "", "\u202e") == ["control character"]
    assert seen(2, "", "x" * 2100) == ["long message"]
    assert seen(2, "", "error: x\n", "--json") == ["no document"]
    assert seen(2, "{}\n", "error: x\n", "--json") == []


def test_damage_of_one_case_is_not_seen_in_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a seed alone shows a fault again; and what is put into itself cannot be written."""
    monkeypatch.syspath_prepend(str(FUZZ.parent))
    import hostile

    values = copy.deepcopy(hostile.VALUES)
    content = b'{"a": [{}], "b": {"c": [[], {}]}}'
    first = [hostile.damage_json(content, random.Random(seed)) for seed in range(2000)]
    assert repr(hostile.VALUES) == repr(values)
    assert [hostile.damage_json(content, random.Random(seed)) for seed in range(2000)] == first


@pytest.mark.parametrize("kind", ["options", "files", "folders"])
def test_the_nightly_script_can_call_it(kind: str) -> None:
    command = [sys.executable, str(FUZZ.with_name(f"fuzz_{kind}.py")), "2000000", "2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"done": 2}
    assert [line for line in done.stderr.splitlines() if line.startswith("seed ")] == [
        "seed 2000000",
        "seed 2000001",
    ]

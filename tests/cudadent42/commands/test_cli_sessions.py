"""``session`` and ``patterns`` as a user has them: real processes, a real run of a small suite."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape

ROOT = Path(__file__).resolve().parents[3]
RECORDED = Path(__file__).parents[1] / "patterns" / "recorded"

SUITE = """
name = "unit"
dtypes = ["fp32"]
repeats = 6
warmup = 0
case = [{ name = "one", batch = 1, num_heads = 1, seqlen = 64, head_dim = 32 }]
"""

KERNEL = """
from torch.nn.functional import scaled_dot_product_attention

TIMES = 4


def attention(query, key, value, *, causal, softmax_scale):
    if causal or query.shape[1] != key.shape[1] or query.shape[3] != 32:
        raise NotImplementedError("only the case of this test")
    for _ in range(TIMES):
        out = scaled_dot_product_attention(query, key, value, scale=softmax_scale)
    return out


attention.peer_of = "PyTorch"
"""

PROTOCOL = """
schema_version = 1
name = "unit"

[[checkpoint]]
name = "baseline"
work = "measure"
minutes = 60
gates = "session-baseline"

[[checkpoint]]
name = "fix"
work = "change"
minutes = 60
gates = "./gates.toml"

[[checkpoint]]
name = "document"
work = "document"
minutes = 1
"""

GATES = """
schema_version = 1

[[gate]]
name = "beyond hope"
metric = "not_timed"
at_least = 1000
"""


def cudadent42(folder: Path, *arguments: str, given: str = "", **changes: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "cudadent42", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "COLUMNS": "140"} | changes,
        input=given,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def measured(run: Path) -> tuple[str, str]:
    """Baseline and candidate of a run, which are all that it measured."""
    results = json.loads((run / "results.json").read_text())
    assert results["others"] == []
    return results["baseline"], results["candidate"]


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    git(folder, "init", "-q")
    for name, text in (
        ("mine.py", KERNEL), ("suite.toml", SUITE), ("protocol.toml", PROTOCOL), ("gates.toml", GATES),
    ):  # fmt: skip
        (folder / name).write_text(text)
    git(folder, "add", "-A")
    git(folder, "-c", "user.name=x", "-c", "user.email=x@localhost", "commit", "-qm", "x")
    return folder


def test_a_session_by_a_program(project: Path) -> None:
    start = (
        *("session", "start", "unit", "--protocol", "./protocol.toml", "--suite", "suite.toml"),
        *("--race-suite", "suite.toml", "--implementation", "mine.py:attention", "--device", "cpu"),
        *("--ignore-preflight", "--repeats", "6", "--json"),
    )
    code, out, err = cudadent42(project, *start)
    assert code == 0, err
    assert json.loads(out)["do"] == "cudadent42 session run"
    code, _, err = cudadent42(project, *start)
    assert code == 2
    assert "session abort" in err

    (project / "below").mkdir()
    code, out, err = cudadent42(project / "below", "session", "run", "--json")
    assert code == 0, err
    document = json.loads(out)
    assert document["runs"][0]["samples"] == 18
    assert measured(Path(document["folder"]) / "runs" / "01-baseline") == ("pytorch", "mine.py:attention")
    assert document["do"] == "cudadent42 session next"
    assert cudadent42(project, "session", "next")[0] == 0

    code, _, err = cudadent42(project, "session", "run", "--override", "the cause is known")
    assert code == 2
    assert "nothing changed since the parent" in err
    (project / "mine.py").write_text(KERNEL.replace("TIMES = 4", "TIMES = 1"))
    code, out, err = cudadent42(project, "session", "run", "--override", "the cause is known", "--json")
    assert code == 1, err
    attempt = json.loads(out)["attempts"][0]
    assert (attempt["outcome"], attempt["things"]) == ("failed", 1)
    assert "beyond hope" in attempt["run"]["lines"][0]
    code, out, err = cudadent42(project, "session", "next")
    assert code == 1
    assert "attempt 1 is failed" in err
    code, out, err = cudadent42(project, "session", "run", "--revert")
    assert code == 0, err
    assert (project / "mine.py").read_text() == KERNEL

    assert cudadent42(project, "session", "abort", "--reason", "enough seen")[0] == 0
    status = json.loads(cudadent42(project, "session", "status", "--json")[1])
    assert (status["status"], status["do"]) == ("aborted", "")
    report = Path(cudadent42(project, "session", "report")[1].strip())
    assert "enough seen" in report.read_text()
    code, out, _ = cudadent42(project, "patterns", "match", status["folder"], "--json")
    assert code == 0
    assert isinstance(json.loads(out)["matches"], list)


PROTOCOL_OF_FIVE = """
schema_version = 1
name = "five"
profile_below = 1000

[[checkpoint]]
name = "baseline"
work = "measure"
minutes = 60
gates = "./measured.toml"

[[checkpoint]]
name = "profile"
work = "profile"
minutes = 60

[[checkpoint]]
name = "fix"
work = "change"
minutes = 60
gates = "./measured.toml"

[[checkpoint]]
name = "validate"
work = "measure"
minutes = 60
gates = "./validated.toml"

[[checkpoint]]
name = "document"
work = "document"
minutes = 1
"""

MEASURED = """
schema_version = 1

[[gate]]
name = "right"
metric = "verification"
is = "passed"
on_failure = "stop"
"""

VALIDATED = (
    MEASURED
    + """
[[gate]]
name = "improved"
metric = "session.improvement"
above = 0
"""
)

OWN_CLOCK = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", Path(__file__).parents[1] / "own_clock")))}


@pytest.mark.slow
def test_the_five_checkpoints_on_this_machine(project: Path) -> None:
    """Every stage for real, the diagnosis too, by a clock of their own: a call of PyTorch's attention takes 1 ms."""
    for name, text in (
        ("protocol.toml", PROTOCOL_OF_FIVE), ("measured.toml", MEASURED), ("validated.toml", VALIDATED),
    ):  # fmt: skip
        (project / name).write_text(text)
    start = (
        *("session", "start", "five", "--protocol", "./protocol.toml", "--suite", "suite.toml"),
        *("--race-suite", "suite.toml", "--implementation", "mine.py:attention", "--device", "cpu"),
        *("--ignore-preflight", "--repeats", "8"),
    )
    code, out, err = cudadent42(project, *start, **OWN_CLOCK)
    assert code == 0, err
    folder = Path(out.splitlines()[0])

    def step(*arguments: str) -> dict[str, Any]:
        code, out, err = cudadent42(project, "session", *arguments, "--json", **OWN_CLOCK)
        assert code == 0, err
        document: dict[str, Any] = json.loads(out)
        return document

    step("run")
    assert step("next")["checkpoint"] == "profile"
    said = step("run")["lines"][0]
    assert "Next: " in said
    baseline = folder / "runs" / "01-baseline"
    diagnosis = json.loads((baseline / "diagnosis.json").read_text())
    assert diagnosis["implementation"] == "mine.py:attention"
    assert json.loads((baseline / "profile.json").read_text())["latency_ms"] == pytest.approx(4.0, rel=5e-3)
    assert str(escape(diagnosis["next_step"])) in (baseline / "report.html").read_text()
    assert step("next")["checkpoint"] == "fix"
    (project / "mine.py").write_text(KERNEL.replace("TIMES = 4", "TIMES = 1"))
    assert step("run")["attempts"][0]["outcome"] == "passed"
    assert step("next")["checkpoint"] == "validate"
    validated = Path(step("run")["folder"]) / "runs"
    assert measured(max(validated.iterdir())) == ("pytorch", "mine.py:attention")
    assert step("next")["checkpoint"] == "document"
    step("note", "once is enough")
    assert step("next")["status"] == "finished"
    report = (folder / "report.md").read_text()
    for words in (
        "1 of 1 change passed",
        "once is enough",
        "What limits it",
        "TIMES",
        "baseline",
        "document",
    ):
        assert words in report
    assert said.partition(" ")[0] in report


def test_the_ledger_knows_a_session_as_it_is(project: Path, tmp_path: Path) -> None:
    pytest.importorskip("sqlalchemy")
    ledger = {"CUDADENT42_LEDGER": str(tmp_path / "ledger.sqlite")}

    def minutes() -> float:
        code, out, err = cudadent42(project, "cost", "--json", **ledger)
        assert code == 0, err
        (account,) = json.loads(out)["accounts"]
        assert "-unit" in account["name"]
        return float(account["minutes"])

    start = ("session", "start", "unit", "--protocol", "./protocol.toml", "--suite", "suite.toml")
    race = ("--race-suite", "suite.toml", "--implementation", "mine.py:attention", "--device", "cpu")
    code, _, err = cudadent42(project, *start, *race, "--budget-minutes", "0.01", **ledger)
    assert (code, err) == (0, "")
    begun = minutes()
    while minutes_shown(project) <= 0.01:  # the budget, as it is rounded
        time.sleep(0.01)
    code, _, err = cudadent42(project, "session", "run", **ledger)
    assert code == 1
    assert "minutes are spent" in err
    refused = minutes()
    assert refused > begun
    no_file = {"CUDADENT42_LEDGER": str(tmp_path)}
    code, _, err = cudadent42(project, "session", "note", "not lost", **no_file)
    assert code == 0
    assert "warning: " in err
    assert "is not in the ledger" in err
    assert cudadent42(project, "session", "abort", **ledger)[0] == 0
    shown = minutes_shown(project)
    assert shown > refused
    assert minutes() == pytest.approx(shown, abs=1e-3)


def minutes_shown(project: Path) -> float:
    """Those of the session up to now."""
    return float(json.loads(cudadent42(project, "session", "status", "--json")[1])["minutes"])


def test_a_misspelt_metric_is_refused_before_anything_is_measured(project: Path) -> None:
    (project / "gates.toml").write_text(GATES.replace("not_timed", "not_timd"))
    (project / "below").mkdir()
    start = (
        *("session", "start", "unit", "--protocol", "../protocol.toml", "--suite", "../suite.toml"),
        *("--race-suite", "../suite.toml", "--implementation", "../mine.py:attention", "--device", "cpu"),
    )
    code, _, err = cudadent42(project / "below", *start)
    assert code == 2
    assert "the gates of fix, gate 'beyond hope': unknown metric 'not_timd'" in err
    assert "did you mean 'not_timed'" in err
    assert not list(project.glob("sessions/*-unit*"))
    (project / "gates.toml").write_text(GATES)
    assert cudadent42(project / "below", *start)[0] == 0


def test_wrong_usage_of_a_session(project: Path) -> None:
    code, _, err = cudadent42(project, "session", "status")
    assert code == 2
    assert "session start" in err
    code, _, err = cudadent42(project, "session", "start", "--protocol", "./mine.py.toml")
    assert code == 2
    assert "cannot read the protocol" in err
    code, _, err = cudadent42(project, "session", "run", "--revert", "--keep")
    assert code == 2
    assert "exclude each other" in err


def test_lessons_are_listed_shown_matched_and_added(tmp_path: Path) -> None:
    homes = {"XDG_CONFIG_HOME": str(tmp_path / "config"), "XDG_STATE_HOME": str(tmp_path / "state")}
    code, out, _ = cudadent42(tmp_path, "patterns", "list", "--json", **homes)
    assert code == 0
    lessons = json.loads(out)["lessons"]
    assert len(lessons) >= 9
    code, out, _ = cudadent42(tmp_path, "patterns", "show", "power-limit", **homes)
    assert "power_capped_fraction above 0.25" in out
    code, _, err = cudadent42(tmp_path, "patterns", "show", "power-limits", **homes)
    assert code == 2
    assert "did you mean 'power-limit'" in err

    log = (RECORDED / "logs" / "dlopen.txt").read_text()
    code, out, _ = cudadent42(tmp_path, "patterns", "match", "-", "--json", given=log, **homes)
    assert [item["lesson"]["id"] for item in json.loads(out)["matches"]] == ["one-translation-unit"]
    code, out, _ = cudadent42(tmp_path, "patterns", "match", str(RECORDED / "runs" / "slow"), **homes)
    assert "seen: speedup_geomean = 0.07" in out
    code, out, _ = cudadent42(tmp_path, "patterns", "match", "-", given="all is well", **homes)
    assert (code, out) == (0, "no lesson applies\n")
    assert cudadent42(tmp_path, "patterns", "match", "nothing-here", **homes)[0] == 2

    shipped = ROOT / "src" / "cudadent42" / "patterns" / "data" / "power-limit.toml"
    mine = tmp_path / "mine.toml"
    mine.write_text(shipped.read_text().replace('"power-limit"', '"of-mine"'))
    code, out, _ = cudadent42(tmp_path, "patterns", "add", str(mine), **homes)
    assert code == 0
    assert Path(out.strip()).is_relative_to(tmp_path / "config")
    mine.write_text("schema_version = 1")
    code, _, err = cudadent42(tmp_path, "patterns", "add", str(mine), **homes)
    assert code == 2
    assert "mine.toml" in err


def test_a_command_that_fails_prints_and_counts_its_lesson(tmp_path: Path) -> None:
    homes = {"XDG_STATE_HOME": str(tmp_path / "state"), "HOME": str(tmp_path)}
    for _ in range(2):
        code, _, err = cudadent42(tmp_path, "preflight", PATH="/nonexistent", CXX="", **homes)
        if code == 0:
            pytest.skip("a compiler comes with this Python")
        assert code == 4
        assert "lesson: Something that the build needs is not there" in err
    code, out, _ = cudadent42(tmp_path, "patterns", "list", **homes)
    assert "environment-before-building          2x" in out

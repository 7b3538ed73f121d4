"""``ledger``, ``cost`` and ``history`` as a user has them."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from cudadent42 import ledger
from cudadent42.runs.starts import StartOutcome, mark, request

ROOT = Path(__file__).resolve().parents[3]
MakeRun = Callable[..., Path]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user with nothing in the configuration and state folders."""
    for name in ("CONFIG", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    monkeypatch.delenv("CUDADENT42_LEDGER")
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def cudadent42(*arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "cudadent42", *arguments],
        env=dict(os.environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


def document(*arguments: str) -> dict[str, object]:
    code, out, err = cudadent42(*arguments, "--json")
    assert code == 0, err
    parsed: dict[str, object] = json.loads(out)
    assert parsed["schema_version"] == 1
    return parsed


def test_a_rebuild_that_leaves_rows_of_another_machine_says_where_to_rebuild(
    home: Path, make_run: MakeRun
) -> None:
    make_run(home / "runs" / "a")
    assert cudadent42("ledger", "rebuild")[0] == 0
    with closing(sqlite3.connect(home / "STATE" / "cudadent42" / "ledger.sqlite")) as file, file:
        file.execute("update runs set host = 'far-away'")
        file.execute("alter table timings drop column flagged")
    code, _, err = cudadent42("ledger", "rebuild")
    assert code == 0
    assert "run `cudadent42 ledger rebuild` on far-away" in err
    assert "they stay in timings_kept_" in err
    assert "run `cudadent42 ledger rebuild` on far-away" in cudadent42("ledger", "status")[1]


def test_from_nothing_to_a_bill(home: Path, make_run: MakeRun) -> None:
    for command in (("ledger", "list"), ("ledger", "status"), ("cost",), ("history",)):
        code, _, err = cudadent42(*command)
        assert code == 2
        assert "cudadent42 ledger rebuild" in err
    make_run(home / "runs" / "a")
    make_run(home / "runs" / "b", seed=1)
    rebuilt = document("ledger", "rebuild")["rebuilt"]
    assert (rebuilt["runs"], rebuilt["samples"]) == (2, 40)  # type: ignore[index]
    assert len(document("ledger", "list")["runs"]) == 2  # type: ignore[arg-type]
    assert document("ledger", "status")["contents"]["samples"] == 40  # type: ignore[index]
    total = document("cost")["total"]
    assert (total["attempts"], total["results"], total["verdicts"], total["usd"]) == (2, 2, 2, 0.0)  # type: ignore[index]
    tracks = document("history", "tiny")["tracks"]
    assert {len(track["points"]) for track in tracks} == {2}  # type: ignore[attr-defined]
    for command in (
        ("ledger", "list"),
        ("ledger", "status"),
        ("cost",),
        ("cost", "rates"),
        ("history", "tiny"),
    ):
        code, out, err = cudadent42(*command)
        assert code == 0, err
        assert out.strip()


def test_rented_minutes_cost_what_the_table_says(
    home: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "CONFIG" / "cudadent42").mkdir(parents=True)
    (home / "CONFIG" / "cudadent42" / "rates.toml").write_text(
        'schema_version = 1\n[[rate]]\nname = "mine"\nusd_per_hour = 3600\ndate = 2020-01-01\n'
    )
    monkeypatch.setenv("CUDADENT42_RATE", "mine")
    folder = make_run(home / "runs" / "a")
    manifest = json.loads((folder / "manifest.json").read_text())
    times = {"started": "2026-01-01T00:00:00.000+00:00", "ended": "2026-01-01T00:00:10.000+00:00"}
    (folder / "manifest.json").write_text(json.dumps(manifest | times))
    assert ledger.record(folder) is None
    costs = document("cost")
    assert costs["total"]["usd"] == 10.0  # type: ignore[index]
    assert costs["total"]["usd_per_verdict"] == 10.0  # type: ignore[index]
    assert "days ago" in str(costs["notes"])


def test_advice_from_the_starts_on_record(home: Path, make_run: MakeRun) -> None:
    assumed = document("cost", "advise", "--idle", "1h", "--machine", "gcp-l4")
    assert assumed["advice"]["decision"] == "keep"  # type: ignore[index]
    assert "assumed" in assumed["advice"]["restart"]["basis"]  # type: ignore[index]
    for number in range(4):
        start = request(f"vm-{number}", "gcp-l4")
        mark(start, StartOutcome.FAILED if number == 3 else StartOutcome.READY)
    ledger.record(make_run(home / "runs" / "a"))
    advised = document("cost", "advise", "--idle", "1h", "--machine", "gcp-l4")
    assert advised["advice"]["restart"]["basis"] == "4 starts of gcp-l4 on record, 1 failed"  # type: ignore[index]
    assert advised["advice"]["decision"] == "stop"  # they took no time at all  # type: ignore[index]
    given = ("--restart", "30m", "--failure-rate", "0.5", "--failure-time", "1h", "--engineer", "100")
    code, out, _ = cudadent42("cost", "advise", "--idle", "90m", "--machine", "gcp-l4", *given)
    assert code == 0
    assert "engineer who waits: 90.0 min × $100/h = $150.00" in out
    # A note follows once the rate that the package has is old.
    assert [line for line in out.splitlines() if not line.startswith("note: ")][-1].startswith("keep: saves")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cost", "advise", "--idle", "soon", "--machine", "h100"), "expected a time such as"),
        (("cost", "advise", "--idle", "1h", "--machine", "h1000"), "did you mean 'h100'"),
        (("cost", "advise", "--idle", "1h", "--failure-rate", "1"), "below 1"),
        (("cost", "advise", "--idle", "1h", "--engineer", "nan"), "US dollars per hour"),
        (("cost", "--ledger", "oracel://x/y"), "no database is called"),
        (("history", "tini"), "did you mean 'tiny'"),
        (("history", "tiny", "--output", "x.pdf"), "ends in .html or .svg"),
        (("ledger", "rebuild", "nowhere"), "is not a folder"),
    ],
)
def test_bad_input(home: Path, make_run: MakeRun, arguments: tuple[str, ...], message: str) -> None:
    ledger.record(make_run(home / "runs" / "a"))
    code, _, err = cudadent42(*arguments)
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) <= 3


def test_a_damaged_ledger_and_its_remedy(home: Path, make_run: MakeRun) -> None:
    ledger.record(make_run(home / "runs" / "a"))
    file = home / "STATE" / "cudadent42" / "ledger.sqlite"
    file.write_bytes(b"x" * 5000)
    code, _, err = cudadent42("cost")
    assert code == 2
    assert "cudadent42 ledger rebuild" in err
    code, out, err = cudadent42("ledger", "rebuild")
    assert code == 0, err
    assert "1 runs" in out
    assert "damaged-" in out
    assert cudadent42("ledger", "status")[0] == 0


def test_a_ledger_of_an_older_form_names_its_remedy_once(home: Path, make_run: MakeRun) -> None:
    assert ledger.record(make_run(home / "runs" / "a")) is None
    file = home / "STATE" / "cudadent42" / "ledger.sqlite"
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("UPDATE ledger_meta SET value = '1' WHERE key = 'schema_version'")
        database.execute("ALTER TABLE runs DROP COLUMN host")
    said = ledger.record(make_run(home / "runs" / "b", seed=1))
    assert said is not None
    code, _, err = cudadent42("cost")
    assert code == 2
    for line in (said, err.rstrip("\n")):
        assert "is of an older form (schema 1; this one writes " in line
        assert line.count("cudadent42 ledger rebuild") == 1
        assert "\n" not in line
    code, out, err = cudadent42("ledger", "rebuild")
    assert code == 0, err
    assert "2 runs" in out


def test_a_plot(home: Path, make_run: MakeRun) -> None:
    ledger.record(make_run(home / "runs" / "a"))
    for name in ("x.html", "x.svg"):
        code, out, err = cudadent42("history", "tiny/bf16", "--output", name)
        assert code == 0, err
        assert f"plot: {name}" in out
        assert "<svg" in (home / name).read_text()


def test_a_whole_run_enters_the_ledger(home: Path) -> None:
    """Also one that fails; and a ledger that cannot be written costs it a line."""
    (home / "unit.toml").write_text(
        'name = "unit"\ndtypes = ["fp32"]\nrepeats = 2\nwarmup = 1\nimplementations = ["pytorch", "pytorch_math"]\n'
        'case = [{ name = "one", batch = 1, num_heads = 1, seqlen = 16, head_dim = 32 }]\n'
    )
    arguments = ("bench", "--suite", "unit.toml", "--device", "cpu")
    code, _, err = cudadent42(*arguments)
    assert code == 0, err
    (run,) = document("ledger", "list")["runs"]  # type: ignore[misc]
    assert (run["suite"], run["status"], run["samples"]) == ("unit", "finished", 6)  # type: ignore[index]
    (home / "STATE" / "cudadent42" / "ledger.sqlite").write_bytes(b"x" * 5000)
    code, _, err = cudadent42(*arguments)
    assert code == 0, err
    assert err.count("is not in the ledger") == 1
    assert "cudadent42 ledger rebuild" in err
    assert len(list((home / "runs").iterdir())) == 2

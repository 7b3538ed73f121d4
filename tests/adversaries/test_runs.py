"""Whole runs: how they end, and what is written of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import lab
import pytest

from cudadent42.base.errors import ExitCode, UsageError
from cudadent42.base.observer import Observer
from cudadent42.flows import pipeline
from cudadent42.model.integrity import Breach
from cudadent42.model.records import TimerKind, Verdict
from cudadent42.plan import Choices, RunOptions
from cudadent42.runs.checking import load_checked
from cudadent42.runs.run_folder import RESULTS


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


class Notes:
    """An observer that keeps what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def stage(self, name: str) -> None:
        self.lines.append(name)

    def advance(self, fraction: float, what: str) -> None:
        return

    def note(self, text: str) -> None:
        self.lines.append(text)

    def detail(self, text: str) -> None:
        return


def run(name: str, folder: Path, *, sealed: bool = False) -> tuple[pipeline.Outcome, list[str]]:
    suite = folder / "adversaries.toml"
    suite.write_text(lab.SUITE)
    notes = Notes()
    observer: Observer = notes
    options = RunOptions(
        choices=Choices(suite=str(suite), implementations=(name,), timer=TimerKind.CPU),
        device="cpu",
        ignore_preflight=True,
        output=folder / "run",
        sealed=sealed,
        command=("test",),
    )
    return pipeline.run(options, observer, lambda opened: None), notes.lines


def test_a_cheat_ends_with_its_name_and_no_claim(tmp_path: Path) -> None:
    outcome, lines = run(lab.cheat("baseline_wrapped"), tmp_path)
    assert outcome.exit_code is ExitCode.UNTRUSTED_RESULT
    assert any("replaced function (failed)" in line for line in lines)
    written = json.loads((outcome.folder / RESULTS).read_text())
    assert written["claim_allowed"] is False
    assert "replaced function" in written["claim_reason"]
    assert [each["breach"] for each in written["integrity"]["findings"]][:1] == ["replaced function"]
    page = (outcome.folder / "report.md").read_text()
    assert "no speed of it is a claim" in page
    assert "replaced function" in page


def test_a_sealed_run_audits_whatever_the_result(tmp_path: Path) -> None:
    outcome, lines = run(lab.cheat("hard_coded_shape"), tmp_path, sealed=True)
    assert "audit" in lines
    integrity = outcome.results.integrity
    assert integrity is not None
    assert integrity.sealed
    assert integrity.hidden_checked == 6
    assert Breach.HIDDEN_SHAPE in {each.breach for each in integrity.findings}
    assert outcome.exit_code is ExitCode.UNTRUSTED_RESULT
    assert not outcome.results.claim_allowed


@pytest.mark.slow
def test_an_honest_run_is_sound_and_its_folder_cannot_be_edited(tmp_path: Path) -> None:
    name = lab.candidate(lab.FOLDER / "honest" / "ordinary.py", "plain")
    outcome, _ = run(name, tmp_path, sealed=True)
    integrity = outcome.results.integrity
    assert integrity is not None
    assert integrity.sound
    assert [each.implementation for each in integrity.confirmations] == [name]
    assert outcome.exit_code is ExitCode.PASS
    assert load_checked(outcome.folder).results == outcome.results
    path = outcome.folder / RESULTS
    kept = json.loads(path.read_text())
    for change in (
        {"claim_allowed": not kept["claim_allowed"]},
        {"claim_reason": "because"},
        {"verdict": Verdict.FASTER.value if kept["verdict"] != "faster" else "equal"},
        {"speedup_geomean": 2 * kept["speedup_geomean"]},
    ):
        path.write_text(json.dumps({**kept, **change}))
        with pytest.raises(UsageError, match="does not follow"):
            load_checked(outcome.folder)

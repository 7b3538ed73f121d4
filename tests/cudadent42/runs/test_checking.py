"""Results that were changed by hand are found by everything that decides or reports by them."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cudadent42.base.errors import UsageError
from cudadent42.base.files import write_json
from cudadent42.decisions.claims import with_claim
from cudadent42.decisions.compare import compare
from cudadent42.model.integrity import Integrity
from cudadent42.model.records import MachineReport, Plan, Results, Sample, Verdict
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.runs.checking import load_checked
from cudadent42.runs.run_folder import (
    MANIFEST,
    RESULTS,
    SAMPLES,
    RunStatus,
    RunWriter,
    load_run,
    results_digest,
)
from cudadent42.stages import gates, report
from cudadent42.stages.gates import loader

COMMITTED = sorted((Path(__file__).parents[3] / "benchmarks" / "results").rglob(SAMPLES))
CASES = tuple(AttentionCase(name, "bf16", 1, 1, 1, 64, 64, 64) for name in ("a", "b"))
PLAN = Plan("test", "cpu", CASES, "pytorch", ("pytorch", "ours"), 25, 1, seed=3)
PEAKS = {"fp32_gflops": 500.0}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    folder = tmp_path / "run"
    samples = [
        Sample(case.id, name, block, index, float(random.normal(2.0, 0.01)), 1, math.nan, 0.5)
        for case in CASES
        for block in range(25)
        for index, name in enumerate(("pytorch", "pytorch_control", "ours"))
    ]
    with RunWriter(folder, PLAN, MachineReport((), "", {}), None, ("test",)) as writer:
        for sample in samples:
            writer.append_sample(sample)
        writer.log("skipped", key="nothing", reason="")
        writer.write_results(compare(PLAN, samples, {}, PEAKS))
    return folder


def edit(folder: Path, change: Callable[[Any], object]) -> None:
    path = folder / RESULTS
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def faster(document: Any) -> None:
    document["cases"][0] |= {"speedup": 2.0, "ci_low": 1.9, "ci_high": 2.1, "verdict": "faster"}


EDITS: dict[str, Callable[[Any], object]] = {
    "a case": faster,
    "the headline": lambda document: document.update(speedup_geomean=1.5),
    "a word": lambda document: document.update(verdict="faster"),
    "a latency": lambda document: document["cases"][1].update(latency_ms=1.0),
    "a case that is gone": lambda document: document["cases"].pop(),
    "the floor": lambda document: document.update(noise_floor=0.0),
}


OLD_EDITS: dict[str, Callable[[Any], object]] = {
    "a case": lambda document: document["cases"][0].update(speedup=9.0, ci_low=8.9, ci_high=9.1),
    "the headline": lambda document: document.update(speedup_geomean=9.0),
    "a word": lambda document: document.update(verdict="slower"),
}


def test_a_run_as_it_was_written_is_believed(run: Path) -> None:
    assert load_checked(run).results is not None
    assert gates.judge(loader.load("default"), run).outcomes
    assert report.write(run).html.is_file()


@pytest.mark.parametrize("what", EDITS)
def test_an_edit_is_found(run: Path, what: str) -> None:
    edit(run, EDITS[what])
    with pytest.raises(UsageError, match=r"results.json does not follow from samples.csv: .*and the samples"):
        gates.judge(loader.load("default"), run)
    with pytest.raises(UsageError, match="does not follow"):
        report.write(run)


def test_samples_that_were_edited_are_found(run: Path) -> None:
    lines = (run / SAMPLES).read_text().splitlines()
    lines[5] = lines[5].replace("1.9", "1.1").replace("2.0", "1.2")
    (run / SAMPLES).write_text("\n".join(lines) + "\n")
    with pytest.raises(UsageError, match="does not follow"):
        load_checked(run)


def leave_a_case_out(folder: Path) -> Results:
    return compare(PLAN, load_run(folder).samples, {"b/bf16": "not timed"}, PEAKS)


def lift_a_limit(folder: Path) -> Results:
    return compare(PLAN, load_run(folder).samples, {}, {})


def name_older_rules(folder: Path) -> Results:
    """Whose numbers are only looked at for what samples allow."""
    results = compare(PLAN, load_run(folder).samples, {}, PEAKS)
    return replace(
        results,
        rules=0,
        speedup_geomean=1.03,
        speedup_geomean_ci_low=1.025,
        speedup_geomean_ci_high=1.04,
        verdict=Verdict.FASTER,
    )


def take_a_finding_away(folder: Path) -> Results:
    return with_claim(
        replace(compare(PLAN, load_run(folder).samples, {}, PEAKS), integrity=Integrity()), verified=False
    )


@pytest.mark.parametrize(
    "forge",
    [leave_a_case_out, lift_a_limit, name_older_rules, take_a_finding_away],
    ids=lambda each: each.__name__,
)
def test_an_edit_that_the_samples_allow_is_found(run: Path, forge: Callable[[Path], Results]) -> None:
    """Samples do not say what was left out, what the machine can do, by which rules, or what the checks saw."""
    write_json(run / RESULTS, forge(run))
    for refuse in (lambda: gates.judge(loader.load("default"), run), lambda: report.write(run)):
        with pytest.raises(UsageError, match=r"not what the run wrote.*`cudadent42 report .*` compares"):
            refuse()
    (run / RESULTS).unlink()
    assert load_checked(run).results is None
    manifest = json.loads((run / MANIFEST).read_text())
    del manifest["results_sha256"]
    write_json(run / MANIFEST, manifest)
    write_json(run / RESULTS, forge(run))
    assert load_checked(run).results is not None  # so that it is the digest that finds it


def test_a_number_that_nobody_has_is_refused_in_one_line(run: Path) -> None:
    edit(run, lambda document: document["cases"][0].update(ci_low=1e308))
    with pytest.raises(UsageError, match=r"results.json cannot be read: .*1e\+308 is out of range") as raised:
        report.write(run)
    assert "\n" not in str(raised.value)


def test_rules_of_a_newer_version_are_not_guessed(run: Path) -> None:
    edit(run, lambda document: document.update(rules=99))
    with pytest.raises(UsageError, match="upgrade"):
        load_checked(run)


def test_without_samples_the_results_are_those_that_the_run_wrote(run: Path) -> None:
    (run / SAMPLES).unlink()
    assert load_checked(run).results is not None
    edit(run, faster)
    with pytest.raises(UsageError, match="not what the run wrote"):
        load_checked(run)


def test_a_claim_without_samples_is_none(run: Path) -> None:
    """Else who edits results.json only had to remove what it no longer follows from."""
    (run / SAMPLES).unlink()
    edit(run, faster)
    edit(run, lambda document: document.update(claim_allowed=True, claim_reason="because"))
    manifest = json.loads((run / MANIFEST).read_text())
    (run / MANIFEST).write_text(json.dumps({**manifest, "results_sha256": results_digest(run)}))
    results = load_checked(run).results
    assert results is not None
    assert not results.claim_allowed
    assert results.claim_reason == "there is no samples.csv from which it would follow"


@pytest.mark.parametrize("samples", COMMITTED, ids=[path.parent.name for path in COMMITTED])
def test_committed_runs_follow_from_their_samples(samples: Path) -> None:
    run = load_checked(samples.parent)
    assert run.results is not None or run.manifest.status is RunStatus.INTERRUPTED


@pytest.mark.parametrize("what", OLD_EDITS)
def test_an_edit_of_an_old_run_is_found(tmp_path: Path, what: str) -> None:
    """Of one whose rules were not written down."""
    folder = tmp_path / "old"
    shutil.copytree(next(path.parent for path in COMMITTED if path.parent.name.endswith("cpu-moe")), folder)
    edit(folder, OLD_EDITS[what])
    with pytest.raises(UsageError, match="does not follow"):
        load_checked(folder)

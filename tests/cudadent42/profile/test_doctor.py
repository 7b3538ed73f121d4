"""From a run folder to a diagnosis, with and without a profile in it; two profiles side by side."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cudadent42.errors import UsageError
from cudadent42.profile import Profile, diagnose, doctor, store, text
from cudadent42.profile.collect import Wish
from cudadent42.profile.compare import changes, compare_folders
from cudadent42.profile.doctor import examine
from cudadent42.profile.records import DIAGNOSIS, PROFILE, Diagnosis, Source

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks/results"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run made on an H200."""
    return shutil.copytree(RESULTS / "2026-11-20-h200-hopper", tmp_path / "run")


def test_a_run_is_judged_by_its_folder_where_its_machine_is_not_here(run: Path) -> None:
    diagnosis = examine(run, measure=False)
    assert diagnosis.source is Source.MODEL
    assert diagnosis.implementation == "cudadent42"
    assert "measuring was not asked for" in diagnosis.notes[0]
    profile = store.load_profile(run)
    assert profile is not None
    assert profile.latency_ms > 0
    assert profile.architecture == "sm_90"


def test_the_slowest_case_is_taken_unless_one_is_named(run: Path) -> None:
    results = json.loads((run / "results.json").read_text())
    slowest = min(results["cases"], key=lambda one: one["speedup"])
    assert examine(run, measure=False).case == f"{slowest['name']}/{slowest['dtype']}"
    named = examine(run, case="d64-full-4096", measure=False)
    assert named.case == "d64-full-4096/bf16"


def test_a_profile_that_is_there_is_judged_again(run: Path, profile_of: Callable[..., Profile]) -> None:
    profile = profile_of("unswizzled")
    store.write(run, profile, diagnose(profile))
    (run / DIAGNOSIS).unlink()
    assert examine(run, measure=False).causes[0].rule == "bank-conflicts"
    assert store.load_diagnosis(run) is not None


def _of(profile: Profile, diagnosis: Diagnosis) -> Profile:
    """The profile as if it were of the diagnosis' subject."""
    return dataclasses.replace(profile, case=diagnosis.case, implementation=diagnosis.implementation)


def _measures(monkeypatch: pytest.MonkeyPatch, recorded: Profile) -> None:
    """As on the machine of the run: measuring any case gives these numbers."""

    def collect(wish: Wish, *_: object) -> Profile:
        return dataclasses.replace(recorded, case=wish.case.id, implementation=wish.implementation)

    monkeypatch.setattr(doctor, "_why_not_here", lambda run: None)
    monkeypatch.setattr(doctor, "collect", collect)


def test_on_the_machine_of_the_run_it_measures_anew(
    run: Path, profile_of: Callable[..., Profile], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = examine(run, measure=False)
    store.write(run, _of(profile_of("unswizzled"), first), first)
    _measures(monkeypatch, profile_of("spilled"))
    assert examine(run).causes[0].rule == "spills"
    other = examine(run, case="d64-full-4096")
    assert (other.case, other.source) == ("d64-full-4096/bf16", Source.COUNTERS)
    assert examine(run).case == first.case != other.case


def test_counters_of_the_subject_outlive_a_measurement_without(
    run: Path, profile_of: Callable[..., Profile], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = examine(run, measure=False)
    kept = _of(profile_of("unswizzled"), first)
    store.write(run, kept, diagnose(kept))
    without = dataclasses.replace(profile_of("unswizzled", counters=False), notes=("ncu is not installed",))
    _measures(monkeypatch, without)
    for _ in range(2):
        diagnosis = examine(run)
        assert diagnosis.causes[0].rule == "bank-conflicts"
        assert diagnosis.notes == ("the kept profile with counters is judged: ncu is not installed",)
        assert store.load_profile(run) == kept


def test_counters_of_another_subject_are_not_overwritten(
    run: Path, profile_of: Callable[..., Profile]
) -> None:
    kept = _of(profile_of("unswizzled"), examine(run, measure=False))
    store.write(run, kept, diagnose(kept))
    with pytest.raises(UsageError, match=f"keeps a profile of {kept.case}, cudadent42 with counters.*own"):
        examine(run, case="d64-full-4096", measure=False)
    assert store.load_profile(run) == kept


@pytest.mark.parametrize(
    ("options", "message"),
    [({"case": "nope"}, "no case 'nope'"), ({"implementation": "nope"}, "no implementation 'nope'")],
)
def test_what_is_not_in_the_run_is_refused(run: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        examine(run, measure=False, **options)  # type: ignore[arg-type]


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="run folder"):
        examine(tmp_path)


def test_a_newer_profile_is_refused(run: Path, profile_of: Callable[..., Profile]) -> None:
    profile = dataclasses.replace(profile_of("decode"), schema_version=99)
    store.write(run, profile, diagnose(profile))
    with pytest.raises(UsageError, match="newer cudadent42"):
        store.load_profile(run)


@pytest.mark.parametrize("content", ["{", "[]", '{"schema_version": 1}', '{"case": "x"}'])
def test_a_broken_profile_is_refused(run: Path, content: str) -> None:
    (run / PROFILE).write_text(content)
    with pytest.raises(UsageError, match=PROFILE):
        store.load_profile(run)


# ---------------------------------------------------------------- words


def test_the_lines_name_the_first_experiment(profile_of: Callable[..., Profile]) -> None:
    diagnosis = diagnose(profile_of("unswizzled"))
    lines = list(text.lines(diagnosis))
    assert lines[-1] == f"next: {diagnosis.causes[0].experiment}"
    assert any(line.startswith("1. Shared-memory bank conflicts (measured): at most 80%") for line in lines)
    assert any("values outside" in line for line in lines)


def test_verbose_lines_show_every_threshold(profile_of: Callable[..., Profile]) -> None:
    diagnosis = diagnose(profile_of("hopper-full"))
    lines = "\n".join(text.lines(diagnosis, verbose=True))
    assert all(threshold.name in lines for threshold in diagnosis.thresholds)
    assert "specialised warps" in lines


def test_gains_in_words(profile_of: Callable[..., Profile]) -> None:
    finding = diagnose(profile_of("unswizzled")).causes[0]
    assert text.gain(dataclasses.replace(finding, gain=0.5)) == "at most 50% of the time, 2.00x"
    assert text.gain(dataclasses.replace(finding, gain=1.0)) == "at most 100% of the time"


# ---------------------------------------------------------------- before and after


def test_a_mended_fault_shows(profile_of: Callable[..., Profile]) -> None:
    before = dataclasses.replace(profile_of("unswizzled"), case="x/bf16")
    after = dataclasses.replace(profile_of("product"), case="x/bf16")
    lines = "\n".join(changes(before, after))
    assert "(4.12x as fast)" in lines or "x as fast" in lines
    assert "shared-memory conflicts: 86% -> " in lines
    assert "careful" not in lines


def test_what_cannot_be_compared_is_said(profile_of: Callable[..., Profile]) -> None:
    lines = changes(profile_of("unswizzled"), profile_of("product", counters=False))
    assert lines[0].startswith("careful: unswizzled/bf16 before")
    assert "counters" in lines[1]


def test_equal_profiles_have_no_changes(profile_of: Callable[..., Profile]) -> None:
    assert changes(profile_of("decode"), profile_of("decode")) == ("no number changed by more than 2 %",)


def test_a_folder_without_a_profile_cannot_be_compared(run: Path) -> None:
    with pytest.raises(UsageError, match="has no profile"):
        compare_folders(run, run)


def test_files_are_strict_json(run: Path, profile_of: Callable[..., Profile]) -> None:
    profile = dataclasses.replace(profile_of("decode"), latency_ms=math.nan)
    store.write(run, profile, diagnose(profile))
    document = json.loads((run / PROFILE).read_text(), parse_constant=lambda word: pytest.fail(word))
    assert isinstance(document["metrics"], dict)
    assert all(isinstance(value, (int, float)) for value in document["metrics"].values())

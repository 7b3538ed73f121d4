"""Every shipped lesson fires on something real, and on nothing that is healthy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cudadent42.patterns import PatternEvidence, match
from cudadent42.patterns.evidence import of_file, of_run, of_text
from cudadent42.patterns.lessons import shipped

RECORDED = Path(__file__).parent / "recorded"
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"

FIRES = [
    ("logs/half-types.txt", "one-translation-unit"),
    ("logs/dlopen.txt", "one-translation-unit"),
    ("logs/link.txt", "one-translation-unit"),
    ("logs/tiles.txt", "architecture-dictates-the-design"),
    ("logs/limits.txt", "architecture-dictates-the-design"),
    ("logs/spill.txt", "architecture-dictates-the-design"),
    ("logs/preflight-bare.txt", "environment-before-building"),
    ("logs/cuda-home.txt", "environment-before-building"),
    ("logs/ssh-refused.txt", "alive-before-a-long-step"),
    ("logs/ssh-lost.txt", "alive-before-a-long-step"),
    ("logs/another-machine.txt", "keep-the-machine"),
    ("logs/build-broken.txt", "last-working-revision"),
    ("logs/build-own-broken.txt", "last-working-revision"),
    ("logs/crash.txt", "crash-under-a-sanitizer"),
    ("logs/endless-loop.txt", "endless-loop"),
    ("logs/out-of-memory.txt", "small-shapes-first"),
    ("runs/slow", "profile-before-optimising"),
    ("runs/slow", "idle-machine-first"),
    ("runs/changed", "one-variable-at-a-time"),
    ("runs/broken", "last-working-revision"),
    ("runs/crash", "crash-under-a-sanitizer"),
]


def test_every_shipped_lesson_has_something_real_to_fire_on() -> None:
    """The power limit's is a committed run; see below."""
    assert {lesson for _, lesson in FIRES} | {"power-limit"} == {lesson.id for lesson in shipped()}


def evidence(path: Path) -> PatternEvidence:
    return of_run(path) if path.is_dir() else of_file(path)


def fired(path: Path) -> set[str]:
    return {each.lesson.id for each in match(evidence(path), shipped())}


@pytest.mark.parametrize(("name", "lesson"), FIRES)
def test_fires_on_what_really_happened(name: str, lesson: str) -> None:
    assert lesson in fired(RECORDED / name)


def test_the_power_limit_is_seen_in_a_committed_run() -> None:
    assert fired(RESULTS / "2026-11-20-h200-hopper") == {"power-limit"}


@pytest.mark.parametrize(
    "path", sorted((RECORDED / "logs").glob("*-healthy.txt")), ids=lambda path: path.name
)
def test_a_healthy_log_fires_nothing(path: Path) -> None:
    assert fired(path) == set()


@pytest.mark.parametrize(
    "name", ["2026-11-20-cpu-default", "2026-11-20-cpu-fp32", "2026-11-20-h200-small-call"]
)
def test_a_healthy_run_fires_nothing(name: str) -> None:
    assert fired(RESULTS / name) == set()


def test_each_log_fires_one_lesson_only() -> None:
    """A user who is shown everything reads nothing."""
    logs = [path for path in (RECORDED / "logs").glob("*.txt") if not path.name.endswith("-healthy.txt")]
    assert {path.name: len(fired(path)) for path in logs} == {path.name: 1 for path in logs}


@pytest.mark.parametrize(
    ("line", "lessons"),
    [
        ("RuntimeError: CUDA error: out of memory", {"small-shapes-first"}),
        ("one/fp32: mine.py:f is wrong: no sign of life for 60 s; killed", {"endless-loop"}),
        ("one/fp32: mine.py:f is wrong: worker died: exit code 3", set()),
        ("empty: mine.py:f is wrong: worker died: signal 11 (SIGSEGV)", {"crash-under-a-sanitizer"}),
        ("worker died: signal 9 (SIGKILL)", set()),
    ],
)
def test_an_end_is_taken_for_what_it_is(line: str, lessons: set[str]) -> None:
    assert {each.lesson.id for each in match(of_text(line, "output"), shipped())} == lessons


@pytest.mark.parametrize(("built", "lessons"), [(True, {"small-shapes-first"}), (False, set())])
def test_a_run_that_ended_before_its_build_says_nothing_of_shapes(
    tmp_path: Path, built: bool, lessons: set[str]
) -> None:
    """Such as one for a GPU that the machine does not have."""
    manifest = json.loads((RESULTS / "2026-11-20-cpu-default/manifest.json").read_text())
    manifest["status"] = "failed"
    manifest["plan"]["cases"] = [case for case in manifest["plan"]["cases"] if case["seqlen_k"] >= 1024]
    if not built:
        manifest["build"] = None
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert fired(tmp_path) == lessons

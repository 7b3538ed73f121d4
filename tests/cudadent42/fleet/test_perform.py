"""What a device's races verify: how often, on which inputs, and what becomes of who is wrong. With real kernels, in a
real worker."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cudadent42.base.errors import UnwritableError
from cudadent42.base.observer import Quiet
from cudadent42.fleet import perform
from cudadent42.fleet.perform import Block, Racer, Unfit
from cudadent42.fleet.task import Right
from cudadent42.model.records import MachineReport, Plan, Scope, TimerKind, VerifyReport
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.operations.attention.inputs import hard_cases, hard_inputs
from cudadent42.runs.run_folder import load_run
from cudadent42.scaffold import Kind, create

CASES = tuple(
    AttentionCase(name, "fp32", 1, 1, 1, rows, rows, 8) for name, rows in (("one", 16), ("two", 32))
)

WRONG_ELSEWHERE = """
CUDADENT42_EXPORT int k(const Cudadent42Attention *problem) {
    const int status = attention(problem);
    if (problem->seqlen_q % 16 != 0) ((float *)problem->output)[0] += 1.0f;
    return status;
}
"""

Asked = list[tuple[Scope, tuple[str, ...], int]]
"""Of each stage that verified: what, whom, and how many results there were."""


@pytest.fixture
def names(tmp_path: Path) -> dict[str, str]:
    """Kernels: two that are right, and one that is wrong at odd lengths, which no case has."""
    files = {}
    for name in ("default", "right", "wrong"):
        create("k", Kind.CPU, tmp_path / name)
        files[name] = str(tmp_path / name / "k/k.toml")
    source = tmp_path / "wrong/k/k.cpp"
    head, mark, rest = source.read_text().partition("CUDADENT42_EXPORT int k(")
    assert mark
    source.write_text(f"{head}static int attention({rest}{WRONG_ELSEWHERE}")
    return files


def plan_of(*names: str) -> Plan:
    """Of the first case."""
    return Plan("test", "cpu", CASES[:1], names[0], names, 2, 1, seed=5, timer=TimerKind.CPU, control=False)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    seen: Asked = []
    original = perform.run_stage

    def recorded(stage: Any, plan: Plan, **given: Any) -> Any:
        report = original(stage, plan, **given)
        if isinstance(report, VerifyReport):
            seen.append((given["scope"], plan.implementations, len(report.cases)))
        return report

    monkeypatch.setattr(perform, "run_stage", recorded)
    return seen


def test_what_depends_on_no_case_is_verified_once_for_a_dtype(
    names: dict[str, str], asked: Asked, tmp_path: Path
) -> None:
    default, right, wrong = names.values()
    plan = plan_of(default, right, wrong)
    results: list[list[Block | Unfit]] = [[], [], []]
    with Racer(MachineReport((), "", {}), tmp_path / "log", Quiet()) as racer:
        racer.race(plan, tmp_path / "one", results[0].append)
        racer.race(replace(plan, cases=CASES[1:], seed=6), tmp_path / "two", results[1].append)
        racer.race(replace(plan, cases=CASES[1:], seed=7), tmp_path / "again", results[2].append)
    common = len(hard_inputs("fp32"))
    own = [1 + len(hard_cases((case,), "cpu")) for case in CASES]
    assert asked == [
        (Scope.COMMON, (default, right, wrong), 3 * common),
        (Scope.CASES, (default, right), 2 * own[0]),
        (Scope.CASES, (default, right), 2 * own[1]),
    ]
    for folder, seen in zip(("one", "two", "again"), results, strict=True):
        blocks = [each for each in seen if isinstance(each, Block)]
        assert [set(each.latencies_ms) for each in blocks] == [{default, right}] * 2
        (unfit,) = [each for each in seen if isinstance(each, Unfit)]
        assert unfit.implementation == wrong
        assert unfit.reason.startswith("failed verification on ")
        # Each race's folder has all that is known of its case, and nothing of another.
        verified = load_run(tmp_path / folder).verify
        assert verified is not None
        of_right = [each.case for each in verified.cases if each.implementation == right]
        assert len(of_right) == len(set(of_right)) == common + own[folder != "one"]
        assert {case.id for case in CASES} & set(of_right) == {CASES[folder != "one"].id}


def test_whom_the_fleet_has_verified_nobody_asks_again(
    names: dict[str, str], asked: Asked, tmp_path: Path
) -> None:
    default, right, wrong = names.values()
    plan = plan_of(default, right, wrong)
    told: list[Block | Unfit] = []
    with Racer(MachineReport((), "", {}), tmp_path / "log", Quiet()) as racer:
        seen = racer.race(plan, tmp_path / "one", told.append)
    assert seen == (default, right)
    asked.clear()
    plan = plan_of(*seen)
    own = 1 + len(hard_cases(CASES[:1], "cpu"))
    for folder, given, expected in (
        ("elsewhere", Right(anywhere=seen), [(Scope.CASES, seen, 2 * own)]),
        ("again", Right(anywhere=seen, on_case=(default,)), [(Scope.CASES, (right,), own)]),
        ("here", Right(anywhere=seen, on_case=seen), []),
    ):
        told.clear()
        with Racer(MachineReport((), "", {}), tmp_path / "log", Quiet()) as racer:
            assert racer.race(plan, tmp_path / folder, told.append, right=given) == seen
        assert asked == expected
        assert [set(each.latencies_ms) for each in told if isinstance(each, Block)] == [set(seen)] * 2
        asked.clear()


def test_where_the_compile_cache_takes_no_more_nobody_is_called_unfit(
    tmp_path: Path, names: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path) -> None:
        raise UnwritableError(f"cannot write to {folder}: No space left on device")

    monkeypatch.setattr(perform, "require_room", full)
    told: list[Block | Unfit] = []
    with (
        Racer(MachineReport((), "", {}), tmp_path / "log", Quiet()) as racer,
        pytest.raises(UnwritableError, match="No space left"),
    ):
        racer.race(plan_of(names["default"], names["wrong"]), tmp_path / "run", told.append)
    assert not any(isinstance(each, Unfit) for each in told)

"""What a step's plan takes is timed apart from the calls, end to end: a published implementation whose plan sleeps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from cudadent42.base.errors import UsageError
from cudadent42.model.events import BenchLog, PlanningTimed, from_line, to_line
from cudadent42.model.implementations import Planned, unplanned
from cudadent42.model.records import CacheState, Plan, TimerKind, VerifyReport
from cudadent42.operations.attention_varlen.case import VarlenCase
from cudadent42.operations.attention_varlen.implementations import prepare_sdpa
from cudadent42.operations.attention_varlen.inputs import VarlenInputs
from cudadent42.registry import registry
from cudadent42.runs.checking import load_checked
from cudadent42.runs.run_folder import RESULTS
from cudadent42.stages.bench import measurement
from cudadent42.stages.bench.planning import READINGS, time_planning
from cudadent42.stages.report.planning import LAYERS, plannings

ROOT = Path(__file__).resolve().parents[4]
SLEEP_S = 0.02

PLANS = f"""
import time
from functools import partial

from cudadent42.model.implementations import Implementation, Planned
from cudadent42.operations.attention_varlen.implementations import prepare_sdpa

def prepare(case, inputs):
    plan = partial(time.sleep, {SLEEP_S})
    plan()
    return Planned(prepare_sdpa(case, inputs), plan)

IMPLEMENTATION = Implementation(
    "plans_ahead", "SDPA behind a plan", ("cpu",), prepare, operation="attention_varlen", peer="PyTorch"
)
"""

SUITE = """
name = "planned"
operation = "attention_varlen"
dtypes = ["fp32"]
baseline = "pytorch"
implementations = ["pytorch", "plans_ahead"]
repeats = 2
warmup = 0
case = [
    { name = "one", batch = 2, num_heads = 2, longest = 12, head_dim = 16, page_size = 4 },
    { name = "two", batch = 2, num_heads = 2, longest = 16, head_dim = 16, value_dim = 8, queries = 0 },
    { name = "three", batch = 2, num_heads = 2, longest = 16, head_dim = 16, alibi = true },
]
"""

CASE = VarlenCase("unit", "fp32", 2, 2, 2, longest=12, shortest=3, head_dim=16)
PLAN = Plan("s", "cpu", (CASE,), "pytorch", ("pytorch", "peer"), repeats=1, warmup=0, seed=0)


def call() -> torch.Tensor:
    return torch.zeros(1)


@pytest.mark.parametrize("timer", [TimerKind.CALL, TimerKind.CPU])
@pytest.mark.parametrize("cache", [CacheState.WARM, CacheState.COLD])
def test_a_plan_is_timed_several_times_by_the_clock_on_the_wall(
    timer: TimerKind, cache: CacheState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processor time has nothing of a sleep, as it has nothing of a wait for a GPU."""
    monkeypatch.setattr("cudadent42.timing.flush.cache_bytes", lambda device: 1 << 10)
    planned: list[float] = []

    def plan() -> None:
        planned.append(time.perf_counter())
        time.sleep(SLEEP_S)

    told: list[object] = []
    time_planning(replace(PLAN, timer=timer, cache=cache), "unit/fp32/peer", Planned(call, plan), told.append)
    (event,) = told
    assert isinstance(event, PlanningTimed)
    assert event.key == "unit/fp32/peer"
    assert event.planning_ms >= 1e3 * SLEEP_S
    assert len(planned) >= READINGS


def test_a_call_without_a_plan_is_told_nothing_of() -> None:
    told: list[object] = []
    time_planning(PLAN, "unit/fp32/peer", call, told.append)
    assert told == []


def test_the_call_that_is_timed_is_the_one_behind_the_plan() -> None:
    assert unplanned(Planned(call, time.time)) is call
    assert unplanned(call) is call
    assert torch.equal(Planned(call, time.time)(), call())


def test_a_worker_tells_its_parent() -> None:
    log = BenchLog()
    for planning_ms in (3.0, 2.0):  # the second of a worker that came after the first was lost
        event = from_line(to_line(PlanningTimed("a/fp16/peer", planning_ms)))
        log.add(event)
    assert log.report().planning_ms == {"a/fp16/peer": 2.0}


def test_no_plan_is_in_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def prepare(case: VarlenCase, inputs: VarlenInputs) -> Planned:
        attend = prepare_sdpa(case, inputs)

        def noted() -> torch.Tensor:
            done.append("call")
            return attend()

        return Planned(noted, partial(done.append, "plan"))

    by_name = registry("attention_varlen")
    peer = replace(by_name["pytorch"], name="peer", prepare=prepare)
    usable = {"pytorch": by_name["pytorch"], "peer": peer}
    monkeypatch.setattr(measurement, "load_all", lambda *_: (usable, {}))
    threads = torch.get_num_threads()
    try:
        report = measurement.measure(
            replace(PLAN, repeats=2), VerifyReport(()), emit=lambda event: done.append(type(event).__name__)
        )
    finally:
        torch.set_num_threads(threads)
    assert list(report.planning_ms) == ["unit/fp32/peer"]
    planned = done.index("PlanningTimed")
    assert "plan" in done[:planned]
    assert "plan" not in done[planned:]
    assert done[planned:].count("BlockMeasured") == 2
    assert "call" in done[done.index("BlockMeasured") :]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a whole run, and what it printed."""
    folder = tmp_path_factory.mktemp("planned")
    metadata = folder / "site/plans_ahead-1.0.dist-info"
    metadata.mkdir(parents=True)
    (folder / "site/plans_ahead.py").write_text(PLANS)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: plans-ahead\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[cudadent42.implementations]\nplans_ahead = plans_ahead:IMPLEMENTATION\n"
    )
    (folder / "planned.toml").write_text(SUITE)
    path = os.pathsep.join((str(folder / "site"), str(ROOT / "src")))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "cudadent42", "run", "--suite", "planned.toml", "--device", "cpu"),
            *("--timer", "call", "--output-dir", "run", "--ignore-preflight", "--verbose"),
        ],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "160"},
        capture_output=True,
        text=True,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return folder / "run", done.stdout


def test_it_is_kept_beside_a_comparison_without_it(run: tuple[Path, str]) -> None:
    folder, _ = run
    results = load_checked(folder).results
    assert results is not None
    assert list(results.planning_ms) == [f"{name}/fp32/plans_ahead" for name in ("one", "two", "three")]
    assert all(each >= 1e3 * SLEEP_S for each in results.planning_ms.values())
    for each in plannings(results):
        assert each.layer_ms == each.call_ms + each.plan_ms / LAYERS
    assert {row.name for row in results.cases} == {"one", "two", "three"}
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert sum("planning a step takes" in each.get("text", "") for each in log) == 3


def test_results_with_another_time_are_not_those_that_the_run_wrote(
    run: tuple[Path, str], tmp_path: Path
) -> None:
    for file in run[0].iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    results = json.loads((tmp_path / RESULTS).read_text())
    results["planning_ms"]["one/fp32/plans_ahead"] = 0.001
    (tmp_path / RESULTS).write_text(json.dumps(results))
    with pytest.raises(UsageError, match="is not what the run wrote"):
        load_checked(tmp_path)


def test_the_reports_state_it(run: tuple[Path, str]) -> None:
    folder, printed = run
    said = f"With the plan shared by {LAYERS} layers, each takes"
    for text in (printed, (folder / "report.html").read_text(), (folder / "report.md").read_text()):
        assert said in text
        assert f"Layer of {LAYERS}" in text
    assert 'id="plannings"' in (folder / "report.html").read_text()

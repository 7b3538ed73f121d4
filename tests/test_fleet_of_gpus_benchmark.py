"""What is read from the journals of two sweeps: how long they took, and whether they came to the same winners."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from cudadent42.base.files import write_json
from cudadent42.base.serialise import dumps
from cudadent42.decisions.racing import Rules
from cudadent42.model.records import Plan, Verdict
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.tune import journal as events
from cudadent42.tune.journal import FILES, SCHEMA_VERSION, Device, Entry, Setup, read
from cudadent42.tune.prune import CompiledArm, Target
from cudadent42.tune.space import DEFAULT
from cudadent42.tune.state import fold

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
ARMS = (DEFAULT, "A", "B")
CASES = tuple(AttentionCase(name, "fp32", 1, 1, 1, 16, 16, 32) for name in ("short", "long"))
BEGAN = "2026-11-28T10:00:00.000+00:00"


@pytest.fixture(scope="module")
def benchmark() -> Any:
    sys.path.append(str(BENCHMARKS))
    try:
        import fleet_of_gpus
    finally:
        sys.path.remove(str(BENCHMARKS))
    return fleet_of_gpus


def about() -> Setup:
    return Setup(
        schema_version=SCHEMA_VERSION,
        version="0",
        space="/somewhere/space.toml",
        space_digest="0",
        kernel="kernel.toml",
        kernel_digest="0",
        arms={arm: f"{arm}.toml" for arm in ARMS},
        settings={"A": {"BLOCK": 1}, "B": {"BLOCK": 2}},
        regions=(),
        plan=Plan("unit", "cpu", CASES, "default.toml", ("default.toml",), repeats=12, warmup=0, seed=1),
        rules=Rules(rungs=(4,), margin=0.01),
        target=Target("cpu"),
        device=Device("unit CPU"),
    )


def happened(
    units: tuple[str, ...], latencies: Mapping[str, tuple[float, ...]], winners: Mapping[str, str]
) -> list[tuple[float, Any]]:
    """Of a sweep: seconds since its command began, and an event. ``latencies``: by case, in the order of the arms."""
    ids = [case.id for case in CASES]
    told: list[tuple[float, Any]] = [(5.0, events.Opened("here"))]
    told += [(6.0, events.Compiled(CompiledArm(arm, dict.fromkeys(ids, arm)))) for arm in ARMS]
    told += [(7.0, events.Joined(f"w-{unit}", unit, "unit CPU", "here", "", 2.0)) for unit in units]
    for number, id in enumerate(ids):
        at_s = 10.0 + 10.0 * number
        worker = f"w-{units[number % len(units)]}"
        blocks = tuple(latencies[id] for _ in range(4))
        told.append((at_s, events.JobStarted(f"{id}#0.0", 1, id, ("A", "B"), 1, "races/x")))
        returned = events.JobReturned(f"{id}#0.0", 1, worker, ARMS, blocks, {}, 8.0)
        told.append((at_s + 8.0, returned))
        told.append((at_s + 8.0, events.RungDone(id, 0, winners[id], ())))
        told.append((at_s + 9.0, events.Settled(id, winners[id], (), "the last rung is measured", 24)))
    at_s = 40.0
    for id in ids:
        if winners[id] != DEFAULT:
            for unit in units:
                one = events.MachineConfirmed(
                    id, winners[id], 1, f"w-{unit}", unit, "c", 1.1, 1.09, 1.11, Verdict.FASTER, True, ""
                )
                told.append((at_s, one))
            told.append(
                (at_s, events.Confirmed(id, winners[id], 1, "c", 1.1, 1.09, 1.11, Verdict.FASTER, True, ""))
            )
            at_s += 10.0
    return told


def leave(benchmark: Any, output: Path, devices: int, told: list[tuple[float, Any]], seconds: float) -> None:
    """The folder of a sweep."""
    folder = output / f"devices-{devices}"
    (folder / "tuning").mkdir(parents=True)
    write_json(folder / "tuning" / FILES.setup, about())
    lines = [
        dumps(Entry(f"2026-11-28T10:00:{at_s:06.3f}+00:00", at_s - 5.0, event), indent=None)
        for at_s, event in told
    ]
    (folder / "tuning" / FILES.entries).write_text("\n".join(lines) + "\n")
    command = benchmark.Command(devices, BEGAN, seconds, 0)
    (folder / benchmark.COMMAND).write_text(json.dumps(asdict(command)))


SHORT, LONG = (case.id for case in CASES)
LATENCIES = {SHORT: (1.0, 0.9, 0.8), LONG: (1.0, 0.995, 1.2)}


def test_times_are_those_since_the_command_began(benchmark: Any, tmp_path: Path) -> None:
    winners = {SHORT: "B", LONG: DEFAULT}
    leave(benchmark, tmp_path, 1, happened(("gpu0",), LATENCIES, winners), 55.0)
    leave(benchmark, tmp_path, 2, happened(("gpu0", "gpu1"), LATENCIES, winners), 44.0)
    said = benchmark.write(tmp_path, (1, 2), {"machine": "m"})
    assert json.loads((tmp_path / benchmark.FILE).read_text()) == said
    assert (said["space"], said["configurations"]) == ("space.toml", 2)
    one, two = said["sweeps"]
    assert (one["opened_s"], one["first_race_s"], one["race_s"], one["confirmed_s"]) == (
        5.0,
        10.0,
        29.0,
        40.0,
    )
    assert one["jobs_of_a_device"] == {"gpu0": 2}
    assert two["jobs_of_a_device"] == {"gpu0": 1, "gpu1": 1}
    assert two["busy_s"] == {"gpu0": 8.0, "gpu1": 8.0}
    assert [each["confirmations"] for each in said["sweeps"]] == [1, 2]
    summary = said["summary"]
    assert summary["race_ratio"] == 1.0
    assert summary["whole_ratio"] == pytest.approx(0.8)
    assert (summary["cells"], summary["winners_the_same"], summary["winners_alike_share"]) == (2, 2, 1.0)


def test_other_winners_are_alike_within_the_margin_of_both_sweeps(benchmark: Any, tmp_path: Path) -> None:
    """A is 0.5 % faster than the default on the long case, and a ninth slower than B on the short one."""
    leave(benchmark, tmp_path, 1, happened(("gpu0",), LATENCIES, {SHORT: "B", LONG: "A"}), 55.0)
    leave(benchmark, tmp_path, 2, happened(("gpu0",), LATENCIES, {SHORT: "A", LONG: DEFAULT}), 55.0)
    said = benchmark.write(tmp_path, (1, 2), {})
    short, long = said["cells"]
    assert not short["winners"]["alike"]
    assert short["winners"]["differences"] == [pytest.approx(0.9 / 0.8 - 1), pytest.approx(0.8 / 0.9 - 1)]
    assert long["winners"]["alike"]
    assert long["winners"]["differences"] == [pytest.approx(1 / 0.995 - 1), pytest.approx(0.995 - 1)]
    assert said["summary"]["winners_alike_share"] == 0.5
    assert said["summary"]["winners_the_same"] == 0


def test_what_one_sweep_s_blocks_separate_is_not_alike(benchmark: Any, tmp_path: Path) -> None:
    nearer = {**LATENCIES, LONG: (1.0, 0.98, 1.2)}
    leave(benchmark, tmp_path, 1, happened(("gpu0",), nearer, {SHORT: "B", LONG: "A"}), 55.0)
    leave(benchmark, tmp_path, 2, happened(("gpu0",), LATENCIES, {SHORT: "B", LONG: DEFAULT}), 55.0)
    assert [each["winners"]["alike"] for each in benchmark.write(tmp_path, (1, 2), {})["cells"]] == [
        True,
        False,
    ]


def test_a_sweep_that_was_cut_off_has_no_time_and_its_cells_are_not_alike(
    benchmark: Any, tmp_path: Path
) -> None:
    winners = {SHORT: "B", LONG: "A"}
    whole = happened(("gpu0",), LATENCIES, winners)
    leave(benchmark, tmp_path, 1, whole, 55.0)
    cut = [each for each in whole if not isinstance(each[1], events.Confirmed | events.MachineConfirmed)]
    leave(benchmark, tmp_path, 2, [each for each in cut if each[0] < 29.0], 29.0)
    summary = benchmark.write(tmp_path, (1, 2), {})["summary"]
    assert summary["race_s"] == [29.0, None]
    assert summary["race_ratio"] is summary["whole_ratio"] is None
    assert (summary["leaders_told"], summary["leaders_alike_share"]) == (1, 0.5)
    assert summary["winners_told"] == 0


def test_one_sweep_alone_is_told_without_a_comparison(benchmark: Any, tmp_path: Path) -> None:
    leave(benchmark, tmp_path, 2, happened(("gpu0", "gpu1"), LATENCIES, {SHORT: "B", LONG: DEFAULT}), 44.0)
    said = benchmark.write(tmp_path, (1, 2), {})
    assert [each["devices"] for each in said["sweeps"]] == [2]
    assert "summary" not in said


def test_the_invented_journals_are_what_a_tuning_reads(benchmark: Any, tmp_path: Path) -> None:
    leave(benchmark, tmp_path, 1, happened(("gpu0",), LATENCIES, {SHORT: "B", LONG: "A"}), 55.0)
    state = fold(*read(tmp_path / "devices-1" / "tuning"))
    assert state.finished
    assert len(state.winners) == 2

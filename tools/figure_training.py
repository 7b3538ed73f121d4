"""Figures of experts that train, read from runs of steps and from the texts of runs before there were such."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median

from figure_readers import finished

from cudadent42.base.errors import UsageError
from cudadent42.operations.moe.case import MoeCase
from cudadent42.suites.loader import load_suite

FLOPS = 18
"""Of both passes, for each slot, column of the hidden states and intermediate value: a multiplication and an addition
in nine products, three forward and six backward, where w13's count twice."""


def step_rate(name: str) -> Callable[[Path], float]:
    """The candidate's TFLOP/s on the case of that name, from its median latency."""

    def read(folder: Path) -> float:
        run = finished(folder).run
        assert run.results is not None
        latencies = {case.case_id: case.latency_ms for case in run.results.cases}
        for case in run.plan.cases:
            if isinstance(case, MoeCase) and case.name == name:
                flops = FLOPS * case.tokens * case.top_k * case.hidden * case.intermediate
                return flops / latencies[case.id] / 1e9
        raise UsageError(f"{folder} has no layer {name}")

    return read


def time_over_ours(other: str, *names: str) -> Callable[[Path], tuple[float, ...]]:
    """Of these cases, the median of another implementation's samples over the candidate's: by what a run keeps whose
    time was over in its audit.
    """

    def read(folder: Path) -> tuple[float, ...]:
        samples: dict[tuple[str, str], list[float]] = {}
        with (folder / "samples.csv").open(encoding="utf-8", newline="") as lines:
            for row in csv.DictReader(lines):
                samples.setdefault((row["case"], row["implementation"]), []).append(float(row["latency_ms"]))
        return tuple(median(samples[name, other]) / median(samples[name, "cudadent42"]) for name in names)

    return read


LIBRARY = ("grouped_mm", "grouped_mm_compiled")
"""PyTorch's implementations of a layer, among those of benchmarks/moe_training_memory.py."""
LIBRARY_MODELS = ("grouped_mm", "loop")
"""transformers' settings in bfloat16, among those of benchmarks/moe_losses.py."""


def gigabytes(folder: Path, name: str, field: str) -> dict[str, float]:
    """Of a layer, for each implementation that benchmarks/moe_training_memory.py measured."""
    cases = json.loads((folder / "memory.json").read_text(encoding="utf-8"))["cases"]
    of_layer = {
        each["implementation"]: each[field] for each in cases if each["case"] == name and field in each
    }
    if not {"cudadent42", *LIBRARY} <= of_layer.keys():
        raise UsageError(
            f"{folder / 'memory.json'} does not have {field} of {name} for all that are compared"
        )
    return of_layer


def kept_gigabytes(name: str) -> Callable[[Path], tuple[float, float]]:
    """With the hidden states, and without."""

    def read(folder: Path) -> tuple[float, float]:
        kept = gigabytes(folder, name, "kept_gb")["cudadent42"]
        (layer,) = (case for case in load_suite("moe-step").shapes if case.name == name)
        assert isinstance(layer, MoeCase)
        return kept + 2e-9 * layer.tokens * layer.hidden, kept

    return read


def peak_over_library(name: str) -> Callable[[Path], float]:
    """The peak of both passes over the library's smaller one."""

    def read(folder: Path) -> float:
        peaks = gigabytes(folder, name, "peak_gb")
        return peaks["cudadent42"] / min(peaks[way] for way in LIBRARY)

    return read


SEEDS, STEPS = 10, 200
"""That the row of losses speaks of."""


def losses_off(folder: Path) -> tuple[float, float]:
    """How far the kernels' losses are from float32's over how far those of transformers' settings in bfloat16 are, of
    these the larger: mean and most, each over all seeds of benchmarks/moe_losses.py."""
    document = json.loads((folder / "losses.json").read_text(encoding="utf-8"))
    runs = document["runs"]
    if (len(runs), document["steps"]) != (SEEDS, STEPS):
        raise UsageError(
            f"{folder / 'losses.json'} is not of {SEEDS} seeds with {STEPS} steps, as its row says"
        )
    ways = {way: [run["apart"][way] for run in runs] for way in runs[0]["apart"]}
    means = {way: mean(each["mean"] for each in rows) for way, rows in ways.items()}
    most = {way: max(each["most"] for each in rows) for way, rows in ways.items()}
    return (
        means["kernels"] / max(means[way] for way in LIBRARY_MODELS),
        most["kernels"] / max(most[way] for way in LIBRARY_MODELS),
    )

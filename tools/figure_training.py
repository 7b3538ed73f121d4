"""Figures of experts that train, read from runs of steps and from the texts of runs before there were such."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import mean

from figure_readers import finished

from cudadent42.base.errors import UsageError
from cudadent42.operations.moe.case import MoeCase

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


def numbers(file: str, *patterns: str) -> Callable[[Path], list[float]]:
    """What each pattern's one group finds in a folder's text; each must be there once."""

    def read(folder: Path) -> list[float]:
        text = (folder / file).read_text(encoding="utf-8")
        each = [re.findall(pattern, text, re.MULTILINE) for pattern in patterns]
        for pattern, matches in zip(patterns, each, strict=True):
            if len(matches) != 1:
                raise UsageError(f"{folder / file} has {len(matches)} times {pattern!r}; expected it once")
        return [float(matches[0]) for matches in each]

    return read


def kept_gigabytes(folder: Path) -> tuple[float, float]:
    """With the hidden states, and without."""
    layer = r"^qwen3 32768: ours "
    of_text = numbers("third.txt", layer + r".*?kept ([\d.]+) GB", layer + r".*\(x itself ([\d.]+) GB more\)")
    kept, hidden_states = of_text(folder)
    return kept + hidden_states, kept


def losses_off(folder: Path) -> tuple[float, float]:
    """How far the kernels' losses are from float32's over how far those of transformers' settings in bfloat16 are, of
    these the larger: mean and most, each over all seeds of benchmarks/moe_losses.py."""
    runs = json.loads((folder / "losses.json").read_text(encoding="utf-8"))["runs"]
    ways = {way: [run["apart"][way] for run in runs] for way in runs[0]["apart"]}
    means = {way: mean(each["mean"] for each in rows) for way, rows in ways.items()}
    most = {way: max(each["most"] for each in rows) for way, rows in ways.items()}
    library = ("grouped_mm", "loop")
    return (
        means["kernels"] / max(means[way] for way in library),
        most["kernels"] / max(most[way] for way in library),
    )

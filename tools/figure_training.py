"""Figures of experts that train, read from runs of steps and from the texts of runs before there were such."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

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


def model_step(folder: Path) -> tuple[float]:
    """The rival's time of a model's step over ours."""
    (ratio,) = numbers("third.txt", r"^4 layers, 8192 tokens, .*ratio ([\d.]+)")(folder)
    return (ratio,)


def losses_off(folder: Path) -> tuple[float, float]:
    """How far the kernels' losses are off those in float32, over how far `grouped_mm` in bf16 is: mean and most."""
    off = [
        numbers(
            "fourth.txt", rf"^curve {name} .*max off fp32 ([\d.]+)", rf"^curve {name} .*mean off ([\d.]+)"
        )
        for name in ("ours", "bf16 grouped")
    ]
    (most, mean), (most_of_peer, mean_of_peer) = (read(folder) for read in off)
    return mean / mean_of_peer, most / most_of_peer

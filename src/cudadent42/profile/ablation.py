"""Timing this project's Hopper attention kernel without a part of its work, against the whole, in one process."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from cudadent42.bench.statistics import estimate_ratio
from cudadent42.cases import AttentionCase, Case
from cudadent42.profile.records import Ablation
from flashmoe_science.configs.hopper import Ablation as Part
from flashmoe_science.cuda import KernelKind, explain, forward
from flashmoe_science.errors import BuildError

BLOCKS = 15
_BLOCK_MS = 3.0
"""Of calls of each variant, at least one."""
_MOST_CALLS = 50
_WARM_UPS = 3


def ablate(case: Case, inputs: object, seed: int) -> tuple[tuple[Ablation, ...], str]:
    """What each part costs that can be left out, and why not where there is none.

    Sound as far as it goes: a part that is hidden behind another costs nothing here, and leaving it out shifts power
    and clocks; so a saving is what is exposed, at most.
    """
    if not isinstance(case, AttentionCase):
        return (), f"parts of the kernel cannot be left out for {case.operation.value}"
    query, key, value = inputs.tensors  # type: ignore[attr-defined]
    choice = explain(query, key, value, causal=case.causal)
    if choice.kernel is not KernelKind.HOPPER:
        return (), f"parts of the {choice.kernel.value} kernel cannot be left out, only of the Hopper kernel"
    masked = case.causal or case.seqlen_k % choice.configuration.block_n != 0
    parts = [Part.EXPONENTIALS, *([Part.MASK] if masked else []), Part.LOADS]

    def variant(part: Part) -> Callable[[], object]:
        configured = replace(choice, configuration=replace(choice.configuration, ablation=part))
        return lambda: forward(query, key, value, causal=case.causal, choice=configured)

    calls = {part: variant(part) for part in (Part.NONE, *parts)}
    try:
        for call in calls.values():
            for _ in range(_WARM_UPS):
                call()
    except BuildError as error:
        return (), f"a kernel with a part left out does not build: {error}"
    times = _times(calls, seed)
    return tuple(_ablation(part, times[Part.NONE], times[part], seed) for part in parts), ""


def _times(calls: dict[Part, Callable[[], object]], seed: int) -> dict[Part, list[float]]:
    """Milliseconds per call, by block; in every block each variant once, in random order."""
    generator = random.Random(seed)
    once = _milliseconds(calls[Part.NONE], 1)
    count = max(1, min(_MOST_CALLS, round(_BLOCK_MS / max(once, 1e-3))))
    times: dict[Part, list[float]] = {part: [] for part in calls}
    for _ in range(BLOCKS):
        for part in generator.sample(list(calls), len(calls)):
            times[part].append(_milliseconds(calls[part], count))
    return times


def _milliseconds(call: Callable[[], object], count: int) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    start.record()
    for _ in range(count):
        call()
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop)) / count


def _ablation(part: Part, whole: list[float], without: list[float], seed: int) -> Ablation:
    estimate = estimate_ratio(np.array(whole), np.array(without), seed)
    low, high = estimate.interval()
    return Ablation(
        part=part.name.lower(),
        latency_ms=float(np.median(without)),
        baseline_ms=float(np.median(whole)),
        saved=1 - 1 / estimate.ratio,
        saved_low=1 - 1 / low,
        saved_high=1 - 1 / high,
    )

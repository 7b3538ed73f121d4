"""From samples to the result: a pure function of the run folder's contents."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cudadent42.base.seeds import derived_seed
from cudadent42.decisions.floor import floor_ms
from cudadent42.decisions.prediction import predict
from cudadent42.decisions.schedule import control_name
from cudadent42.decisions.statistics import (
    RESAMPLES,
    Floats,
    RatioEstimate,
    estimate_ratio,
    geometric_mean,
    minimum_detectable_effect,
    noise_floor,
)
from cudadent42.decisions.verdicts import MIN_BLOCKS, decide, decide_many
from cudadent42.model.cases import Case
from cudadent42.model.records import (
    CacheState,
    Comparison,
    Plan,
    Refusal,
    Results,
    Sample,
    TimerKind,
    Verdict,
)
from cudadent42.model.script import Prediction

RULES = 3
"""Of deciding, counted up when the same samples may get another word or number. 1: blocks in which the processors were
taken away count like all others where more than a fifth of a case's carry a mark. 2: they never do where the clock on
the wall is read, and a case with too few others is refused. 3: so is one whose sides' windows are unlike."""

MOST_LEFT_OUT = 0.2
"""Of the blocks of a case, that may be left out for their marks."""

TAKEN_AWAY = frozenset({"preempted", "steal"})
"""Marks of blocks in which the work was ready and did not run. The clock on the wall went on; processor time and the
GPU's own time did not."""

LEAST_QUIET = 0.5
"""Of the blocks of a case that is timed by the clock on the wall: as many must have had the processors. Fewer, and what
is common to them may be luck, so the case is refused."""


SHORT_WINDOW_MS = 0.75
"""A quarter of the window in which the clock on the wall is read on a CPU."""

_UNSTEADY = 5.0
"""Margins that the interval of a control may reach from 1. A control's usual interval, half a margin to two, says no
more than the other side's own interval, which has the same noise in it."""


@dataclass(frozen=True)
class _Pair:
    """One implementation and the baseline on one case, over the blocks that hold both."""

    case: Case
    estimate: RatioEstimate
    latency_ms: float
    baseline_latency_ms: float
    flagged_blocks: int
    left_out: int
    disturbances: tuple[str, ...]
    detectable_effect: float
    refused: Refusal | None
    floor_ms: float


def compare(
    plan: Plan,
    samples: Sequence[Sample],
    skipped: Mapping[str, str],
    peaks: Mapping[str, float],
    *,
    rules: int = RULES,
) -> Results:
    """Each implementation against the baseline, per case and overall.

    ``skipped`` is ``BenchReport.skipped``; samples of what it names are left out. The candidate, whose
    result is the headline, is the first implementation of the plan that is not the baseline (the baseline
    if it is alone). ``rules``: those of an older run, to compute its results again.
    """
    table = _table(samples, skipped)
    others = [name for name in plan.implementations if name != plan.baseline]
    candidate = others[0] if others else plan.baseline
    control = _pairs(plan, table, control_name(plan.baseline), peaks, rules)
    floor = noise_floor([pair.estimate.ratio for pair in control])
    offsets = {pair.case.id: control_offset(pair.estimate, plan.margin) for pair in control}
    headline = _pairs(plan, table, candidate, peaks, rules) if others else []
    effects = [
        pair.detectable_effect for pair in control or headline if math.isfinite(pair.detectable_effect)
    ]
    mean = geometric_mean([pair.estimate for pair in headline])
    offset = (
        control_offset(geometric_mean([pair.estimate for pair in control]), plan.margin) if control else 0.0
    )
    low, high = mean.interval()
    refused = next((pair.refused for pair in headline if pair.refused), None)
    ratios, without_ratio = _ratios(headline, skipped)
    decided = headline and refused is None
    return Results(
        baseline=plan.baseline,
        candidate=candidate,
        speedup_geomean=mean.ratio,
        speedup_geomean_ci_low=low,
        speedup_geomean_ci_high=high,
        verdict=decide(mean, plan.margin, offset) if decided else Verdict.UNDECIDED,
        margin=plan.margin,
        noise_floor=floor,
        cases=_comparisons(plan, headline, candidate, offsets),
        others=tuple(
            comparison
            for name in others[1:]
            for comparison in _comparisons(plan, _pairs(plan, table, name, peaks, rules), name, offsets)
        ),
        control=_comparisons(plan, control, control_name(plan.baseline), {}),
        skipped=dict(skipped),
        peaks=dict(peaks),
        detectable_effect=float(np.median(effects)) if effects else math.nan,
        refused=refused,
        rules=rules,
        prediction=_prediction(plan, ratios, without_ratio),
    )


def candidate_ratios(
    plan: Plan, samples: Sequence[Sample], skipped: Mapping[str, str], peaks: Mapping[str, float]
) -> tuple[dict[str, RatioEstimate], dict[str, str]]:
    """Of the candidate, by ``Case.id``; and why the other cases have none."""
    others = [name for name in plan.implementations if name != plan.baseline]
    if not others:
        return _ratios([], skipped)
    return _ratios(_pairs(plan, _table(samples, skipped), others[0], peaks, RULES), skipped)


def _ratios(
    pairs: Sequence[_Pair], skipped: Mapping[str, str]
) -> tuple[dict[str, RatioEstimate], dict[str, str]]:
    """A refused measurement is none for a prediction either."""
    ratios = {pair.case.id: pair.estimate for pair in pairs if pair.refused is None}
    reasons = {pair.case.id: pair.refused.value for pair in pairs if pair.refused is not None}
    for key, reason in skipped.items():
        reasons.setdefault("/".join(key.split("/")[:2]), reason)
    return ratios, reasons


def _prediction(
    plan: Plan, ratios: Mapping[str, RatioEstimate], without_ratio: Mapping[str, str]
) -> Prediction | None:
    """None without a script, and where the script ran on a device of another kind."""
    if plan.script is None or plan.script.device != plan.device.partition(":")[0]:
        return None
    seed = derived_seed(plan.seed, "prediction")
    return predict(plan.script, ratios, left_out=without_ratio, seed=seed)


def control_offset(control: RatioEstimate, margin: float) -> float:
    """How far from 1 a control lies; where it is unsteady, how far its interval reaches.

    Between two runs of the same code an unsteady control has shown anything up to there, by luck near 1 or not.
    """
    low, high = control.interval()
    reach = max(high - 1.0, 1.0 / low - 1.0)
    return reach if reach > _UNSTEADY * margin else abs(control.ratio - 1.0)


Table = dict[str, dict[str, dict[int, Sample]]]


def _table(samples: Sequence[Sample], skipped: Mapping[str, str]) -> Table:
    """case -> implementation -> block -> sample."""
    table: Table = defaultdict(lambda: defaultdict(dict))
    for sample in samples:
        if sample.case not in skipped and f"{sample.case}/{sample.implementation}" not in skipped:
            table[sample.case][sample.implementation][sample.block] = sample
    return table


def _pairs(
    plan: Plan, table: Table, implementation: str, peaks: Mapping[str, float], rules: int
) -> list[_Pair]:
    pairs = []
    for case in plan.cases:
        rows = table.get(case.id, {})
        own, base = rows.get(implementation, {}), rows.get(plan.baseline, {})
        common = sorted(own.keys() & base.keys())
        if not common:
            continue
        disturbed = [block for block in common if own[block].flags]
        taken_away = [block for block in disturbed if TAKEN_AWAY & set(own[block].flags.split(","))]
        if rules == 1 or plan.timer is not TimerKind.CALL:
            taken_away = []
        blocks, refused = counted(common, disturbed, taken_away)
        latency, baseline_latency = _latencies(own, blocks), _latencies(base, blocks)
        seed = derived_seed(plan.seed, "bootstrap", case.id, implementation)
        floor = floor_ms(case, peaks)
        if rules >= 3 and refused is None and _wall_on_cpu(plan) and _unlike_windows(own, base, blocks):
            refused = Refusal.UNLIKE_WINDOWS
        medians = float(np.median(latency)), float(np.median(baseline_latency))
        if min(medians) < floor or min(*latency, *baseline_latency) <= 0:
            refused = Refusal.IMPOSSIBLE
        pairs.append(
            _Pair(
                case,
                _estimate(baseline_latency, latency, seed),
                *medians,
                len(disturbed),
                len(common) - len(blocks),
                _kinds([own[block].flags for block in disturbed]),
                math.nan
                if refused is Refusal.IMPOSSIBLE
                else minimum_detectable_effect(baseline_latency, latency),
                refused,
                floor,
            )
        )
    return pairs


def _wall_on_cpu(plan: Plan) -> bool:
    return plan.device == "cpu" and plan.timer is TimerKind.CALL and plan.cache is CacheState.WARM


def _unlike_windows(own: Mapping[int, Sample], base: Mapping[int, Sample], blocks: Sequence[int]) -> bool:
    """Whether one side's windows hold so few calls that they are short, and the other's another number.

    Which number fills a window is measured ahead of a case. While the processors are taken away a short call looks as
    if it filled one alone, and then it meets cold code and sleeping threads in each, however quiet the blocks are.
    """
    inner = [np.median([rows[block].inner for block in blocks]) for rows in (own, base)]
    window_ms = [
        np.median([rows[block].inner * rows[block].latency_ms for block in blocks]) for rows in (own, base)
    ]
    return bool(inner[0] != inner[1] and min(window_ms) < SHORT_WINDOW_MS)


def _estimate(baseline: Floats, latency: Floats, seed: int) -> RatioEstimate:
    """No ratio where a latency is not even positive."""
    if min(*baseline, *latency) <= 0:
        return RatioEstimate(math.nan, np.full(RESAMPLES, math.nan), len(latency))
    return estimate_ratio(baseline, latency, seed)


def counted(
    blocks: Sequence[int], disturbed: Collection[int], taken_away: Collection[int]
) -> tuple[list[int], Refusal | None]:
    """The blocks that count, and why they allow no verdict.

    ``taken_away``: those of the disturbed in which the clock went on while the work waited for a processor. Threads
    that spin at a barrier while their partner waits lose a whole time slice in every such block, in all of them alike:
    their latencies agree with each other, and say nothing of the code. So they never count; where more than half of
    the blocks are such, all are shown and none decides.
    """
    quiet = [block for block in blocks if block not in taken_away]
    if len(quiet) < LEAST_QUIET * len(blocks):
        return list(blocks), Refusal.DISTURBED
    chosen = undisturbed(quiet, [block for block in disturbed if block not in taken_away])
    return chosen, Refusal.TOO_FEW_BLOCKS if len(chosen) < MIN_BLOCKS else None


def undisturbed(blocks: Sequence[int], disturbed: Collection[int]) -> list[int]:
    """The blocks that count: those without a mark, if at most a fifth has one.

    The mark is the machine's, of the block as a whole, and set before anybody looks at a latency. Where more than a
    fifth has one, disturbance is the machine's normal state: then all blocks count, and the report says so.
    """
    left = [block for block in blocks if block not in disturbed]
    few = len(blocks) - len(left) <= MOST_LEFT_OUT * len(blocks)
    return left if few and len(left) >= MIN_BLOCKS else list(blocks)


def _kinds(flags: Sequence[str]) -> tuple[str, ...]:
    """The marks in ``Sample.flags``, the most frequent first."""
    return tuple(
        kind for kind, _ in Counter(kind for each in flags for kind in each.split(",")).most_common()
    )


def _latencies(rows: Mapping[int, Sample], blocks: Sequence[int]) -> Floats:
    return np.array([rows[block].latency_ms for block in blocks])


def _comparisons(
    plan: Plan, pairs: Sequence[_Pair], implementation: str, offsets: Mapping[str, float]
) -> tuple[Comparison, ...]:
    """``offsets``: how far from 1 the control of each case lies, by ``Case.id``."""
    sound = [pair for pair in pairs if pair.refused is None]
    verdicts = dict(
        zip(
            [pair.case.id for pair in sound],
            decide_many(
                [pair.estimate for pair in sound],
                plan.margin,
                [offsets.get(pair.case.id, 0.0) for pair in sound],
            ),
            strict=True,
        )
    )
    comparisons = []
    for pair in pairs:
        low, high = pair.estimate.interval()
        comparisons.append(
            Comparison(
                name=pair.case.name,
                dtype=pair.case.dtype,
                implementation=implementation,
                baseline=plan.baseline,
                speedup=pair.estimate.ratio,
                ci_low=low,
                ci_high=high,
                verdict=verdicts.get(pair.case.id, Verdict.UNDECIDED),
                latency_ms=pair.latency_ms,
                baseline_latency_ms=pair.baseline_latency_ms,
                blocks=pair.estimate.blocks,
                flagged_blocks=pair.flagged_blocks,
                left_out=pair.left_out,
                disturbances=pair.disturbances,
                refused=pair.refused,
                floor_ms=pair.floor_ms,
            )
        )
    return tuple(comparisons)

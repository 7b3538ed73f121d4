"""What a run folder offers to gates: its results, its verification, and a profile if it has one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from cudadent42.base.errors import UsageError
from cudadent42.base.reading import read_json
from cudadent42.decisions.gates import PROFILE_PREFIX, Evidence, Measured
from cudadent42.decisions.verdicts import REFUSALS
from cudadent42.model.records import Comparison, Plan, Refusal, Results, Verdict, VerifyReport
from cudadent42.runs.checking import load_checked
from cudadent42.runs.run_folder import RunFolder

PROFILE = "profile.json"
CASE_METRICS = ("speedup", "slowdown", "verdict", "latency_ms", "baseline_latency_ms", "flagged_share")
"""Metrics that every compared case has."""

RUN_METRICS = (
    "verification",
    "verdict",
    "speedup",
    "slowdown",
    "noise_floor",
    "detectable_effect",
    "flagged_share",
    "failed_checks",
    "not_timed",
)
"""Metrics of a run as a whole."""

_NO_MEASUREMENT = {refusal: REFUSALS[refusal] for refusal in Refusal if refusal is not Refusal.TOO_FEW_BLOCKS}
"""Refusals that leave no value to hold a gate against, in words; of too few blocks the interval says enough."""

WORDS = {
    "verification": ("passed", "failed"),
    "verdict": tuple(verdict.value for verdict in Verdict),
}
"""What a metric of these is one of; all others are numbers."""


def evidence_of(folder: Path) -> Evidence:
    """The metrics of a run folder. Raises UsageError where it cannot be read."""
    return evidence_from(load_checked(folder), read_profile(folder))


def evidence_from(run: RunFolder, profile: Mapping[str, Measured]) -> Evidence:
    """The metrics of a run that was read, and of its profile."""
    overall = _verification(run.verify) | _overall(run.plan, run.results)
    overall |= {f"{PROFILE_PREFIX}{name}": measured for name, measured in profile.items()}
    return Evidence(overall, _by_case(run.plan, run.results))


def evidence_before(plan: Plan) -> Evidence:
    """The metrics that a run of this plan can have, without values: to check gates against before it begins."""
    return Evidence(_verification(None) | _overall(plan, None), _by_case(plan, None))


def read_profile(folder: Path) -> dict[str, Measured]:
    """``metrics`` of ``profile.json``, and why it is ``missing`` others; empty where there is no profile."""
    path = folder / PROFILE
    try:
        document = read_json(path)
        missing = {
            str(name): Measured(math.nan, reason=str(why))
            for name, why in document.get("missing", {}).items()
        }
        metrics = document["metrics"]
        return missing | {
            str(name): Measured(float(value)) for name, value in metrics.items() if value is not None
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(
            f'{path} cannot be read ({error}); expected {{"metrics": {{name: number}}}}'
        ) from error


def _verification(verify: VerifyReport | None) -> dict[str, Measured]:
    if verify is None or not verify.cases:
        nothing = Measured(math.nan, reason="nothing was verified")
        return {"verification": nothing, "failed_checks": nothing}
    failed = sum(not case.passed for case in verify.cases)
    return {
        "verification": Measured("failed" if failed else "passed"),
        "failed_checks": Measured(float(failed)),
    }


def _overall(plan: Plan, results: Results | None) -> dict[str, Measured]:
    if results is None:
        nothing = Measured(math.nan, reason="the run did not get as far as a comparison")
        return {name: nothing for name in RUN_METRICS if name not in ("verification", "failed_checks")}
    timed = {row.case_id for row in results.cases}
    metrics = {
        "noise_floor": _known(results.noise_floor, "the run had no A/A control"),
        "detectable_effect": _known(results.detectable_effect, "nothing was compared"),
        "not_timed": Measured(float(sum(case.id not in timed for case in plan.cases))),
    }
    if not results.cases:
        nothing = Measured(math.nan, reason="no case was timed")
        return metrics | dict.fromkeys(("speedup", "slowdown", "verdict", "flagged_share"), nothing)
    blocks = sum(row.measured_blocks for row in results.cases)
    metrics["flagged_share"] = Measured(sum(row.flagged_blocks for row in results.cases) / max(1, blocks))
    metrics["verdict"] = Measured(results.verdict.value)
    if results.refused in _NO_MEASUREMENT:
        nothing = Measured(math.nan, reason=_NO_MEASUREMENT[results.refused])
        return metrics | dict.fromkeys(("speedup", "slowdown"), nothing)
    return metrics | _ratios(
        results.speedup_geomean,
        results.speedup_geomean_ci_low,
        results.speedup_geomean_ci_high,
        min(row.blocks for row in results.cases),
        control_excess(results),
    )


def _by_case(plan: Plan, results: Results | None) -> dict[str, dict[str, Measured]]:
    """Cases of the plan that were not compared are there too, without a value."""
    rows = {row.case_id: row for row in results.cases} if results else {}
    control = {row.case_id: row.speedup for row in results.control} if results else {}
    metrics: dict[str, dict[str, Measured]] = {name: {} for name in CASE_METRICS}
    for case in plan.cases:
        row = rows.get(case.id)
        if row is None or results is None:
            reason = _why_not(results, case.id)
            for name in CASE_METRICS:
                metrics[name][case.id] = Measured(math.nan, reason=reason)
            continue
        ratios = _ratios(
            row.speedup,
            row.ci_low,
            row.ci_high,
            row.blocks,
            _excess(control.get(case.id, 1.0), results.margin),
        )
        times = {
            "latency_ms": Measured(row.latency_ms),
            "baseline_latency_ms": Measured(row.baseline_latency_ms),
        }
        if row.refused in _NO_MEASUREMENT:
            nothing = Measured(math.nan, reason=_NO_MEASUREMENT[row.refused])
            ratios, times = dict.fromkeys(ratios, nothing), dict.fromkeys(times, nothing)
        plain = {
            "verdict": Measured(row.verdict.value),
            "flagged_share": Measured(row.flagged_blocks / max(1, row.measured_blocks)),
            **times,
        }
        for name, measured in (ratios | plain).items():
            metrics[name][case.id] = measured
    return metrics


def _ratios(speedup: float, low: float, high: float, blocks: int, excess: float) -> dict[str, Measured]:
    """The speed-up and its reverse. ``excess`` widens the interval by what the control differs from itself beyond the
    margin: what this run shows between two runs of the same code is no evidence."""
    wide_low, wide_high = low / (1.0 + excess), high * (1.0 + excess)
    speedups = Measured(speedup, wide_low, wide_high, blocks, from_blocks=(low, high))
    slowdowns = Measured(
        1.0 / speedup - 1.0,
        1.0 / wide_high - 1.0,
        1.0 / wide_low - 1.0,
        blocks,
        from_blocks=(1.0 / high - 1.0, 1.0 / low - 1.0),
    )
    return {"speedup": speedups, "slowdown": slowdowns}


def control_excess(results: Results) -> float:
    """How far the geometric mean of the controls lies from 1 beyond the margin, as a share: what the interval of the
    run's speed-up is widened by."""
    return _excess(_mean_ratio(results.control), results.margin)


def _excess(control: float, margin: float) -> float:
    return max(0.0, abs(control - 1.0) - margin)


def _mean_ratio(rows: Sequence[Comparison]) -> float:
    ratios = [row.speedup for row in rows if row.speedup > 0 and math.isfinite(row.speedup)]
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 1.0


def _known(value: float, otherwise: str) -> Measured:
    return Measured(value, reason="" if math.isfinite(value) else otherwise)


def _why_not(results: Results | None, case: str) -> str:
    """Why a case has no comparison."""
    if results is None:
        return "the run ended before it was compared"
    keys = [key for key in results.skipped if key == case or key.startswith(f"{case}/")]
    return f"not timed: {results.skipped[keys[0]]}" if keys else "not timed"

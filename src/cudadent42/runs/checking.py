"""Whether a run folder's results follow from its samples. Decisions and reports rest on folders for which they do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from cudadent42.base.errors import UsageError
from cudadent42.base.serialise import encode
from cudadent42.decisions.claims import with_claim
from cudadent42.decisions.compare import RULES, compare
from cudadent42.decisions.margin import lower, upper
from cudadent42.model.records import Comparison, Results, Verdict
from cudadent42.runs.run_folder import MANIFEST, RESULTS, SAMPLES, RunFolder, load_run, results_digest

_RELATIVE_TOLERANCE = 1e-6
"""Of numbers: the same samples and seeds give the same resamples, up to rounding in another NumPy's sums."""


def load_checked(path: Path) -> RunFolder:
    """``load_run`` of a folder whose results follow from its samples, and are those that the run wrote.

    Raises UsageError where they do not, or where a newer version decided by rules that this one does not have. Samples
    say nothing of cases that were left out, of limits and of findings: for these the manifest has a digest of the whole
    file. A run without samples (``--no-save-csv``) and without a digest is taken as it is. Without samples it has no
    claim: nothing bears one out.
    """
    run = load_run(path)
    if run.results is None:
        return run
    if run.samples:
        _check_against_samples(path, run, run.results)
    if run.manifest.results_sha256 not in ("", results_digest(path)):
        raise UsageError(
            f"{path / RESULTS} is not what the run wrote: {MANIFEST} has another SHA-256 of it, so it was changed "
            f"after the run; without {RESULTS}, `cudadent42 report {path}` compares the samples again"
        )
    return run if run.samples else replace(run, results=_without_samples(run.results))


def _check_against_samples(path: Path, run: RunFolder, results: Results) -> None:
    """Raises UsageError."""
    if results.rules > RULES:
        raise UsageError(
            f"{path / RESULTS} was decided by rules {results.rules}; this version knows up to {RULES}: upgrade it"
        )
    compared = legacy_differences if results.rules == 0 else differences
    difference = next(compared(results, _again(run, results)), None)
    if difference is not None:
        raise UsageError(
            f"{path / RESULTS} does not follow from {SAMPLES}: {difference}. One of them was changed after the run; "
            f"without {RESULTS}, `cudadent42 report {path}` compares the samples again"
        )


def _without_samples(results: Results) -> Results:
    if not results.claim_allowed:
        return results
    return replace(
        results, claim_allowed=False, claim_reason=f"there is no {SAMPLES} from which it would follow"
    )


_LEGACY_SLACK = 0.05
"""Between a ratio as it was computed before rules were counted, from the medians, and as it is now, from the blocks:
what the committed runs show is up to 3 %."""


def legacy_differences(stated: Results, computed: Results) -> Iterator[str]:
    """Of results from before rules were counted, by several methods: what none of these can have made of samples."""
    pairs = [
        ("the run", stated.speedup_geomean, computed.speedup_geomean_ci_low, computed.speedup_geomean_ci_high)
    ]
    rows = {_key(row): row for row in (*computed.cases, *computed.others, *computed.control)}
    for row in (*stated.cases, *stated.others, *stated.control):
        if (again := rows.get(_key(row))) is None:
            yield f"{_key(row)} is compared, and has no samples"
            continue
        pairs.append((_key(row), row.speedup, again.ci_low, again.ci_high))
        yield from _claim(_key(row), row.verdict, row.ci_low, row.ci_high, stated.margin)
    yield from _claim(
        "the run",
        stated.verdict,
        stated.speedup_geomean_ci_low,
        stated.speedup_geomean_ci_high,
        stated.margin,
    )
    for what, speedup, low, high in pairs:
        if speedup < low / (1.0 + _LEGACY_SLACK) or speedup > high * (1.0 + _LEGACY_SLACK):
            yield f"the speed-up of {what} is {speedup:.4g}, and the samples give {low:.4g} to {high:.4g}"


def _claim(what: str, verdict: Verdict, low: float, high: float, margin: float) -> Iterator[str]:
    """A word that its own interval does not carry."""
    if (verdict is Verdict.FASTER and low <= upper(margin)) or (
        verdict is Verdict.SLOWER and high >= lower(margin)
    ):
        yield f"{what} is called {verdict.value}, and its interval is {low:.4g} to {high:.4g}"


def _key(row: Comparison) -> str:
    return f"{row.name}/{row.dtype}/{row.implementation}"


def _again(run: RunFolder, results: Results) -> Results:
    again = compare(run.plan, run.samples, results.skipped, results.peaks, rules=results.rules or 1)
    verified = run.verify is not None and run.verify.passed
    return with_claim(
        replace(again, integrity=results.integrity, planning_ms=results.planning_ms), verified=verified
    )


def differences(stated: Results, computed: Results) -> Iterator[str]:
    """Where two results differ, in words, one at a time."""
    yield from _differences("", encode(stated), encode(computed))


def _differences(where: str, stated: Any, computed: Any) -> Iterator[str]:
    if isinstance(stated, dict) and isinstance(computed, dict):
        for key in dict.fromkeys((*stated, *computed)):
            yield from _differences(f"{where}.{key}" if where else key, stated.get(key), computed.get(key))
    elif isinstance(stated, list) and isinstance(computed, list):
        if len(stated) != len(computed):
            yield f"{where} has {len(stated)} entries, and the samples give {len(computed)}"
        for index, pair in enumerate(zip(stated, computed, strict=False)):
            yield from _differences(f"{where}[{index}]", *pair)
    elif not _alike(stated, computed):
        yield f"{where} is {stated}, and the samples give {computed}"


def _alike(stated: object, computed: object) -> bool:
    if isinstance(stated, float) and isinstance(computed, float):
        return math.isclose(stated, computed, rel_tol=_RELATIVE_TOLERANCE, abs_tol=1e-12)
    return stated == computed

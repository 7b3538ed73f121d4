"""From a profile to a ranked list of causes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from cudadent42.profiles.quantities import (
    Origin,
    Quantities,
    elapsed_share,
    peak_copy_gbps,
    peak_gflops,
    quantities,
)
from cudadent42.profiles.records import (
    SCHEMA_VERSION,
    Certainty,
    Diagnosis,
    Finding,
    Kind,
    Profile,
    Source,
    Threshold,
)
from cudadent42.profiles.rules import PLACEHOLDER, Rule, builtin_rules
from cudadent42.profiles.times import times

WORTH = 0.03
"""What could give less of the time than this is not worth an experiment, and is not called a cause."""

BUSY = 0.6
"""From this share on, a unit counts as what the kernel runs against; Nsight Compute's own rules draw the line there."""

UNKNOWN, LATENCY, UNFILLED = "unknown", "latency", "idle multiprocessors"
"""What a kernel runs against where that cannot be told, where no unit is busy, and where that is because most of the
time that is left belongs to multiprocessors with nothing to do."""

_CERTAINTY = {
    Origin.MEASURED: Certainty.MEASURED,
    Origin.MODEL: Certainty.INFERRED,
    Origin.STATIC: Certainty.SUSPECTED,
}
_WEIGHT = {Certainty.MEASURED: 1.0, Certainty.INFERRED: 0.6, Certainty.SUSPECTED: 0.4}
"""What a bound on the gain counts for in the ranking, by how well the cause is known."""
_KIND_WEIGHT = {Kind.CAUSE: 1.0, Kind.SYMPTOM: 0.5, Kind.UNEXPLAINED: 0.1, Kind.LIMIT: 0.0}
"""A symptom says where the time goes; a cause that gives as much says what to do about it."""

_CEILINGS = ("roof_share", "compute_share", "traffic_share", "memory_leads")
_OF_CPU = ("roof_share", "can_leave_parts_out", "on_cpu")
_WITHOUT_COUNTERS = (
    *_CEILINGS,
    *("launch_count", "gap_share", "grid_blocks", "grid_fill", "waves", "tail_share", "sm_idle_share"),
)
"""What a profile of a GPU should have even without counters."""

_OTHER_MEANS = ("ablation_", "cpu_", "static_", "spill_", "cluster_")
"""Quantities that counters are no source of: a profile with counters lacks nothing without them."""

_UNITS = {
    "tensor_share": "matrix products",
    "dram_share": "memory",
    "l2_share": "the L2 cache",
    "shared_share": "shared memory",
    "xu_share": "the special function unit",
    "fma_share": "multiply-adds",
    "alu_share": "integer and logic",
    "issue_share": "instruction issue",
}
_PREFERENCE = {"matrix products": 0.9, "memory": 0.75}
"""These are named even if another unit is a little busier: what they move also goes through the caches."""

_LIMITERS = {
    "fit_registers": "registers",
    "fit_shared": "shared memory",
    "fit_warps": "the block's size",
    "fit_blocks": "the number of blocks",
    "fit_barriers": "barriers",
}


def diagnose(profile: Profile, rules: Sequence[Rule] | None = None) -> Diagnosis:
    """What holds the kernel back, best experiment first, as far as the profile tells."""
    available = quantities(profile)
    findings: list[Finding] = []
    unasked: dict[str, str] = {}
    rules = builtin_rules() if rules is None else rules
    for rule in rules:
        if any(c.name in available and c.holds(available[c.name].value) for c in rule.unless):
            continue
        if any(c.name in available and not c.holds(available[c.name].value) for c in rule.when):
            continue  # answered, whatever else is missing
        missing = [name for name in rule.names() if name not in available]
        if missing:
            if _should_be_known(missing, profile):
                unasked[rule.id] = _why_missing(missing, profile)
        else:
            findings.append(_finding(rule, available, profile))
    findings.sort(key=_rank, reverse=True)
    causes = tuple(f for f in findings if f.kind is not Kind.LIMIT and f.gain >= WORTH)
    minor = tuple(f for f in findings if f.kind is not Kind.LIMIT and f.gain < WORTH)
    limits = tuple(f for f in findings if f.kind is Kind.LIMIT)
    bound, share = _bound(available, profile)
    return Diagnosis(
        schema_version=SCHEMA_VERSION,
        case=profile.case,
        implementation=profile.implementation,
        kernel=profile.kernel,
        source=profile.source,
        bound=bound,
        bound_share=share,
        summary=_summary(profile, available, causes, len(unasked), len(rules)),
        causes=causes,
        minor=minor,
        limits=limits,
        thresholds=() if profile.device == "cpu" else _thresholds(available),
        not_examined=unasked,
        next_step=causes[0].experiment if causes else _nothing_left(profile, limits, unasked),
        notes=profile.notes,
        rules=len(rules),
        times=times(profile),
        ablations=profile.ablations,
    )


def _should_be_known(missing: Sequence[str], profile: Profile) -> bool:
    """Whether a profile like this one should have what a rule lacks: else the rule is not for it."""
    if profile.device == "cpu":
        return all(name in _OF_CPU or name.startswith("cpu_") for name in missing)
    if profile.source is Source.MODEL:
        return all(name in _WITHOUT_COUNTERS for name in missing)
    if missing[0].startswith("cluster_") and profile.metrics.get("cluster_blocks", 0.0) > 1:
        return True
    return not missing[0].startswith(_OTHER_MEANS)


def _why_missing(missing: Sequence[str], profile: Profile) -> str:
    for name in missing:
        if name in profile.missing:
            return profile.missing[name]
        if name in _CEILINGS and not (
            math.isfinite(peak_gflops(profile)) and math.isfinite(peak_copy_gbps(profile))
        ):
            return "this machine's ceilings were not all measured"
        if name.startswith("cpu_"):
            counted = (reason for key, reason in profile.missing.items() if key.startswith("cpu_"))
            return next(counted, "instructions and cache misses were not counted")
    return f"{missing[0]} is not known"


def _finding(rule: Rule, available: Quantities, profile: Profile) -> Finding:
    gain = rule.gain.share(available)
    if rule.capped:
        gain = min(gain, available["headroom"].value)
    return Finding(
        rule=rule.id,
        title=rule.title,
        kind=rule.kind,
        evidence=_filled(rule.evidence, available, profile),
        meaning=rule.meaning,
        experiment=rule.experiment,
        gain=gain,
        certainty=_CERTAINTY[min(available[condition.name].origin for condition in rule.when)],
    )


def _rank(finding: Finding) -> float:
    return finding.gain * _KIND_WEIGHT[finding.kind] * _WEIGHT[finding.certainty]


def _bound(available: Quantities, profile: Profile) -> tuple[str, float]:
    """The unit that the kernel runs against, and the share of the time that it is busy. Where none is: an unfilled chip
    if most of what the busiest unit leaves is time of multiprocessors without work, else latency.

    Without counters that is only known where one of the two measured ceilings is near.
    """
    shares = {unit: elapsed_share(available, name) for name, unit in _UNITS.items() if name in available}
    if shares:
        most = max(shares.values())
        unit = next(name for name in shares if shares[name] >= most * _PREFERENCE.get(name, 1.0))
        if shares[unit] >= BUSY:
            return unit, shares[unit]
        if _uncounted(available, profile):  # one of those may be the busy one
            return UNKNOWN, shares[unit]
        return (UNFILLED if _idle(available) > (1 - shares[unit]) / 2 else LATENCY), shares[unit]
    if "roof_share" not in available:
        return UNKNOWN, math.nan
    share = available["roof_share"].value
    unit = "memory" if available["memory_leads"].value else "matrix products"
    return (unit if share >= BUSY else UNKNOWN), share


def _idle(available: Quantities) -> float:
    """The share of the multiprocessors' time in which they have nothing to do."""
    return available["sm_idle_share"].value if "sm_idle_share" in available else 0.0


def _uncounted(available: Quantities, profile: Profile) -> list[str]:
    """Units of which a profile with counters lacks the share."""
    if profile.source is not Source.COUNTERS:
        return []
    return [unit for name, unit in _UNITS.items() if name not in available]


def _summary(
    profile: Profile, available: Quantities, causes: Sequence[Finding], unasked: int, rules: int
) -> str:
    bound, share = _bound(available, profile)
    basis = (
        "by the GPU's counters"
        if profile.source is Source.COUNTERS
        else "by times, ceilings and the compiled code, without counters, so less certainly"
    )
    if bound == UNKNOWN and math.isfinite(share) and profile.source is Source.MODEL:
        what = (
            f"It is neither at the ceiling for arithmetic nor at the one for memory: it reaches {share:.0%} of what "
            f"they allow, {basis}; these do not tell whether a wait or another unit holds it back instead"
        )
    elif bound == UNKNOWN and math.isfinite(share):
        what = (
            f"What it runs against is not known: the busiest unit that was counted works {share:.0%} of the time, "
            f"and these units were not counted: {', '.join(_uncounted(available, profile))}"
        )
    elif bound == UNKNOWN and "roof_share" in profile.missing:
        what = f"What it runs against is not known: {profile.missing['roof_share']}"
    elif bound == UNKNOWN:
        what = "What it runs against is not known: there are neither counters nor measured ceilings"
    elif bound == UNFILLED:
        what = (
            f"It does not fill the chip: multiprocessors have nothing to do for {_idle(available):.0%} of their time, "
            f"and its busiest unit works {share:.0%} of the time, {basis}"
        )
    elif bound == LATENCY:
        what = f"It runs against latency: its busiest unit works {share:.0%} of the time, {basis}"
    elif profile.source is Source.MODEL:
        what = f"It runs against {bound}: it reaches {share:.0%} of that ceiling, {basis}"
    else:
        what = f"It runs against {bound}, busy {share:.0%} of the time, {basis}"
    if not causes and unasked:
        return (
            f"{what}. No verdict on what else holds it back: {unasked} of {rules} rules could not be asked."
        )
    if not causes and bound == UNKNOWN:
        return f"{what}. That nothing else was found says little."
    if not causes and profile.source is Source.MODEL:
        return f"{what}. Nothing stands out, but these numbers say nothing of {_unseen(profile)}."
    if not causes:
        return f"{what}. Nothing found that could give {WORTH:.0%} or more."
    first = causes[0]
    return f"{what}. First: {first.title[0].lower()}{first.title[1:]}, at most {first.gain:.0%} of the time."


def _unseen(profile: Profile) -> str:
    """What a profile without counters cannot tell."""
    if profile.device == "cpu":
        return "what the cores wait for"
    return "bank conflicts, what warps wait for, and multiprocessors that finish early"


def _nothing_left(profile: Profile, limits: Sequence[Finding], unasked: Mapping[str, str]) -> str:
    if unasked:
        return f"To know more, profile again where nothing is missing: {wants(unasked)}"
    if limits:
        return limits[0].experiment
    if profile.source is Source.MODEL:
        return "Nothing stands out without counters; open them (see the notes) before looking further"
    return "Nothing stands out; look for less work instead: fewer bytes, fewer operations, a fused neighbour"


def wants(unasked: Mapping[str, str]) -> str:
    """Why rules could not be asked, each reason once."""
    return "; ".join(dict.fromkeys(unasked.values()))


# ---------------------------------------------------------------- thresholds


def _thresholds(available: Quantities) -> tuple[Threshold, ...]:
    """The values that are wanted of every kernel, met or not."""

    def value(name: str) -> float:
        return available[name].value if name in available else math.nan

    def below(title: str, name: str, limit: float) -> Threshold:
        share = value(name)
        met = None if math.isnan(share) else share < limit
        return Threshold(title, share, f"< {limit:.0%}", met, "not known" if met is None else "")

    def above(title: str, name: str, limit: float, why_not: str) -> Threshold:
        share = value(name)
        unknown = math.isnan(share)
        met = None if unknown or why_not else share > limit
        return Threshold(title, share, f"> {limit:.0%}", met, "not known" if unknown else why_not)

    specialised = "specialised warps: meant to be lower" if value("asynchronous") == 1 else ""
    not_memory = "" if value("memory_leads") == 1 else "not memory-bound"
    not_tensor = "" if value("tensor_leads") == 1 else "not bound by matrix products"
    occupancy = "occupancy" if "occupancy" in available else "occupancy_limit"
    return (
        below("shared-memory bank conflicts", "bank_conflicts", 0.05),
        above("occupancy", occupancy, 0.5, specialised),
        above("memory throughput", "dram_share", 0.5, not_memory),
        above("tensor pipe", "tensor_share", 0.6, not_tensor),
        below("instructions that spill", "local_share", 0.01),
        below("idle last wave", "tail_share", 0.1),
        below("imbalance between multiprocessors", "imbalance_share", 0.1),
    )


# ---------------------------------------------------------------- words

_UNKNOWN_VALUE = {
    "%": "an unknown share",
    "count": "an unknown number of",
    "bytes": "an unknown number of bytes",
}


def _filled(text: str, available: Quantities, profile: Profile) -> str:
    """The text with its quantities put in."""

    def put(match: object) -> str:
        name, style = match[1], match[2]  # type: ignore[index]
        if name == "limiter":
            return _limiter(profile)
        return (
            shown(available[name].value, style or "")
            if name in available
            else _UNKNOWN_VALUE.get(style, "unknown")
        )

    return PLACEHOLDER.sub(put, text)


def _limiter(profile: Profile) -> str:
    fits = {words: profile.metrics[name] for name, words in _LIMITERS.items() if name in profile.metrics}
    return min(fits, key=lambda words: fits[words]) if fits else "something"


def shown(value: float, style: str) -> str:
    """A quantity in words: ``%``, ``count``, ``bytes``, ``rate`` (GFLOP/s), ``hz``, or a number of decimals."""
    if style == "%":
        return f"{value:.0%}" if value >= 0.095 or value == 0 else f"{value:.1%}"
    if style == "count":
        return f"{value:,.0f}"
    if style == "bytes":
        return _scaled(value, "B")
    if style == "rate":
        return _scaled(value * 1e9, "FLOP/s")
    if style == "hz":
        return _scaled(value, "Hz")
    return f"{value:{style}f}"


def _scaled(value: float, unit: str) -> str:
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"

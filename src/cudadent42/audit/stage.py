"""The audit stage: what is claimed is raced again where a candidate has neither the clock nor the answers."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cudadent42.audit.cases import case_of, claimed, hidden_cases, rows_to_audit, says_faster
from cudadent42.audit.party import AuditLostError, DisturbedError, EarlyError, UncountedError
from cudadent42.audit.race import BrokenError, DeclinedError, LateError, Race, Ring, ring
from cudadent42.audit.referee import Referee
from cudadent42.correctness.second_draw import wrong_result
from cudadent42.decisions.claims import SHORT_MS
from cudadent42.model.cases import Case
from cudadent42.model.integrity import Breach, Confirmation, Finding, Grade, Spent, Way
from cudadent42.model.records import Comparison, Plan, Results, TimerKind, Verdict, VerifiedCase
from cudadent42.operations import definition
from cudadent42.sandbox.launch import Sandbox
from cudadent42.worker.branch import Branch

SHARE, SEALED_SHARE = 0.025, 0.18
"""Of the time that measuring took: a further case is audited where one like those before ends within it."""

FEWEST_CASES = 2
"""That are audited however long it takes."""

CONFIRMED_SHARE = 0.5
"""Of what a call saved in the run, that it has to save in the audit: inputs are cold there, and each call's are copied,
which costs both sides alike. What is not computed at all saves nothing there. So it is with the logarithm of the
speed-up."""

CONTRADICTED_RATIO = 1.5
"""From this speed-up on a saving that the audit does not find is a finding; below, it may be noise."""

SLOWER_RATIO, SLOWER_MS = 1.5, 0.5
"""By which a call of a case that is not called faster may take longer in the audit than by the run's ratio: threads
that spin before they sleep keep a processor from those that have to wake, for some 0.3 ms a call."""

SLOWED_RATIO = 2.0
"""The baseline beside the candidate against the baseline alone."""

COMPARABLE_RATIO, COMPARABLE_MS = 1.5, 0.02
"""The baseline in the audit against the run's, and what one call by itself takes beyond one of many: on a GPU waiting
for it, on a CPU code and threads that have to wake. Where it takes longer, that is what the audit's clock saw, or
somebody else has the machine meanwhile."""

WAKING_MS = 0.01
"""Of a candidate's call in the audit that its speed-up is not held to: the least that waking for it takes."""

ALONE = "repeat on an idle machine with --sealed; if the difference stays, the run is not to be believed"

OnProgress = Callable[[float, str], None]


@dataclass
class Audited:
    """What an audit came to."""

    findings: list[Finding] = field(default_factory=list)
    confirmations: list[Confirmation] = field(default_factory=list)
    hidden_checked: int = 0
    why_not: str = ""
    spent: Spent = field(default_factory=Spent)
    """Of all its processes."""


def audit(
    plan: Plan,
    results: Results,
    *,
    log: Path,
    measured_s: float,
    sealed: bool = False,
    nursery: Branch | None = None,
    sandbox: Sandbox | None = None,
    on_progress: OnProgress = lambda fraction, what: None,
) -> Audited:
    """Races what ``results`` call faster again; with ``sealed``, all.

    ``measured_s``: what measuring took. ``nursery``: a branch of the worker's; without one a process is started.
    ``sandbox`` confines each process that runs an implementation, and goes with no branch.
    """
    audited = Audited()
    names = claimed(results, sealed=sealed, on_cpu=plan.device == "cpu")
    if not names:
        return audited
    if definition(plan.operation).numerics().refresh is None:
        if results.verdict is not Verdict.FASTER:
            return audited
        audited.why_not = (
            f"the operation {plan.operation} does not say which of its inputs change between calls"
        )
        return audited
    chance = random.SystemRandom()  # a candidate sees numbers that it drew, and must not foresee the next
    budget_s = (SEALED_SHARE if sealed else SHARE) * measured_s / len(names)
    began_s, ran_s = time.perf_counter(), time.process_time()
    others_s = 0.0
    try:
        with Referee(log, plan.operation, nursery, sandbox) as referee:
            try:
                for name in names:
                    _audit_one(
                        plan,
                        results,
                        name,
                        referee,
                        chance=chance,
                        audited=audited,
                        budget_s=budget_s,
                        sealed=sealed,
                        on_progress=on_progress,
                    )
            finally:
                others_s = referee.processor_s()
    except (AuditLostError, BrokenError) as error:
        audited.why_not = str(error)
    ran_s, wall_s = time.process_time() - ran_s, time.perf_counter() - began_s
    audited.spent = Spent(ran_s + others_s, wall_s)
    return audited


def _audit_one(
    plan: Plan,
    results: Results,
    name: str,
    referee: Referee,
    *,
    chance: random.Random,
    audited: Audited,
    budget_s: float,
    sealed: bool,
    on_progress: OnProgress,
) -> None:
    def clock() -> float:
        """As the budget was measured."""
        on_cpu = plan.timer is TimerKind.CPU
        return time.process_time() + referee.processor_s() if on_cpu else time.monotonic()

    def spent_s(both: Ring) -> float:
        """With ``sealed`` nobody has fewer cases looked at who takes long to load or to prepare."""
        return clock() - (both.preparing_s if sealed else 0.0)

    began_s = clock()
    case: Case | None = None
    try:
        with ring(plan, referee, name, chance) as both:
            both.clock = clock
            for case in hidden_cases(plan, chance, sealed=sealed):
                _check_hidden(both, case, name, audited)
            rows = rows_to_audit(results, name, chance, sealed=sealed, on_cpu=plan.device == "cpu")
            raced_s = spent_s(both)
            stop_s = raced_s + budget_s if sealed else began_s + budget_s
            for number, row in enumerate(rows):
                now_s = spent_s(both)
                if number >= FEWEST_CASES and now_s + (now_s - raced_s) / number > stop_s:
                    break
                case = case_of(plan, row)
                on_progress(number / len(rows), f"{case.id}/{name}")
                look = _look_at_gain if says_faster(results, row) else _look_at_speed
                _confirm(both, case, row, audited, budget_s / FEWEST_CASES, look)
    except (LateError, EarlyError) as error:
        where = case.id if case is not None else ""
        audited.findings.append(Finding(Breach.LATE_WORK, Grade.FAILED, name, where, str(error)))
    except UncountedError as error:
        where = case.id if case is not None else ""
        audited.findings.append(Finding(Breach.FAST_ONLY_IN_RUN, Grade.FAILED, name, where, str(error)))
    except DisturbedError as error:
        where = case.id if case is not None else ""
        audited.findings.append(Finding(Breach.BASELINE_SLOWED, Grade.FAILED, name, where, str(error)))
    except (AuditLostError, BrokenError) as error:
        where = case.id if case is not None else ""
        clears = "see audit.log in the run folder"
        audited.findings.append(Finding(Breach.AUDIT_DIED, Grade.SUSPECT, name, where, str(error), clears))


def _check_hidden(both: Ring, case: Case, name: str, audited: Audited) -> None:
    try:
        judged = both.check(case)
    except DeclinedError:
        return  # to say so is honest
    audited.hidden_checked += len(judged)
    if wrong := wrong_result(judged, lambda: _again(both, case)):
        shape = definition(case.operation).shape
        evidence = f"{shape(case)}: {wrong.detail}"
        audited.findings.append(Finding(Breach.HIDDEN_SHAPE, Grade.FAILED, name, "", evidence))


def _again(both: Ring, case: Case) -> tuple[VerifiedCase, ...]:
    """Results of other values; none where the candidate does not do now what it did before."""
    try:
        return both.check(case)
    except DeclinedError:
        return ()


@dataclass(frozen=True)
class _Look:
    """What is asked of the races of a case."""

    enough: Callable[[Comparison, Race], bool]
    again: Callable[[Comparison, Race, str], bool]
    confirms: Callable[[Comparison, Race], bool]
    contradicted: Callable[[Comparison, Race, str], Finding | None]


def _confirm(both: Ring, case: Case, row: Comparison, audited: Audited, budget_s: float, look: _Look) -> None:
    name = row.implementation
    try:
        race = both.race(case, row.baseline_latency_ms, budget_s, lambda race: look.enough(row, race))
        wrong = wrong_result(race.judged, lambda: _again(both, case))
        if wrong is None and look.again(row, race, case.id):
            race = both.race(case, row.baseline_latency_ms, budget_s)
            wrong = wrong_result(race.judged, lambda: _again(both, case))
    except DeclinedError as error:
        evidence = f"it declines in the audit what it did in the run: {error}"
        audited.findings.append(Finding(Breach.FAST_ONLY_IN_RUN, Grade.FAILED, name, case.id, evidence))
        return
    if wrong is not None:
        evidence = f"a result of inputs that it saw for the first time is wrong: {wrong.detail}"
        audited.findings.append(Finding(Breach.FAST_ONLY_IN_RUN, Grade.FAILED, name, case.id, evidence))
    elif contradiction := look.contradicted(row, race, case.id):
        audited.findings.append(contradiction)
    confirmed = wrong is None and look.confirms(row, race)
    audited.confirmations.append(_confirmation(row, race, case.id, confirmed=confirmed))


def _confirmation(row: Comparison, race: Race, case: str, *, confirmed: bool) -> Confirmation:
    return Confirmation(
        case=case,
        implementation=row.implementation,
        saved_ms=race.saved,
        ci_low_ms=race.low_ms,
        ci_high_ms=race.high_ms,
        latency_ms=race.candidate_ms,
        baseline_latency_ms=race.baseline_ms,
        blocks=len(race.saved_ms),
        calls_checked=len(race.judged),
        calls_compared=race.compared,
        confirmed=confirmed,
        way=race.way,
        comparable=comparable(row, race),
    )


def gain_is_confirmed(row: Comparison, race: Race) -> bool:
    """Of a case that is called faster."""
    return race.low_ms > 0.0 and race.saved >= CONFIRMED_SHARE * row.saved_ms and _bears_out(row, race)


def each_block_confirms(row: Comparison, race: Race) -> bool:
    """Whether the worst block would do, so that there is no need of more."""
    worst_ms = race.saved_ms[0]
    return worst_ms > 0.0 and worst_ms >= CONFIRMED_SHARE * row.saved_ms and _bears_out(row, race)


def _bears_out(row: Comparison, race: Race) -> bool:
    return comparable(row, race) and as_much_faster(row, race)


def as_much_faster(row: Comparison, race: Race) -> bool:
    """Whether the speed-up is borne out too: half of what was saved bears out any, where the run says that nearly all
    of the baseline's time was."""
    own_ms = race.candidate_ms - WAKING_MS
    return own_ms <= 0.0 or row.speedup <= 1.0 or race.baseline_ms >= own_ms * row.speedup**CONFIRMED_SHARE


def comparable(row: Comparison, race: Race) -> bool:
    """Whether the audit's clock shows what the run's did."""
    return race.baseline_ms <= COMPARABLE_RATIO * row.baseline_latency_ms + COMPARABLE_MS


def wants_another(row: Comparison, race: Race, case: str) -> bool:
    """Whether one race is not enough: nobody is accused of what one saw, and nobody loses a claim because another
    process had the machine meanwhile. Where launching is what takes longer, a second one would show the same."""
    if race.way is Way.SHARED:
        untold = race.high_ms >= CONFIRMED_SHARE * row.saved_ms and not gain_is_confirmed(row, race)
        disturbed = row.saved_ms >= SHORT_MS and untold
    else:
        disturbed = race.way is not Way.QUEUED and not comparable(row, race)
    return disturbed or contradicted(row, race, case) is not None


def _is_too_short(row: Comparison, race: Race) -> bool:
    """Whether waking for each call, which takes some tens of microseconds on a busy processor and more for one side's
    code than for another's, may be all that the audit saw: that accuses nobody."""
    return row.saved_ms < SHORT_MS or race.baseline_ms > COMPARABLE_RATIO * row.baseline_latency_ms


def contradicted(row: Comparison, race: Race, case: str) -> Finding | None:
    """Where the run shows a large difference, and processes apart show that there is none of that size."""
    if (
        not comparable(row, race)
        or (race.way is Way.SHARED and _is_too_short(row, race))
        or row.speedup < CONTRADICTED_RATIO
        or race.high_ms >= CONFIRMED_SHARE * row.saved_ms
    ):
        return None
    seen = (
        f"a call saves {row.saved_ms:.4g} ms in the run, and {race.saved:.4g} ms "
        f"({race.low_ms:.4g} to {race.high_ms:.4g}) where every call has inputs of its own"
    )
    if row.baseline_latency_ms > SLOWED_RATIO * race.baseline_ms:
        evidence = (
            f"the baseline takes {row.baseline_latency_ms:.4g} ms beside it and {race.baseline_ms:.4g} ms in a process "
            f"that never loaded it; {seen}"
        )
        return Finding(Breach.BASELINE_SLOWED, Grade.SUSPECT, row.implementation, case, evidence, ALONE)
    evidence = (
        f"it takes {row.latency_ms:.4g} ms in the run and {race.candidate_ms:.4g} ms in the audit; {seen}"
    )
    return Finding(Breach.FAST_ONLY_IN_RUN, Grade.SUSPECT, row.implementation, case, evidence, ALONE)


def least_saved_ms(row: Comparison, race: Race) -> float:
    """Of a case that is not called faster: what a call has to save in the audit, mostly less than nothing. It may take
    `SLOWER_RATIO` of what it would by the run's ratio."""
    return race.baseline_ms * (1.0 - SLOWER_RATIO / row.speedup) - SLOWER_MS


def speed_is_confirmed(row: Comparison, race: Race) -> bool:
    """Of a case that is not called faster: it is not clearly slower than the run says."""
    return row.speedup > 0.0 and race.high_ms >= least_saved_ms(row, race)


def slower_than_said(row: Comparison, race: Race, case: str) -> Finding | None:
    """Where a case that is called as fast, or not much slower, is much slower in processes apart. On a GPU nobody is
    accused of that."""
    if race.way is not Way.SHARED or speed_is_confirmed(row, race):
        return None
    evidence = (
        f"it takes {row.latency_ms:.4g} ms in the run, the baseline {row.baseline_latency_ms:.4g} ms; where every "
        f"call has inputs of its own, {race.candidate_ms:.4g} and {race.baseline_ms:.4g} ms"
    )
    return Finding(Breach.FAST_ONLY_IN_RUN, Grade.SUSPECT, row.implementation, case, evidence, ALONE)


def _no_block_is_slow(row: Comparison, race: Race) -> bool:
    return row.speedup > 0.0 and race.saved_ms[0] >= least_saved_ms(row, race)


_look_at_gain = _Look(each_block_confirms, wants_another, gain_is_confirmed, contradicted)
_look_at_speed = _Look(
    _no_block_is_slow,
    lambda row, race, case: slower_than_said(row, race, case) is not None,
    speed_is_confirmed,
    slower_than_said,
)

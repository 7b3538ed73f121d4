"""What a worker of a fleet brings back, as the record that the journal keeps of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cudadent42.base.errors import UsageError
from cudadent42.fleet.perform import blocks_in
from cudadent42.fleet.task import Block, Returned
from cudadent42.runs.run_folder import load_run
from cudadent42.tune import journal as events
from cudadent42.tune.engine import Confirmation
from cudadent42.tune.space import DEFAULT
from cudadent42.tune.state import CaseState, Job, State

_DIGITS = 7
"""Of a millisecond: a tenth of a nanosecond."""


@dataclass(frozen=True)
class Confirming:
    """A confirmation by one worker."""

    case: str
    arm: str
    number: int
    """That no other of this tuning has, of former processes either."""
    worker: str
    unit: str
    blocks: int


Work = Job | Confirming


def race_returned(
    state: State, names: Mapping[str, str], folder: Path, work: Job, change: Returned
) -> events.JobReturned:
    """Of a race, with an error of its own where blocks are missing.

    Args:
        names: arms by their implementations.
        folder: the tuning's.
    """
    arms = (DEFAULT, *work.arms)
    implementations = [state.setup.arms[arm] for arm in arms]
    blocks = change.blocks or _left_behind(state, folder, work)
    error = "" if change.unwritable else change.error  # what is missing is measured elsewhere
    unfit = {names[name]: reason for name, reason in (change.unfit or {}).items() if name in names}
    if DEFAULT in unfit and raced_before(state.cases[work.case]):
        # Its machine is at fault: the job is another's.
        error = error or not_any_more(work.case, unfit[DEFAULT])
        unfit = {}
    rest = [arm for arm in work.arms if arm not in unfit]
    short = len(blocks) < work.blocks and not change.unwritable
    if not error and short and rest and DEFAULT not in unfit:
        error = f"{len(blocks)} of {work.blocks} blocks were measured"
    return events.JobReturned(
        job=work.name,
        attempt=work.attempt,
        worker=change.worker,
        arms=arms,
        blocks=tuple(
            tuple(round(block.latencies_ms.get(name, 0.0), _DIGITS) for name in implementations)
            for block in blocks
        ),
        unfit=unfit,
        seconds=change.seconds,
        error=error,
        lost=change.lost,
    )


def raced_before(case: CaseState) -> bool:
    """Whether the default was, so that it is right and fits."""
    return bool(case.rows.get(DEFAULT))


def not_any_more(case: str, reason: str) -> str:
    return f"the default was raced on {case} before, and cannot be now: {reason}"


def machine_confirmed(work: Confirming, run: str, result: Confirmation) -> events.MachineConfirmed:
    """``run``: the confirmation's folder, from the tuning's."""
    return events.MachineConfirmed(
        case=work.case,
        arm=work.arm,
        attempt=work.number,
        worker=work.worker,
        unit=work.unit,
        run=run,
        ratio=result.ratio,
        low=result.low,
        high=result.high,
        verdict=result.verdict,
        holds=result.holds,
        reason=result.reason,
        default_ms=result.default_ms,
    )


def _left_behind(state: State, folder: Path, work: Job) -> tuple[Block, ...]:
    """Whole blocks of a worker that was lost."""
    try:
        open_run = state.cases[work.case].jobs[work.name].open[work.attempt]
        return blocks_in(load_run(folder / open_run))
    except (UsageError, KeyError):
        return ()

"""What is still to be measured of a case: a pure function of its state."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from cudadent42.decisions.racing import blocks_of, chunks
from cudadent42.tune.journal import ARMS_OF_A_JOB
from cudadent42.tune.state import CaseState, Job, JobState, State


def jobs_of(state: State, case: CaseState) -> list[Job]:
    """What is still to be measured in the case's rung. Arms that went out leave their jobs."""
    rules = state.setup.rules
    alive = case.alive
    # As the rung began: who went out meanwhile has left a gap, and nobody moves into another job.
    departed = {each.leaving.arm for each in case.departed}
    began = [arm for arm in case.raced[1:] if arm not in departed]
    begun = in_jobs(case)
    began = [arm for arm in began if arm not in case.out or arm in begun]
    jobs = []
    for name, arms in _parts(case, began):
        done = case.jobs.get(name, JobState(arms))
        left = tuple(arm for arm in done.arms if arm in alive)
        blocks = blocks_of(rules, case.rung) - done.blocks
        if left and blocks > 0:
            jobs.append(Job(name, case.case, case.rung, left, blocks, done.attempts + 1))
    return jobs


def _parts(case: CaseState, began: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The jobs of a case's rung by name. In the first, each round of a search has its own."""
    together = [began]
    if case.rung == 0 and len(case.added) > 1:
        ends = list(itertools.accumulate(case.added))
        rounds = [set(case.raced[1 + end - new : 1 + end]) for end, new in zip(ends, case.added, strict=True)]
        together = [[arm for arm in began if arm in new] for new in rounds]
    for number, arms in enumerate(together):
        prefix = f"{case.case}#{case.rung}." + (f"{number}." if number else "")
        for part, each in enumerate(chunks(arms, ARMS_OF_A_JOB)):
            yield f"{prefix}{part}", each


def in_jobs(case: CaseState) -> set[str]:
    """Arms that jobs of the case's rung were begun with."""
    begun = f"{case.case}#{case.rung}."
    return {arm for name, job in case.jobs.items() if name.startswith(begun) for arm in job.arms}

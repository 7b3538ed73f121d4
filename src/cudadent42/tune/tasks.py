"""A tuning's work as tasks of a fleet."""

from __future__ import annotations

from cudadent42.base.seeds import derived_seed
from cudadent42.fleet.task import Checks, Task, Way
from cudadent42.tune.coordinator import folder_name
from cudadent42.tune.journal import JobStarted, Setup
from cudadent42.tune.machine import confirming_plan, race_plan
from cudadent42.tune.returned import Work
from cudadent42.tune.state import Job
from cudadent42.tune.verified import Verified

_SEEDS = 2**32


def run_of(work: Work) -> str:
    """The run folder, from the tuning's."""
    if isinstance(work, Job):
        return f"races/{folder_name(work.name)}-{work.attempt}"
    return f"confirmed/{folder_name(_name(work))}-{work.number}"


def task_of(setup: Setup, work: Work, verified: Verified, *, audits: bool) -> Task:
    """The tables are not asked: the default of a tuning is the usual choice."""
    name, run = _name(work), run_of(work)
    if isinstance(work, Job):
        seed = derived_seed(setup.plan.seed, name, work.attempt) % _SEEDS
        plan = race_plan(setup, work, seed)
        return Task(name, work.attempt, Way.RACE, plan, run, tables=False, right=verified.of(plan))
    seed = derived_seed(setup.plan.seed, name, work.number) % _SEEDS
    plan = confirming_plan(setup, work.case, work.arm, work.blocks, seed)
    return Task(
        name, work.number, Way.RUN, plan, run, work.worker, checks=Checks(audits=audits), tables=False
    )


def started(work: Work, task: Task) -> tuple[JobStarted, ...]:
    """What is on record before a task is offered."""
    if not isinstance(work, Job):
        return ()
    return (JobStarted(work.name, work.attempt, work.case, work.arms, task.plan.seed, task.run),)


def _name(work: Work) -> str:
    return work.name if isinstance(work, Job) else f"{work.case}#confirm@{work.unit}"

"""What is audited: some of the cases that are claimed, and shapes that are in no plan."""

from __future__ import annotations

import random
from collections.abc import Sequence

from cudadent42.decisions.claims import SHORT_MS, claimed_rows, is_short, rows_that_count
from cudadent42.decisions.sampling import highest_first, sample_size
from cudadent42.model.cases import Case
from cudadent42.model.records import Comparison, Plan, Results, Verdict
from cudadent42.operations import definition

HIDDEN_SHAPES, SEALED_HIDDEN_SHAPES = 2, 6
"""Results of so many shapes are checked that the plan does not have."""


def claimed(results: Results, *, sealed: bool, on_cpu: bool) -> tuple[str, ...]:
    """The implementations that an audit is about: those called faster; on a CPU also those that are called as fast or
    slower, as somebody may gain by less than the truth; with ``sealed``, all."""
    if sealed:
        rows = (*results.cases, *results.others)
        return tuple(dict.fromkeys(row.implementation for row in rows))
    if results.verdict is Verdict.FASTER or any(row.verdict is Verdict.FASTER for row in results.cases):
        return (results.candidate,)
    if on_cpu and results.cases and results.verdict is not Verdict.UNDECIDED:
        return (results.candidate,)
    return ()


def says_faster(results: Results, row: Comparison) -> bool:
    """Whether a case is part of what is called faster: by itself, or where only all of them together are."""
    rows = claimed_rows(results, row.implementation)
    return row.verdict is Verdict.FASTER or (results.verdict is Verdict.FASTER and row in rows)


def rows_to_audit(
    results: Results, implementation: str, chance: random.Random, *, sealed: bool, on_cpu: bool
) -> list[Comparison]:
    """Of what is claimed, a random sample that would meet a false claim (`sampling.sample_size`); with ``sealed``, all.

    In the order in which they are audited, as there may not be the time for all: the highest speed-up, so that no case
    of a claim has a higher one than a case that was confirmed; others as they are drawn by what each gains, which
    nobody can foresee; and last those that are too short to be confirmed on a CPU, with ``sealed``."""
    gains = results.verdict is Verdict.FASTER
    rows = (claimed_rows if gains and not sealed else rows_that_count)(results, implementation)
    short = [row for row in rows if on_cpu and is_short(row, SHORT_MS)]
    told = [row for row in rows if row not in short] or short
    order = highest_first([row.speedup for row in told], chance)
    drawn = [told[number] for number in order[: len(told) if sealed else sample_size(len(told))]]
    return [*drawn, *(row for row in short if row not in told)] if sealed else drawn


def case_of(plan: Plan, row: Comparison) -> Case:
    return next(case for case in plan.cases if (case.name, case.dtype) == (row.name, row.dtype))


def hidden_cases(plan: Plan, chance: random.Random, *, sealed: bool) -> Sequence[Case]:
    """Shapes within the ranges of the plan's, that are none of them."""
    unplanned = definition(plan.operation).unplanned
    if unplanned is None:
        return ()
    return unplanned(plan.cases, chance, SEALED_HIDDEN_SHAPES if sealed else HIDDEN_SHAPES)

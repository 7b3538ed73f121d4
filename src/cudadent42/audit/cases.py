"""What is audited: some of the cases that are claimed, and shapes that are in no plan."""

from __future__ import annotations

import random
from collections.abc import Sequence

from cudadent42.decisions.claims import claimed_rows, rows_that_count
from cudadent42.decisions.sampling import drawn_by_gain, sample_size
from cudadent42.model.cases import Case
from cudadent42.model.records import Comparison, Plan, Results, Verdict
from cudadent42.operations import definition

HIDDEN_SHAPES, SEALED_HIDDEN_SHAPES = 2, 6
"""Results of so many shapes are checked that the plan does not have."""


def claimed(results: Results, *, sealed: bool) -> tuple[str, ...]:
    """The implementations that an audit is about: those called faster; with ``sealed``, all."""
    if sealed:
        rows = (*results.cases, *results.others)
        return tuple(dict.fromkeys(row.implementation for row in rows))
    if results.verdict is Verdict.FASTER or any(row.verdict is Verdict.FASTER for row in results.cases):
        return (results.candidate,)
    return ()


def rows_to_audit(
    results: Results, implementation: str, chance: random.Random, *, sealed: bool
) -> list[Comparison]:
    """Of what is claimed, a random sample that would meet a false claim (`sampling.sample_size`); with ``sealed``, all.

    Drawn by what each gains, in an order that nobody can foresee: the audit may not have the time for all."""
    rows = (rows_that_count if sealed else claimed_rows)(results, implementation)
    order = drawn_by_gain([row.speedup for row in rows], chance)
    return [rows[number] for number in order[: len(rows) if sealed else sample_size(len(rows))]]


def case_of(plan: Plan, row: Comparison) -> Case:
    return next(case for case in plan.cases if (case.name, case.dtype) == (row.name, row.dtype))


def hidden_cases(plan: Plan, chance: random.Random, *, sealed: bool) -> Sequence[Case]:
    """Shapes within the ranges of the plan's, that are none of them."""
    unplanned = definition(plan.operation).unplanned
    if unplanned is None:
        return ()
    return unplanned(plan.cases, chance, SEALED_HIDDEN_SHAPES if sealed else HIDDEN_SHAPES)

"""Whom the workers of a fleet have verified: what one has done, no other does again.

They have one kind of device, one driver and the same sources, so who is right on one of them is right on all. It is in
the coordinator's memory alone: after a kill it is asked once more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from cudadent42.fleet.task import Right
from cudadent42.model.cases import Case
from cudadent42.model.records import Plan


class Verified:
    def __init__(self) -> None:
        self._on_case: defaultdict[str, set[str]] = defaultdict(set)
        """By ``Case.id``, implementations that are right on it."""
        self._anywhere: defaultdict[str, set[str]] = defaultdict(set)
        """By dtype, those that are right on the inputs that depend on no case."""

    def add(self, case: Case, names: Iterable[str]) -> None:
        """These are right on the case, and so on all that is asked before it."""
        names = tuple(names)
        self._on_case[case.id].update(names)
        self._anywhere[case.dtype].update(names)

    def of(self, plan: Plan) -> Right:
        """Of a plan of one case."""
        (case,) = plan.cases
        anywhere, on_case = self._anywhere[case.dtype], self._on_case[case.id]
        names = plan.implementations
        return Right(
            tuple(name for name in names if name in anywhere),
            tuple(name for name in names if name in on_case),
        )

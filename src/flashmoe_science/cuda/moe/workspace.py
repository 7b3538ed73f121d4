"""The workspace of the ways that sort rows by expert."""

from __future__ import annotations

from typing import NamedTuple

from flashmoe_science.cuda.moe.problem import MoeProblem
from flashmoe_science.cuda.moe.routing import TICKETS_BYTES, Routing
from flashmoe_science.cuda.workspace import place


class SortedWorkspace(NamedTuple):
    """Where its parts begin, in bytes."""

    tickets: int
    """Eight int32 counters, of which a product takes one."""
    expert_offsets: int
    sorted_slots: int
    counts: int
    """Of routing."""
    inner: int
    """The activated rows (slots, intermediate), in sorted order."""
    rows: int
    """The second product's rows (slots, hidden), by slot."""
    total: int


def sorted_workspace(problem: MoeProblem, routing: Routing) -> SortedWorkspace:
    row_bytes = problem.slots * problem.dtype.itemsize
    return SortedWorkspace(
        *place(
            TICKETS_BYTES,
            routing.offsets_bytes,
            routing.slots_bytes,
            routing.counts_bytes,
            row_bytes * problem.intermediate,
            row_bytes * problem.hidden,
        )
    )

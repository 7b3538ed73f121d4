"""What is planned once a step, apart from the calls that are compared, and what a layer has of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cudadent42.model import text
from cudadent42.model.records import Results

LAYERS = 32
"""That share the plan of a step: as many as models of about 8 billion parameters have, such as Llama 3.1 8B."""

HEADS = ("Case", "Implementation", "Call", "Plan of a step", f"Layer of {LAYERS}")
"""Of a table's columns."""


@dataclass(frozen=True)
class Planning:
    """Of one implementation on one case."""

    case: str
    """``Case.id``."""
    implementation: str
    call_ms: float
    """The median that is compared."""
    plan_ms: float

    @property
    def layer_ms(self) -> float:
        """A call, and its part of a plan that ``LAYERS`` share."""
        return self.call_ms + self.plan_ms / LAYERS

    @property
    def cells(self) -> tuple[str, ...]:
        """Under ``HEADS``, not escaped."""
        names = text.clean(self.case), text.implementation(self.implementation)
        return *names, *map(text.latency, (self.call_ms, self.plan_ms, self.layer_ms))


def plannings(results: Results | None) -> tuple[Planning, ...]:
    """By implementation, in the order in which they were timed; none of what has no latency."""
    if results is None:
        return ()
    rows = (*results.cases, *results.others, *results.control)
    calls = {(row.implementation, row.case_id): row.latency_ms for row in rows}
    calls |= {(row.baseline, row.case_id): row.baseline_latency_ms for row in rows}
    return tuple(
        Planning(case, name, call_ms, results.planning_ms[f"{case}/{name}"])
        for (name, case), call_ms in calls.items()
        if f"{case}/{name}" in results.planning_ms
    )


def planning_lines(results: Results | None) -> Iterator[str]:
    """A sentence or two for each implementation that plans."""
    timed = plannings(results)
    for name in dict.fromkeys(each.implementation for each in timed):
        own = [each for each in timed if each.implementation == name]
        shares = [each.layer_ms / each.call_ms for each in own if each.call_ms > 0]
        line = (
            f"{text.implementation(name)} plans once a step, apart from its calls, which are compared without it: "
            f"{_span([each.plan_ms for each in own], text.latency)}."
        )
        if shares:
            share = _span(shares, text.ratio)
            line += f" With the plan shared by {LAYERS} layers, each takes {share} the time of its call."
        yield line


def _span(values: Sequence[float], written: Callable[[float], str]) -> str:
    low, high = written(min(values)), written(max(values))
    return low if low == high else f"{low} to {high}"

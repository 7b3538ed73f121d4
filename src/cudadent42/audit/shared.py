"""Turns on inputs in shared memory, one slot a call: on the CPU.

They are copied into memory of the contestant's own just before the call, three sets by turns, so no call can do the
work of a later one.
"""

from __future__ import annotations

from cudadent42.audit.messages import Answer, Ask
from cudadent42.audit.prepared import AUDITED, SETS, Arenas, Prepared
from cudadent42.audit.slots import Slot, slots
from cudadent42.correctness.truth import find_truth, judge_gathered
from cudadent42.model.device import synchronize

CANDIDATES = 1
"""Of the judge's arenas, the other contestant's."""


class SharedTurns:
    """`prepared.Turns`, for up to ``calls`` calls."""

    def __init__(self, prepared: Prepared, arenas: Arenas, calls: int) -> None:
        self._prepared = prepared
        like = prepared.result_like
        self._arenas: tuple[tuple[Slot, ...], ...] = tuple(
            tuple(slots(memory, calls, prepared.written[0], like)) for memory in arenas
        )

    def wake(self, ask: Ask) -> None:
        """A processor needs none."""

    def fill(self, ask: Ask) -> None:
        """The same values into all arenas: no contestant sees another's. Drawing them takes longer than copying."""
        for number in range(ask.calls):
            values = self._prepared.draw(ask.seed, number)
            for arena in self._arenas:
                for shared, own in zip(arena[number].inputs, values, strict=True):
                    shared.copy_(own)
                arena[number].output.fill_(float("nan"))

    def run(self, ask: Ask) -> None:
        prepared = self._prepared
        with prepared.implementation.context():
            for number, slot in enumerate(self._arenas[0][: ask.calls]):
                for own, shared in zip(prepared.written[number % SETS], slot.inputs, strict=True):
                    own.detach().copy_(shared)
                slot.output.copy_(prepared.result(number, ask.pace))
        synchronize(prepared.device)

    def show(self, ask: Ask) -> str:
        """Nothing: all outputs lie in shared memory, and the process is stopped."""
        return ""

    def fetch(self, ask: Ask) -> None:
        """They are there."""

    def judge(self, ask: Ask) -> Answer:
        """The values are made again from the seed: what lies in the shared memory now may be the candidate's."""
        prepared = self._prepared
        judged = []
        for number in ask.chosen:
            prepared.draw(ask.seed, number)
            truth = find_truth(prepared.case, prepared.sets[number % SETS])
            result = self._arenas[CANDIDATES][number].output
            judged.append(judge_gathered(truth, ask.implementation, result, AUDITED))
        return Answer(judged=tuple(judged))

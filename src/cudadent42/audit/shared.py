"""Turns on inputs in shared memory: on the CPU.

The referee writes the inputs of a call into a contestant's window when the output of the one before is taken out, so
nobody can do the work of a later call, or of several together. All other inputs and outputs are in the referee's own
memory meanwhile, which no contestant shares: no call finds its result there.

An implementation is prepared on tensors that lie in the window, a slot for each set of inputs. So nothing has to be
copied before it is called, and who rewrites this in its own process has no copy to leave out.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from cudadent42.audit.messages import SETS, Answer, Ask
from cudadent42.audit.prepared import AUDITED, Arenas, Prepared
from cudadent42.audit.slots import Slot, bytes_of, slots
from cudadent42.correctness.differences import most_difference
from cudadent42.correctness.truth import find_truth, judge_gathered
from cudadent42.model.device import synchronize

STORE = 2
"""Of the judge's arenas, the one in which it has all calls: their inputs, its own outputs, the other side's."""

AwaitCall = Callable[[bool], None]
"""Returns when the inputs of the next call are there. Told whether to wait for them awake."""


class SharedTurns:
    """`prepared.Turns`, for up to ``calls`` calls. ``began`` and ``done`` are called before each and after it."""

    def __init__(
        self, prepared: Prepared, arenas: Arenas, calls: int, began: AwaitCall, done: Callable[[], None]
    ) -> None:
        self._prepared = prepared
        self._began, self._done = began, done
        like, changing = prepared.result_like, prepared.written[0]
        self.input_bytes, self.output_bytes = bytes_of(changing), bytes_of((like,))
        self._window = slots(arenas[0], len(prepared.sets), changing, like)
        self._store: list[Slot] = (
            slots(arenas[STORE], calls, (*changing, like), like) if len(arenas) > STORE else []
        )

    def wake(self, ask: Ask) -> None:
        """A processor needs none."""

    def fill(self, ask: Ask) -> None:
        """The same values for both sides: drawing them takes longer than copying."""
        for number, slot in enumerate(self._store[: ask.calls]):
            values = self._prepared.draw(ask.seed, number, large=number == ask.large)
            for stored, own in zip(slot.inputs[:-1], values, strict=True):
                stored.copy_(own)

    def run(self, ask: Ask) -> None:
        prepared = self._prepared
        copied = [
            [
                (own.detach(), shared)
                for own, shared in zip(written, slot.inputs, strict=True)
                if own.data_ptr() != shared.data_ptr()
            ]
            for written, slot in zip(prepared.written, self._window, strict=True)
        ]
        with prepared.implementation.context():
            for number in range(ask.calls):
                self._began(ask.awake)
                for own, shared in copied[number % SETS]:
                    own.copy_(shared)
                self._window[number % SETS].output.copy_(prepared.result(number, ask.pace))
                self._done()
        synchronize(prepared.device)

    def show(self, ask: Ask) -> str:
        """Nothing: the referee has taken all outputs, each when its call was done."""
        return ""

    def compare(self, ask: Ask) -> tuple[int, ...]:
        outputs = ((slot.inputs[-1], slot.output) for slot in self._store[: ask.calls])
        return tuple(number for number, (own, other) in enumerate(outputs) if not _alike(own, other))

    def fetch(self, ask: Ask) -> None:
        """They are there."""

    def judge(self, ask: Ask) -> Answer:
        """The values are made again from the seed."""
        prepared = self._prepared
        judged = []
        for number in ask.chosen:
            if number == ask.large and not prepared.has_large:
                continue  # it was a call like all others
            prepared.draw(ask.seed, number, large=number == ask.large)
            truth = find_truth(prepared.case, prepared.sets[number % SETS])
            judged.append(judge_gathered(truth, ask.implementation, self._store[number].output, AUDITED))
        return Answer(judged=tuple(judged))


def _alike(own: Tensor, other: Tensor) -> bool:
    """False where either is no number, and where one was computed with less precision than their dtype has."""
    mine, its = own.float(), other.float()
    return bool((mine - its).square().sum() <= most_difference(own.dtype) ** 2 * mine.square().sum())

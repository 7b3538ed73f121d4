"""Inputs and outputs of a bout on the CPU, in the referee's own memory: no contestant finds there what is not for it.

The judge draws inputs into a memory that it shares with the referee, which takes them from there. Each call is given
its own through the window of its side, and the output is taken from there when it is done.
"""

from __future__ import annotations

import mmap
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from types import TracebackType

from cudadent42.audit.party import EarlyError

_PARTS = 8
"""In which inputs are written."""

_WORD, _APART = 8, 128
"""Bytes of a word, and of how many words one is kept back until all others are written: who looks at inputs while they
come, and begins with what is there, has no whole row of anything."""

_GLANCES, _GLANCE_BYTES = 8, 64
"""At an output when it is said to be there, ahead of the copy: that takes as long as a short call's work, and who runs
ahead of it could finish meanwhile what it had said to be done."""


class Side(Enum):
    JUDGE = 0
    CANDIDATE = 1


@contextmanager
def _words(memory: mmap.mmap, start: int, stop: int, phase: int) -> Iterator[memoryview]:
    """Those that are kept back, of the bytes between. Nothing is left of the view after it: a mapping that somebody
    views cannot be closed."""
    with ExitStack() as views:
        whole = views.enter_context(memoryview(memory))
        words = views.enter_context(views.enter_context(whole[start:stop]).cast("Q"))
        yield views.enter_context(words[phase::_APART])


@dataclass(frozen=True)
class _Inputs:
    """Of one call."""

    others: bytes
    """All of them, with zeros where a word is kept back."""
    phase: int
    """The first of those words."""
    kept_back: bytes


class Store:
    """A context manager. The arguments are file descriptors: of the two windows, and of the judge's store.

    In a window lie a call's inputs and then its output, in a place for each of a contestant's ``sets``, which the calls
    take by turns; in the store, for each call, inputs and the outputs of both."""

    def __init__(self, judges_window: int, candidates_window: int, store: int, sets: int) -> None:
        self._resources = ExitStack()
        self._sets = sets
        self._windows = {
            Side.JUDGE: self._mapped(judges_window),
            Side.CANDIDATE: self._mapped(candidates_window),
        }
        self._store = self._mapped(store)
        self._inputs: list[_Inputs] = []
        self._chance = random.SystemRandom()
        self._glances: list[int] = []
        """Where in the output of the call that goes on."""
        self._outputs: dict[Side, dict[int, bytes]] = {side: {} for side in Side}
        self._input_bytes = self._output_bytes = 0
        self._nothing = b""
        """NaN in the place of an output."""

    def _mapped(self, descriptor: int) -> mmap.mmap:
        return self._resources.enter_context(mmap.mmap(descriptor, 0))

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._resources.close()

    def arrange(self, input_bytes: int, output_bytes: int) -> None:
        """Of each call of the case that comes."""
        self._input_bytes, self._output_bytes = input_bytes, output_bytes
        self._inputs = []
        self._nothing = b"\xff" * output_bytes

    def clear(self, calls: int) -> None:
        """Takes the inputs of so many calls out of the store, and forgets the outputs of earlier ones."""
        self._inputs = []
        hidden = bytes(self._input_bytes)
        for at in map(self._start, range(calls)):
            stop = at + self._input_bytes
            phase = self._chance.randrange(min(_APART, self._input_bytes // _WORD))
            with _words(self._store, at, stop, phase) as some:
                kept_back = some.tobytes()
                some[:] = memoryview(hidden)[: len(kept_back)].cast("Q")
            self._inputs.append(_Inputs(self._store[at:stop], phase, kept_back))
            self._store[at:stop] = hidden
        self._outputs = {side: {} for side in Side}

    def feed(self, side: Side, number: int) -> None:
        """A call's inputs into its window, and NaN where its output will be.

        From the back: who looks for inputs that have just come has the first of them, queries or activations, last, and
        so can begin with nothing ahead of the clock. Words from everywhere come last of all, from the back too."""
        window, inputs, offset = self._windows[side], self._inputs[number], self._place(number)
        start = offset + self._input_bytes
        window[start : start + self._output_bytes] = self._nothing
        most = max(self._output_bytes - _GLANCE_BYTES, 0) + 1
        self._glances = [start + self._chance.randrange(most) for _ in range(_GLANCES)]
        part = -(-self._input_bytes // _PARTS)
        for first in reversed(range(0, self._input_bytes, max(part, 1))):
            some = inputs.others[first : first + part]
            window[offset + first : offset + first + len(some)] = some
        with _words(window, offset, start, inputs.phase) as kept_back:
            kept_back[::-1] = memoryview(inputs.kept_back).cast("Q")[::-1]

    def take(self, side: Side, number: int) -> None:
        """A call's output out of its window. Raises EarlyError where it is not what it was when it was said to be
        there."""
        window, start = self._windows[side], self._place(number) + self._input_bytes
        stop = start + self._output_bytes
        glances = [window[at : min(at + _GLANCE_BYTES, stop)] for at in self._glances]
        output = window[start:stop]
        for at, glance in zip(self._glances, glances, strict=True):
            if not output.startswith(glance, at - start):
                raise EarlyError("an output was still being written when the call was said to be done")
        self._outputs[side][number] = output

    def lay_out(self, calls: int) -> None:
        """The outputs of both into the store, for the judge."""
        for number in range(calls):
            at = self._start(number) + self._input_bytes
            for side in Side:
                self._store[at : at + self._output_bytes] = self._outputs[side].get(number, self._nothing)
                at += self._output_bytes

    def _place(self, number: int) -> int:
        """Of a call in a window."""
        return number % self._sets * (self._input_bytes + self._output_bytes)

    def _start(self, number: int) -> int:
        return number * (self._input_bytes + 2 * self._output_bytes)

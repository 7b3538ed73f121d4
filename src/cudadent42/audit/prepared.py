"""A case with an implementation's calls on it, whichever way its turns go."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from cudadent42.audit.messages import Answer, Ask, Pace
from cudadent42.base.seeds import derived_seed
from cudadent42.correctness.forms import wrong_kind
from cudadent42.model.cases import Case
from cudadent42.model.device import synchronize
from cudadent42.model.implementations import Call, Implementation
from cudadent42.operations import numerics
from cudadent42.operations.interface import Inputs

SETS = 3
"""Of the contestant's own, which the calls use by turns."""

AUDITED = "audited"
"""``VerifiedCase.input`` of results of an audit."""


UNLIKE = 0.2
"""Root mean square of the difference between two results, relative to the results': rounding in any dtype that is raced
makes a tenth of it at most, and a result of other inputs four times as much. A twentieth of the entries that are wrong
makes it too."""


class WrongOutputError(Exception):
    """A call returned what is no plain tensor."""


@dataclass(frozen=True)
class Prepared:
    """One case and one implementation. Sets of inputs are the contestant's own memory."""

    case: Case
    device: str
    implementation: Implementation
    anew: bool
    """Whether it copies its inputs, and so is prepared again for each call."""
    sets: tuple[Inputs, ...]
    written: tuple[tuple[Tensor, ...], ...]
    """Of each set, the tensors whose values change."""
    calls: tuple[Call, ...]
    stale: Any
    """What a call returned on earlier values, as the copies have it in the place of a call's result."""

    @property
    def result_like(self) -> Tensor:
        return self.sets[0].result_like

    def draw(self, seed: int, number: int) -> tuple[Tensor, ...]:
        """The values of slot ``number`` into the set that its call uses: what does not change differs between the
        sets. Returns the tensors that were written."""
        refresh = numerics(self.case).refresh
        assert refresh is not None
        with torch.no_grad():
            refresh(self.case, self.sets[number % SETS], derived_seed(seed, "slot", number))
        return self.written[number % SETS]

    def result(self, number: int, pace: Pace, around: Callable[[], None] = lambda: None) -> Tensor:
        """Of the call of slot ``number`` on what its set holds, as one tensor; of the copies, an earlier one.

        ``around`` is called ahead of the call and behind it. Raises WrongOutputError.
        """
        call = self.calls[number % SETS]
        if self.anew and pace is not Pace.COPIES:
            call = self.implementation.prepare(self.case, self.sets[number % SETS])
        around()
        output = call() if pace is Pace.CALLS else self.stale
        around()
        if wrong := wrong_kind(output):
            raise WrongOutputError(wrong)
        return numerics(self.case).gathered(output).detach()


def prepare(case: Case, device: str, implementation: Implementation, anew: bool, weights: int) -> Prepared:
    """``weights``: the seed of what does not change from one call to the next."""
    operation_numerics = numerics(case)
    assert operation_numerics.refresh is not None
    sets = tuple(operation_numerics.input_sets(case, weights, SETS, device))
    with torch.no_grad():
        # What preparation may look at is not what the calls will be given.
        written = tuple(
            tuple(operation_numerics.refresh(case, each, derived_seed(0, os.urandom(8), index)))
            for index, each in enumerate(sets)
        )
    with implementation.context():
        calls = tuple(implementation.prepare(case, each) for each in sets)
        stale: Any = None
        for call in calls:
            stale = call()
    synchronize(device)
    return Prepared(case, device, implementation, anew, sets, written, calls, stale)


class Turns(Protocol):
    """What a contestant does in its turns on one case."""

    def wake(self, ask: Ask) -> None:
        """A pass over the values that are there."""

    def fill(self, ask: Ask) -> None:
        """New inputs for all contestants."""

    def run(self, ask: Ask) -> None:
        """The calls. Raises WrongOutputError."""

    def show(self, ask: Ask) -> str:
        """Entries of outputs that it has now."""

    def compare(self, ask: Ask) -> tuple[int, ...]:
        """Slots in which the candidate's output of the last calls is not like the own one."""

    def fetch(self, ask: Ask) -> None:
        """Outputs into the shared memory."""

    def judge(self, ask: Ask) -> Answer:
        """The candidate's results: ``judged`` and ``late``."""


Arenas = Sequence[Any]
"""Shared memories (mmap), the contestant's own first."""

"""A case with an implementation's calls on it, whichever way its turns go."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from cudadent42.audit.messages import SETS, Answer, Ask, Pace
from cudadent42.audit.slots import Slot, slots
from cudadent42.base.seeds import derived_seed
from cudadent42.correctness.forms import wrong_kind
from cudadent42.model.cases import Case
from cudadent42.model.device import synchronize
from cudadent42.model.implementations import Call, Implementation, unplanned
from cudadent42.operations import numerics
from cudadent42.operations.interface import Inputs

AUDITED = "audited"
"""``VerifiedCase.input`` of results of an audit."""

UNLIKE = 0.2
"""Root mean square of the difference between two results, relative to the results': rounding in any dtype that is raced
makes a tenth of it at most, and a result of other inputs four times as much. A twentieth of the entries that are wrong
makes it too."""


LARGE_ROWS = 4
"""Whose values are large in a call that has such."""


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

    @property
    def has_large(self) -> bool:
        """Whether the operation says by how much values may be larger."""
        return numerics(self.case).large_rows != 0.0

    def draw(self, seed: int, number: int, *, large: bool = False) -> tuple[Tensor, ...]:
        """The values of slot ``number`` into the set that its call uses: what does not change differs between the
        sets. ``large``: with a few rows that are. Returns the tensors that were written."""
        of_operation, own_seed = numerics(self.case), derived_seed(seed, "slot", number)
        assert of_operation.refresh is not None
        with torch.no_grad():
            refreshed = of_operation.refresh(self.case, self.sets[number % SETS], own_seed)
            if large and of_operation.large_rows:
                _enlarge_rows(refreshed[0], of_operation.large_rows, own_seed)
        return self.written[number % SETS]

    def result(self, number: int, pace: Pace, around: Callable[[], None] = lambda: None) -> Tensor:
        """Of the call of slot ``number`` on what its set holds, as one tensor; of the copies, an earlier one.

        ``around`` is called before the call and after it. Raises WrongOutputError.
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


def prepare(
    case: Case,
    device: str,
    implementation: Implementation,
    anew: bool,
    weights: int,
    window: Any | None = None,
    count: int = SETS,
) -> Prepared:
    """``weights``: the seed of what does not change from one call to the next. ``window``: shared memory in which the
    inputs that change are to lie, a slot for each set. ``count``: of sets, which the calls use by turns."""
    operation_numerics = numerics(case)
    assert operation_numerics.refresh is not None
    sets = tuple(operation_numerics.input_sets(case, weights, count, device))
    with torch.no_grad():
        # What preparation may look at is not what the calls will be given.
        written = tuple(
            tuple(operation_numerics.refresh(case, each, derived_seed(0, os.urandom(8), index)))
            for index, each in enumerate(sets)
        )
    if window is not None:
        rooms = slots(window, count, written[0], sets[0].result_like)
        moved = [_moved(*each) for each in zip(sets, written, rooms, strict=True)]
        sets, written = tuple(each for each, _ in moved), tuple(tensors for _, tensors in moved)
    with implementation.context():
        calls = tuple(unplanned(implementation.prepare(case, each)) for each in sets)
        stale: Any = None
        for call in calls:
            stale = call()
    synchronize(device)
    return Prepared(case, device, implementation, anew, sets, written, calls, stale)


def _enlarge_rows(tensor: Tensor, factor: float, seed: int) -> None:
    """Few, as who looks at some rows by chance should not meet one of them."""
    *shape, _ = tensor.shape
    chance = random.Random(seed)
    for row in chance.sample(range(math.prod(shape)), min(LARGE_ROWS, math.prod(shape))):
        at = []
        for size in reversed(shape):
            row, index = divmod(row, size)
            at.append(index)
        tensor[tuple(reversed(at))] *= factor


def _moved(inputs: Inputs, written: tuple[Tensor, ...], room: Slot) -> tuple[Inputs, tuple[Tensor, ...]]:
    """The inputs with those tensors in ``room`` that are dense and that a field holds; the others stay where they are,
    and what comes is copied to them."""
    places = {
        id(own): shared for own, shared in zip(written, room.inputs, strict=True) if own.is_contiguous()
    }
    changed: dict[str, Tensor] = {}
    for field in fields(inputs):  # type: ignore[arg-type]  # every Inputs is a frozen dataclass
        own = getattr(inputs, field.name)
        if isinstance(own, Tensor) and id(own) in places:
            shared = places[id(own)].detach()
            shared.copy_(own.detach())
            changed[field.name] = shared.requires_grad_(own.requires_grad)
    by_own = {id(getattr(inputs, name)): shared for name, shared in changed.items()}
    moved: Inputs = replace(inputs, **changed)  # type: ignore[type-var]
    return moved, tuple(by_own.get(id(own), own) for own in written)


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

"""One side of an audit, in a process of its own: ``serve``.

Inputs come in shared memory, one slot a call. They are copied into memory of the contestant's own just before the call,
three sets by turns, so no call can do the work of a later one.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cudadent42.audit.messages import Answer, Ask, Pace, Task
from cudadent42.audit.slots import Slot, slots
from cudadent42.base.seeds import derived_seed
from cudadent42.base.serialise import dumps, loads
from cudadent42.correctness.forms import wrong_kind
from cudadent42.correctness.truth import find_truth, judge_gathered
from cudadent42.model.cases import Case
from cudadent42.model.device import synchronize, use_device, use_threads
from cudadent42.model.implementations import NOT_DONE, Call, Implementation
from cudadent42.model.records import Plan, VerifiedCase
from cudadent42.operations import numerics
from cudadent42.operations.interface import Inputs
from cudadent42.registry import get, trusted

SETS = 3
"""Of the contestant's own, which the calls use by turns."""

CANDIDATES = 1
"""Of the judge's arenas, the other contestant's."""

AUDITED = "audited"
"""``VerifiedCase.input`` of results of an audit."""


@dataclass(frozen=True)
class _Ready:
    """A case that can be run."""

    case: Case
    sets: tuple[Inputs, ...]
    written: tuple[tuple[Tensor, ...], ...]
    """Of each set, the tensors whose values change."""
    calls: tuple[Call, ...]
    output: Tensor
    arenas: tuple[tuple[Slot, ...], ...]
    """In the shared memories."""
    slots: tuple[Slot, ...]
    """Of its own arena, on the device; on the CPU, those of the shared memory themselves."""


class Contestant:
    """``arenas``: the shared memories that it may see, its own first."""

    def __init__(self, arenas: Sequence[mmap.mmap]) -> None:
        self._arenas = arenas
        self._plan: Plan | None = None
        self._implementation: Implementation | None = None
        self._ready: _Ready | None = None

    def answer(self, ask: Ask) -> Answer:
        try:
            if ask.task is Task.LOAD:
                return self._load(ask)
            if ask.task is Task.READY:
                return self._make_ready(ask)
            if ask.task is Task.FILL:
                return self._fill(ask)
            if ask.task is Task.STAGE:
                return self._stage(ask)
            if ask.task is Task.RUN:
                return self._run(ask)
            if ask.task is Task.FETCH:
                return self._fetch(ask)
            return Answer(judged=tuple(self._judged(ask)))
        except NOT_DONE as error:
            return Answer(declined=str(error) or "not supported")
        except Exception as error:  # noqa: BLE001 - a candidate may raise anything, and that is a result
            return Answer(error=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")

    def _load(self, ask: Ask) -> Answer:
        assert ask.plan is not None
        self._plan = ask.plan
        use_device(ask.plan.device)
        use_threads(ask.plan.timer)
        self._implementation = get(ask.implementation, ask.plan.operation, ask.plan.versions)
        return Answer()

    def _make_ready(self, ask: Ask) -> Answer:
        assert self._plan is not None
        assert self._implementation is not None
        (case,) = ask.cases
        self._ready = None
        operation_numerics, device = numerics(case), self._plan.device
        assert operation_numerics.refresh is not None
        sets = tuple(operation_numerics.input_sets(case, ask.seed, SETS, device))
        with torch.no_grad():
            # What preparation may look at is not what the calls will be given.
            written = tuple(
                tuple(operation_numerics.refresh(case, each, derived_seed(0, os.urandom(8), index)))
                for index, each in enumerate(sets)
            )
        output = sets[0].result_like
        arenas = tuple(tuple(slots(memory, ask.calls, written[0], output)) for memory in self._arenas)
        with self._implementation.context():
            calls = tuple(self._implementation.prepare(case, each) for each in sets)
            for call in calls:
                call()
        synchronize(device)
        near = arenas[0]
        if device.startswith("cuda"):
            near = tuple(
                Slot(tuple(each.to(device) for each in slot.inputs), slot.output.to(device)) for slot in near
            )
        self._ready = _Ready(case, sets, written, calls, output, arenas, near)
        return Answer()

    def _fill(self, ask: Ask) -> Answer:
        """The same values into all arenas: no contestant sees another's. Drawing them takes longer than copying."""
        ready = self._of()
        for number in range(ask.calls):
            self._values(ready, ask.seed, number)
            for arena in ready.arenas:
                for shared, own in zip(arena[number].inputs, ready.written[number % SETS], strict=True):
                    shared.copy_(own)
                arena[number].output.fill_(float("nan"))
        return Answer()

    @staticmethod
    def _values(ready: _Ready, seed: int, number: int) -> None:
        """Those of slot ``number``, into the set that its call uses: what does not change differs between the sets."""
        refresh = numerics(ready.case).refresh
        assert refresh is not None
        with torch.no_grad():
            refresh(ready.case, ready.sets[number % SETS], derived_seed(seed, "slot", number))

    def _run(self, ask: Ask) -> Answer:
        ready, implementation = self._of(), self._implementation
        assert implementation is not None
        assert self._plan is not None
        gathered = numerics(ready.case).gathered
        anew = implementation.copies_inputs and implementation.name in trusted(self._plan)
        anew = anew and ask.pace is not Pace.COPIES
        stale = ready.output
        with implementation.context():
            for number, slot in enumerate(ready.slots[: ask.calls]):
                chosen = number % SETS
                for own, shared in zip(ready.written[chosen], slot.inputs, strict=True):
                    own.detach().copy_(shared)
                call = ready.calls[chosen]
                if anew:
                    call = implementation.prepare(ready.case, ready.sets[chosen])
                if ask.pace is Pace.CALLS:
                    output = call()
                    if wrong := wrong_kind(output):
                        return Answer(error=wrong)
                    slot.output.copy_(gathered(output).detach())
                else:
                    slot.output.copy_(stale)
        synchronize(self._plan.device)
        return Answer()

    def _stage(self, ask: Ask) -> Answer:
        ready = self._of()
        for near, shared in zip(ready.slots[: ask.calls], ready.arenas[0], strict=False):
            for own, each in zip((*near.inputs, near.output), (*shared.inputs, shared.output), strict=True):
                own.copy_(each)
        synchronize(str(ready.output.device))
        return Answer()

    def _fetch(self, ask: Ask) -> Answer:
        ready = self._of()
        for near, shared in zip(ready.slots[: ask.calls], ready.arenas[0], strict=False):
            shared.output.copy_(near.output)
        return Answer()

    def _judged(self, ask: Ask) -> Iterator[VerifiedCase]:
        """The values are made again from the seed: what lies in the shared memory now may be the candidate's."""
        ready = self._of()
        for number in ask.chosen:
            self._values(ready, ask.seed, number)
            truth = find_truth(ready.case, ready.sets[number % SETS])
            result = ready.arenas[CANDIDATES][number].output.to(ready.output.device)
            yield judge_gathered(truth, ask.implementation, result, AUDITED)

    def _of(self) -> _Ready:
        assert self._ready is not None, "no case is ready"
        return self._ready


def serve(requests: int, answers: int, memories: Sequence[int]) -> None:
    """Answers what comes in until the pipe is closed. ``memories``: file descriptors, the own one first."""
    contestant = Contestant([mmap.mmap(each, 0) for each in memories])
    with open(requests, encoding="utf-8") as lines:
        for line in lines:
            answer = contestant.answer(loads(Ask, line))
            os.write(answers, (dumps(answer, indent=None) + "\n").encode())

"""One side of an audit, in a process of its own: ``serve``. What its turns are made of is in `shared` and `drawn`."""

from __future__ import annotations

import gc
import mmap
import os
import select
import time
from collections.abc import Sequence
from contextlib import nullcontext

import torch

from cudadent42.audit.drawn import DrawnTurns
from cudadent42.audit.messages import DONE, GO, SETS, Answer, Ask, Task
from cudadent42.audit.prepared import Turns, WrongOutputError, prepare
from cudadent42.audit.shared import SharedTurns
from cudadent42.base.serialise import dumps, loads
from cudadent42.model.device import use_device, use_threads
from cudadent42.model.implementations import NOT_DONE, Implementation
from cudadent42.model.integrity import Way
from cudadent42.model.records import Plan
from cudadent42.registry import get, trusted

AWAKE_S = 3e-4
"""Longest time that the beginning of a call is waited for awake. Inputs that take longer to come are those of long
calls, beside which waking is nothing."""


class Contestant:
    """``arenas``: the shared memories that it may see, its own first. ``line``: to the referee."""

    def __init__(self, arenas: Sequence[mmap.mmap], line: Line) -> None:
        self._arenas = arenas
        self._line = line
        self._plan: Plan | None = None
        self._implementation: Implementation | None = None
        self._turns: Turns | None = None

    def answer(self, ask: Ask) -> Answer:
        try:
            if ask.task is Task.LOAD:
                return self._load(ask)
            if ask.task is Task.READY:
                return self._make_ready(ask)
            return _took(self._ready(), ask)
        except NOT_DONE as error:
            return Answer(declined=str(error) or "not supported")
        except WrongOutputError as error:
            return Answer(error=str(error))
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
        (case,), device, implementation = ask.cases, self._plan.device, self._implementation
        on_gpu = device.startswith("cuda")
        self._turns = None
        if on_gpu:  # what the case before took, the other side may need
            gc.collect()
            torch.cuda.empty_cache()
        anew = implementation.copies_inputs and implementation.name in trusted(self._plan)
        stream = torch.cuda.Stream(device) if on_gpu and ask.way is Way.GRAPH else None  # type: ignore[no-untyped-call]
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            window = self._arenas[0] if ask.way is Way.SHARED else None
            count = min(SETS, ask.calls) if ask.way is Way.SHARED else SETS
            prepared = prepare(case, device, implementation, anew, ask.seed, window, count)
        if ask.way is Way.SHARED:
            shared = SharedTurns(
                prepared, self._arenas, ask.calls, self._line.await_call, self._line.call_done
            )
            self._turns = shared
            return Answer(
                calls=ask.calls,
                prepares=anew,
                input_bytes=shared.input_bytes,
                output_bytes=shared.output_bytes,
            )
        turns = DrawnTurns(prepared, self._arenas, ask.calls, ask.way, stream)
        self._turns = turns
        return Answer(calls=turns.calls, way=turns.way, prepares=anew)

    def _ready(self) -> Turns:
        assert self._turns is not None, "no case is ready"
        return self._turns


def _took(turns: Turns, ask: Ask) -> Answer:
    """The answer to a request about the case that is ready."""
    if ask.task is Task.SHOW:
        return Answer(shown=turns.show(ask))
    if ask.task is Task.COMPARE:
        return Answer(unlike=turns.compare(ask))
    if ask.task is Task.JUDGE:
        return turns.judge(ask)
    simple = {Task.WAKE: turns.wake, Task.FILL: turns.fill, Task.RUN: turns.run, Task.FETCH: turns.fetch}
    simple[ask.task](ask)
    return Answer()


class Line:
    """To the referee: requests and answers, a line each, and within a turn a byte for each call."""

    def __init__(self, requests: int, answers: int) -> None:
        self._requests = requests
        self._asked = select.poll()
        self._asked.register(requests, select.POLLIN)
        self._answers = answers
        self._pending = b""

    def request(self) -> str | None:
        """The next; None when there are no more."""
        while b"\n" not in self._pending:
            if not self._receive():
                return None
        line, _, self._pending = self._pending.partition(b"\n")
        return line.decode()

    def answer(self, answer: Answer) -> None:
        os.write(self._answers, (dumps(answer, indent=None) + "\n").encode())

    def await_call(self, awake: bool) -> None:
        stop_s = time.monotonic() + AWAKE_S
        while awake and not self._pending and not self._asked.poll(0) and time.monotonic() < stop_s:
            continue
        if not self._pending and not self._receive():
            raise EOFError("the referee has gone")
        self._pending = self._pending[len(GO) :]

    def call_done(self) -> None:
        os.write(self._answers, DONE)

    def _receive(self) -> bool:
        data = os.read(self._requests, 1 << 16)
        self._pending += data
        return bool(data)


def serve(requests: int, answers: int, memories: Sequence[int]) -> None:
    """Answers what comes in until the pipe is closed. ``memories``: file descriptors, the own one first."""
    line = Line(requests, answers)
    contestant = Contestant([mmap.mmap(each, 0) for each in memories], line)
    while (text := line.request()) is not None:
        line.answer(contestant.answer(loads(Ask, text)))

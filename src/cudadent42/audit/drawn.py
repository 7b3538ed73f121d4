"""Turns on inputs that each contestant draws on its device, from a seed that comes with the request: on a GPU.

Copying inputs and outputs between processes takes a GPU many times what a call takes, so it is not done while the clock
runs. In its place stand two rules that leave no work before the clock and none after it:

* The values of a turn are drawn from a seed within the turn. Whoever has the process cannot know them before.
* When all calls are made the referee tells one more seed. The contestant answers with the `sketch` of every output, and
  only then does the clock stop. What it hands out afterwards has to have that sketch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from cudadent42.audit.messages import SETS, Answer, Ask, Pace
from cudadent42.audit.prepared import AUDITED, UNLIKE, Arenas, Prepared, WrongOutputError
from cudadent42.audit.sketch import SUMS, differing, read, sketches, written
from cudadent42.audit.slots import Slot, bytes_of, slots
from cudadent42.correctness.truth import find_truth, judge_gathered
from cudadent42.model.device import synchronize
from cudadent42.model.integrity import Way
from cudadent42.timing.timers import collector_off

MEMORY_SHARE = 0.3
"""Of the device's free memory, that the slots of one contestant may take: there are two, and the reference."""

MEMORY_BYTES = 256 << 20
"""Of slots on a device that does not say what is free."""

REPLAY_ERROR = 0.02
"""Root mean square of the difference between a replayed result and a call's own, relative to the result's: what atomic
additions in another order make is a tenth of it in bf16, and what code computes that cannot be captured, far more."""


class DrawnTurns:
    """`prepared.Turns`, for up to ``calls`` calls, or as many as there is memory for.

    ``way`` becomes ``QUEUED`` where a graph was asked for and the calls cannot be captured. For a graph ``stream`` is
    the one that the case was prepared on: autograd works on that of the forward pass.
    """

    def __init__(
        self, prepared: Prepared, arenas: Arenas, calls: int, way: Way, stream: torch.cuda.Stream | None
    ) -> None:
        self._prepared = prepared
        self._arenas = arenas
        self._stream = stream
        like, changing = prepared.result_like, prepared.written[0]
        held = () if way is Way.ALONE else changing
        self.calls = max(1, min(calls, _room(prepared.device) // max(1, bytes_of((*held, like)))))
        self._slots: tuple[tuple[Tensor, ...], ...] = tuple(
            tuple(torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in held)
            for _ in range(self.calls)
        )
        """Of each call, drawn ahead of all calls; where each waits for the one before, its inputs are drawn for it."""
        self._outputs = torch.zeros((self.calls, *like.shape), dtype=like.dtype, device=like.device)
        synchronize(prepared.device)  # the calls may be made on another stream
        self._sums = self._deviation = torch.zeros(0, dtype=torch.float32, device="cpu")
        """Of what was shown last."""
        self._graphs: dict[Pace, torch.cuda.CUDAGraph] = {}
        self.way = way
        if way is Way.GRAPH and not self._captured():
            self._graphs.clear()
            self.way = Way.QUEUED

    def wake(self, ask: Ask) -> None:
        with self._on_stream():  # where inputs are drawn for each call, some calls wake it as well as all
            self._pass(ask.pace, -(-ask.calls // 4) if self.way is Way.ALONE else ask.calls)
        synchronize(self._prepared.device)

    def fill(self, ask: Ask) -> None:
        """Nothing is given to anybody ahead of its turn."""

    def run(self, ask: Ask) -> None:
        with self._on_stream(), collector_off():
            if self.way is not Way.ALONE:
                for number in range(ask.calls):
                    self._draw(ask.seed, number)
            self._pass(ask.pace, ask.calls, ask.seed)
        synchronize(self._prepared.device)

    def show(self, ask: Ask) -> str:
        self._sums, self._deviation = sketches(self._outputs[: ask.calls], ask.challenge)
        return written(self._sums)

    def compare(self, ask: Ask) -> tuple[int, ...]:
        """By the sketches: the last turn of both was one of calls, on the same values and signs."""
        said = read(ask.shown, ask.calls)
        if said is None or len(self._sums) != ask.calls:
            return tuple(range(ask.calls))
        off = (said.to(self._sums.device) - self._sums).square().mean(1, keepdim=True).sqrt()
        unlike = ~(off <= UNLIKE * self._deviation).flatten()
        return tuple(unlike.nonzero().flatten().tolist())

    def fetch(self, ask: Ask) -> None:
        for slot, number in zip(self._fetched(ask, self._arenas[0]), ask.chosen, strict=True):
            slot.output.copy_(self._outputs[number])

    def judge(self, ask: Ask) -> Answer:
        prepared = self._prepared
        handed_out = torch.stack([slot.output for slot in self._fetched(ask, self._arenas[1])])
        results = handed_out.to(self._outputs.device)
        judged = []
        for number, result in zip(ask.chosen, results, strict=True):
            prepared.draw(ask.seed, number)
            truth = find_truth(prepared.case, prepared.sets[number % SETS])
            judged.append(judge_gathered(truth, ask.implementation, result, AUDITED))
        return Answer(judged=tuple(judged), late=_late(ask, results))

    def _draw(self, seed: int, number: int) -> None:
        for slot, own in zip(self._slots[number], self._prepared.draw(seed, number), strict=True):
            slot.copy_(own)

    def _pass(self, pace: Pace, calls: int, seed: int = 0) -> None:
        """All calls, on what the slots hold or on what is drawn from the seed."""
        graph = self._graphs.get(Pace.CALLS if pace is Pace.CALLS else Pace.COPIES)
        if graph is not None and calls == self.calls:
            graph.replay()
            return
        with self._prepared.implementation.context():
            self._each(pace, calls, seed)

    def _each(self, pace: Pace, calls: int, seed: int = 0) -> None:
        around: Callable[[], None] = _nothing
        if self.way is Way.ALONE:
            around = self._wait
        for number in range(calls):
            if self.way is Way.ALONE:
                self._prepared.draw(seed, number)
            else:
                for own, slot in zip(self._prepared.written[number % SETS], self._slots[number], strict=True):
                    own.detach().copy_(slot)
            self._outputs[number].copy_(self._prepared.result(number, pace, around))

    def _wait(self) -> None:
        synchronize(self._prepared.device)

    def _captured(self) -> bool:
        """Whether all calls are in a graph now that computes what they compute."""
        if self._stream is None or self._prepared.anew:
            return False
        try:
            with self._on_stream(), self._prepared.implementation.context():
                for number in range(self.calls):
                    self._draw(0, number)
                self._each(Pace.CALLS, self.calls)
                # Not by `timing.cuda_timers.capture`: that has a stream of its own, and autograd works on that of the
                # forward pass. It captures calls in rotation, and here copies of inputs and results are between them.
                for pace in (Pace.CALLS, Pace.COPIES):
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, stream=self._stream):
                        self._each(pace, self.calls)
                    self._graphs[pace] = graph
            synchronize(self._prepared.device)
            return self._replays_right()
        except WrongOutputError:
            raise
        except Exception:  # noqa: BLE001 - of a call that waits for the GPU, which may say so in any way
            synchronize(self._prepared.device)  # raises again what was a fault
            return False

    def _replays_right(self) -> bool:
        looked_at = range(min(SETS, self.calls))
        with self._on_stream():
            called = [self._outputs[number].float() for number in looked_at]
            self._outputs.zero_()
            self._graphs[Pace.CALLS].replay()
        synchronize(self._prepared.device)
        for number, own in zip(looked_at, called, strict=True):
            off = (self._outputs[number].float() - own).square().mean()
            if not float(off) <= REPLAY_ERROR**2 * float(own.square().mean()):
                return False
        return True

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _fetched(self, ask: Ask, memory: object) -> list[Slot]:
        """Where the outputs asked for lie in a shared memory."""
        return slots(memory, len(ask.chosen), (), self._outputs[0])  # type: ignore[arg-type]


def _late(ask: Ask, results: Tensor) -> str:
    """`Answer.late` of the results (chosen, ...) that were handed out."""
    said = read(ask.shown, ask.calls)
    if said is None:
        return "it did not say what its results were when the clock stopped"
    other = differing(said[list(ask.chosen)], results, ask.challenge)
    if not other:
        return ""
    count = SUMS * len(ask.chosen)
    return f"{other} of {count} sums over its results are others than it said when the clock stopped"


def _nothing() -> None:
    return


def _room(device: str) -> int:
    """Bytes that the slots may take."""
    if not device.startswith("cuda"):
        return MEMORY_BYTES
    return int(MEMORY_SHARE * torch.cuda.mem_get_info(device)[0])

"""One contestant as the referee has it: stopped but for its turns, with all that it started, wherever that went."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

from cudadent42.audit.messages import DONE, GO, Answer, Ask
from cudadent42.audit.task_clock import TaskClock
from cudadent42.base.output import LOOK_S, OutputLog
from cudadent42.base.serialise import dumps, loads
from cudadent42.timing.processor_time import descendants, process_ns
from cudadent42.timing.standing import Standing, standings

TIMEOUT_S = 120.0
"""Longest time that one request may take: compiling a kernel takes up to 30 s."""

_MOST_ANSWER_BYTES = 1 << 22

CLOCK_SHARE = 0.9
"""Of what the living processes ran, that a clock of all has to have seen."""

COUNTED_SHARE, UNCOUNTED_NS = 0.7, 10_000_000
"""Of what a contestant and its children ran in all turns by now, that the clock has to have seen, less so much. The two
clocks of an honest process differed by up to 3.5 ms in a turn of 6 ms, and by up to 22 % in all of its turns."""

_ROUNDS = 5
"""Of looking for more to stop: a process may be started while the others are stopped."""


class AuditLostError(Exception):
    """A contestant died, hung or answered what is no answer."""


class EarlyError(Exception):
    """A contestant answered before it had made its calls."""


class UncountedError(Exception):
    """A contestant's processes ran without the clock of all of them."""


class DisturbedError(Exception):
    """Somebody changed how a contestant's process is run."""


@dataclass(frozen=True)
class Turn:
    """What the requests of a turn took."""

    answers: tuple[Answer, ...]
    wall_ms: float
    """By this process's clock, from the first timed request to the last answer; of a turn of single calls, the
    first quartile of theirs: more would hold what passed while others had the processor, or while threads woke."""
    processor_ms: float
    """That the contestant and all that came of it were running, in all of the turn; of single calls the first
    quartile. 0 where it was not asked for."""
    fastest: tuple[int, ...] = ()
    """Of single calls those up to that quartile, by the clock that was asked for; empty where not each is known."""


class Party:
    """``escaped``: processes that left a contestant's tree, for the one that they must have come from. None for the
    judge, which runs nobody else's code, and whose threads nobody else may change. ``log`` is where they
    print, which gets no longer than it may. ``alone``: whether it had no children when this was made."""

    def __init__(
        self,
        pid: int,
        requests: int,
        answers: int,
        escaped: Callable[[], list[int]] | None = None,
        log: OutputLog | None = None,
        *,
        alone: bool = True,
    ) -> None:
        self.pid = pid
        self._log = log
        self._stopped: set[int] = {pid}
        self._requests = requests
        self._answers = answers
        self._answered = select.poll()
        self._answered.register(answers, select.POLLIN)
        self._escaped = escaped
        self._pending = b""
        self._standings: dict[int, Standing] = {}
        self._alone = alone
        self._clock: TaskClock | None = None
        with suppress(OSError):
            self._clock = TaskClock(pid)
        self._ran_before_ns = process_ns(pid)
        self._ran_ns = self._counted_ns = 0
        """In turns with children."""

    def take_turn(
        self, *asks: Ask, untimed: int = 0, by_processor: bool = False, timeout_s: float = TIMEOUT_S
    ) -> Turn:
        """One request after another, each when the one before is answered. The clock leaves the first ``untimed`` out.

        ``by_processor``: whether processor time is asked for, which may read all of /proc. Raises AuditLostError and
        DisturbedError.
        """
        lines = [(dumps(ask, indent=None) + "\n").encode() for ask in asks]
        replies: list[str] = []
        self._begin()
        ran_ns = self.ran_ns() if by_processor else 0
        for number, line in enumerate(lines):
            if number <= untimed:
                began_ns = time.perf_counter_ns()
            self._send(line)
            replies.append(self._reply(timeout_s))
        wall_ns = time.perf_counter_ns() - began_ns
        self._stop()
        ran_ms = (self.ran_ns() - ran_ns) / 1e6 if by_processor else 0.0
        return Turn(tuple(map(_answer, replies)), wall_ns / 1e6, ran_ms)

    def take_calls(
        self,
        ask: Ask,
        feed: Callable[[int], None],
        take: Callable[[int], None],
        *,
        by_processor: bool = False,
        watched: int | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Turn:
        """A request of ``ask.calls`` calls, each begun when ``feed`` has given its inputs; ``take`` is called when it
        is done. The clock runs between the two. Raises AuditLostError, DisturbedError, EarlyError and UncountedError.

        For the end of the call ``watched`` this process waits awake, so that ``take`` has the output of the moment in
        which it is said to be there. A sleeper takes tens of microseconds to wake, in which it could be finished.
        """
        wall_ns: list[int] = []
        before = self._counts() if by_processor else None
        self._begin()
        ran_ns = [self.ran_ns()] if by_processor else []
        self._send((dumps(ask, indent=None) + "\n").encode())
        for number in range(ask.calls):
            feed(number)
            began_ns = time.perf_counter_ns()
            self._send(GO)
            first = self._byte(timeout_s, awake=number == watched)
            wall_ns.append(time.perf_counter_ns() - began_ns)
            if first != DONE:
                self._pending = first + self._pending
                break
            take(number)
            if by_processor and self._clock is not None:
                ran_ns.append(self._clock.read_ns())
        reply = self._reply(timeout_s)
        self._stop()
        if before is not None:
            self._check_counted(*before)
        if by_processor and self._clock is None:
            ran_ns.append(ran_ns[0] + (self.ran_ns() - ran_ns[0]) // ask.calls)
        answer = _answer(reply.lstrip(DONE.decode()))
        done = first == DONE and not reply.startswith(DONE.decode())
        if not done and not answer.error and not answer.declined:
            raise EarlyError("it answered before it had made the calls that it was asked for")
        between_ns = [after - before for before, after in pairwise(ran_ns)]
        took_ns = between_ns if by_processor else wall_ns
        fastest = _fastest(took_ns) if len(took_ns) == ask.calls else ()
        return Turn((answer,), _quartile_ms(wall_ns), _quartile_ms(between_ns), fastest)

    def tree(self) -> Iterator[int]:
        """Its process, what is below it, and what has left from there."""
        yield self.pid
        yield from descendants(str(self.pid))
        for process in self._escaped() if self._escaped is not None else ():
            yield process
            yield from descendants(str(process))

    def ran_ns(self) -> int:
        """Nanoseconds that all of these were running until now; where the machine counts that, those too that have
        ended."""
        if self._clock is not None:
            return self._clock.read_ns()
        return sum(map(process_ns, dict.fromkeys(self.tree())))

    def check_clock(self) -> None:
        """After its first turn: a clock that began too late, when it had children already, is not used. Raises
        UncountedError where it had none: who is left out of all counts would have them taken without this clock, and
        children that end in between are in no other."""
        if self._clock is None:
            return
        living_ns = sum(map(process_ns, dict.fromkeys(self.tree()))) - self._ran_before_ns
        counted_ns = self._clock.read_ns()
        if counted_ns < CLOCK_SHARE * living_ns - UNCOUNTED_NS:
            if self._alone and self._escaped is not None:
                raise _uncounted(living_ns, counted_ns)
            self._clock.close()
            self._clock = None

    def _counts(self) -> tuple[int, dict[int, int]] | None:
        """While it is stopped: of the clock, and of each process; None where these cannot differ."""
        if self._clock is None or self._escaped is None:
            return None
        ran_ns = {process: process_ns(process) for process in self._stopped}
        return self._clock.read_ns(), ran_ns

    def _check_counted(self, counted_ns: int, before_ns: Mapping[int, int]) -> None:
        """Whether the clock has counted what lives now: who executes a program that may not be read is not counted
        from then on, as nobody may look into it (begin_new_exec of the kernel). The contestant itself cannot: it has to
        answer."""
        counts = self._counts()
        if counts is None or len(counts[1]) == 1:
            return
        self._counted_ns += counts[0] - counted_ns
        self._ran_ns += sum(now_ns - before_ns.get(process, 0) for process, now_ns in counts[1].items())
        if self._counted_ns < COUNTED_SHARE * self._ran_ns - UNCOUNTED_NS:
            raise _uncounted(self._ran_ns, self._counted_ns)

    def close(self) -> None:
        if self._clock is not None:
            self._clock.close()
        os.close(self._requests)
        os.close(self._answers)

    def _begin(self) -> None:
        if self._escaped is None:
            self._check_standing()
        for process in self._stopped:
            _signal(process, signal.SIGCONT)

    def _stop(self) -> None:
        """Itself first: it has answered, and all the rest takes a moment to be found."""
        self._stopped = {self.pid}
        _signal(self.pid, signal.SIGSTOP)
        for _ in range(_ROUNDS):
            others = set(self.tree()) - self._stopped
            if not others:
                break
            for process in others:
                _signal(process, signal.SIGSTOP)
            self._stopped |= others
        if self._escaped is None:
            self._standings = standings(self.pid)
        self._limit_log()

    def _limit_log(self) -> None:
        if self._log is not None:
            self._log.limit()

    def _check_standing(self) -> None:
        """Whether its threads are run as they were when it was stopped: the others may belong to the same user."""
        now = standings(self.pid)
        for task, before in self._standings.items():
            if task in now and now[task] != before:
                raise DisturbedError(
                    "in the audit somebody changed how a thread of the baseline's process is run: it had "
                    f"{before} before the other side's turn, and {now[task]} after it"
                )

    def _send(self, line: bytes) -> None:
        try:
            while line:
                line = line[os.write(self._requests, line) :]
        except BrokenPipeError as error:
            raise AuditLostError("its process died") from error

    def _byte(self, timeout_s: float, *, awake: bool = False) -> bytes:
        stop_s = time.monotonic() + timeout_s
        while awake and not self._pending and not self._answered.poll(0) and time.monotonic() < stop_s:
            continue
        if not self._pending:
            self._receive(time.monotonic() + timeout_s, timeout_s)
        first, self._pending = self._pending[:1], self._pending[1:]
        return first

    def _reply(self, timeout_s: float) -> str:
        stop = time.monotonic() + timeout_s
        while b"\n" not in self._pending:
            self._receive(stop, timeout_s)
        line, _, self._pending = self._pending.partition(b"\n")
        return line.decode(errors="replace")

    def _receive(self, stop: float, timeout_s: float) -> None:
        while not self._answered.poll(1e3 * min(LOOK_S, max(0.0, stop - time.monotonic()))):
            self._limit_log()
            if time.monotonic() >= stop:
                raise AuditLostError(f"no answer for {timeout_s:.0f} s")
        data = os.read(self._answers, 1 << 16)
        if not data or len(self._pending) > _MOST_ANSWER_BYTES:
            raise AuditLostError("its process died")
        self._pending += data


def _uncounted(ran_ns: int, counted_ns: int) -> UncountedError:
    return UncountedError(
        f"its processes ran for {ran_ns / 1e6:.3g} ms in the audit, and the audit's clock of all of them counted "
        f"{max(counted_ns, 0) / 1e6:.3g} ms: one of them keeps out of that clock"
    )


def _quartile_ms(took_ns: Sequence[int]) -> float:
    return _quartile_ns(took_ns) / 1e6 if took_ns else 0.0


def _quartile_ns(took_ns: Sequence[int]) -> int:
    return sorted(took_ns)[len(took_ns) // 4]


def _fastest(took_ns: Sequence[int]) -> tuple[int, ...]:
    """The calls that took no longer than the one that counts."""
    quartile_ns = _quartile_ns(took_ns)
    return tuple(number for number, each_ns in enumerate(took_ns) if each_ns <= quartile_ns)


def _answer(reply: str) -> Answer:
    try:
        return loads(Answer, reply)
    except ValueError as error:
        raise AuditLostError(f"its process answered nonsense ({error})") from error


def _signal(process: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(process, number)

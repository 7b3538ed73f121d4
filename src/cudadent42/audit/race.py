"""Baseline and candidate by turns, in processes apart, each call on inputs of its own."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from cudadent42.audit.messages import Answer, Ask, Pace, Task
from cudadent42.audit.referee import Party, Referee, shared_memory
from cudadent42.model.cases import Case
from cudadent42.model.records import Plan, TimerKind, VerifiedCase

BLOCKS = 12
"""Pairs of turns on a case."""

LOW_RANK, HIGH_RANK = 2, 9
"""Of the sorted differences of 12 blocks, from 0: between the third and the tenth lies the median in 96 of 100 races,
whatever the distribution (the sign test's interval)."""

WINDOW_MS, LEAST_WINDOW_MS = 10.0, 5.0
"""That a turn should last, by the run's latencies: a hundred times what a message between two processes takes, and half
of it where the run was short."""

WINDOWS = 40
"""Of such time that a race takes about: two turns of calls in 13 blocks, and drawing their inputs."""

MOST_CALLS = 32
"""In a turn."""

MEMORY_BYTES = 256 << 20
"""Of the inputs and outputs of a turn, which limits its calls; at least one."""

JUDGED_CALLS = 2
"""Of each block of which results are judged: the last one, and one by chance."""

JUDGED_BLOCKS = 2
"""Blocks of a case whose results are judged, by chance."""


class DeclinedError(Exception):
    """The candidate does not do this case, and says so."""


class BrokenError(Exception):
    """One side raised an error."""


@dataclass(frozen=True)
class Race:
    """One case."""

    baseline_ms: float
    """Per call, the blocks' median."""
    candidate_ms: float
    saved_ms: tuple[float, ...]
    """Of each block, per call, sorted."""
    judged: tuple[VerifiedCase, ...]

    @property
    def low_ms(self) -> float:
        return self.saved_ms[LOW_RANK]

    @property
    def high_ms(self) -> float:
        return self.saved_ms[HIGH_RANK]

    @property
    def saved(self) -> float:
        return statistics.median(self.saved_ms)


class Ring:
    """Two contestants. The baseline's process makes the inputs and judges, as no candidate was ever in it."""

    def __init__(self, plan: Plan, judge: Party, candidate: Party, name: str, chance: random.Random) -> None:
        self._plan = plan
        self._judge = judge
        self._candidate = candidate
        self._name = name
        self._chance = chance
        self._weights = chance.getrandbits(62)

    def check(self, case: Case, calls: int = 1) -> tuple[VerifiedCase, ...]:
        """Results of one turn, judged. Raises DeclinedError, BrokenError and AuditLostError."""
        self._ready(case, calls)
        seed = self._chance.getrandbits(62)
        self._fill(seed, calls)
        self._turn(self._candidate, calls, Pace.CALLS)
        return self._verdicts(case, seed, range(calls))

    def race(self, case: Case, baseline_ms: float, budget_s: float) -> Race:
        """All blocks of a case, in about ``budget_s`` if that can be; errors as of ``check``."""
        calls = self._calls(case, baseline_ms, max(LEAST_WINDOW_MS, min(WINDOW_MS, 1e3 * budget_s / WINDOWS)))
        self._ready(case, calls)
        judged_blocks = set(self._chance.sample(range(BLOCKS), JUDGED_BLOCKS))
        base: list[float] = []
        own: list[float] = []
        judged: list[VerifiedCase] = []
        for block in range(-1, BLOCKS):  # the first warms up
            seed = self._chance.getrandbits(62)
            self._fill(seed, calls)
            took = self._both(calls)
            if block >= 0:
                base.append(took[0])
                own.append(took[1])
            if block in judged_blocks:
                slots = {calls - 1, *self._chance.sample(range(calls - 1), min(calls - 1, JUDGED_CALLS - 1))}
                judged += self._verdicts(case, seed, sorted(slots))
        saved = sorted(a - b for a, b in zip(base, own, strict=True))
        return Race(statistics.median(base), statistics.median(own), tuple(saved), tuple(judged))

    def _both(self, calls: int) -> tuple[float, float]:
        """Milliseconds of a call of each, what copying takes left out. In random order."""
        took: dict[str, float] = {}
        turns = ["base", "own", "copies", "prepared copies"]
        self._chance.shuffle(turns)
        for turn in turns:
            if turn == "base":
                took[turn] = self._turn(self._judge, calls, Pace.CALLS)
            elif turn == "own":
                took[turn] = self._turn(self._candidate, calls, Pace.CALLS)
            else:
                took[turn] = self._turn(self._judge, calls, Pace(turn))
        return (
            (took["base"] - took["prepared copies"]) / calls,
            (took["own"] - took["copies"]) / calls,
        )

    def _turn(self, party: Party, calls: int, pace: Pace) -> float:
        """Milliseconds; on a GPU with the copies there and back, so that nothing can hide in them."""
        tasks = [Task.RUN] if self._plan.device == "cpu" else [Task.STAGE, Task.RUN, Task.FETCH]
        total = 0.0
        for task in tasks:
            turn = party.take_turn(Ask(task, calls=calls, pace=pace))
            _require(turn.answer)
            by_processor = self._plan.timer is TimerKind.CPU
            total += turn.processor_ms if by_processor else turn.wall_ms
        return total

    def _calls(self, case: Case, baseline_ms: float, window_ms: float) -> int:
        room = MEMORY_BYTES // max(1, case.memory_bytes(2) - case.memory_bytes(1))
        wanted = int(window_ms / max(baseline_ms, 1e-4)) + 1
        return max(1, min(wanted, room, MOST_CALLS))

    def _ready(self, case: Case, calls: int) -> None:
        for party in (self._judge, self._candidate):
            turn = party.take_turn(Ask(Task.READY, cases=(case,), calls=calls, seed=self._weights))
            _require(turn.answer)

    def _fill(self, seed: int, calls: int) -> None:
        _require(self._judge.take_turn(Ask(Task.FILL, seed=seed, calls=calls)).answer)

    def _verdicts(self, case: Case, seed: int, chosen: Sequence[int]) -> tuple[VerifiedCase, ...]:
        """Of the candidate's results, by values that are made again from the seed."""
        ask = Ask(Task.JUDGE, implementation=self._name, seed=seed, chosen=tuple(chosen))
        answer = self._judge.take_turn(ask).answer
        _require(answer)
        return answer.judged


def _require(answer: Answer) -> None:
    if answer.declined:
        raise DeclinedError(answer.declined)
    if answer.error:
        raise BrokenError(answer.error)


@contextmanager
def ring(plan: Plan, referee: Referee, name: str, chance: random.Random) -> Iterator[Ring]:
    """Both sides loaded. Raises AuditLostError and BrokenError."""
    size = 2 * MEMORY_BYTES + max(case.memory_bytes(2) for case in plan.cases)
    with ExitStack() as stack:
        judges = stack.enter_context(shared_memory(size))
        candidates = stack.enter_context(shared_memory(size))
        judge = referee.start([judges.fileno(), candidates.fileno()])
        candidate = referee.start([candidates.fileno()])
        for party, each in ((judge, plan.baseline), (candidate, name)):
            _require(party.take_turn(Ask(Task.LOAD, plan=plan, implementation=each)).answer)
        yield Ring(plan, judge, candidate, name, chance)

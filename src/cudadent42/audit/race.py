"""Baseline and candidate by turns, in processes apart, each call on inputs of its own."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from cudadent42.audit.messages import Answer, Ask, Pace, Task
from cudadent42.audit.referee import Party, Referee, shared_memory
from cudadent42.model.cases import Case
from cudadent42.model.integrity import Way
from cudadent42.model.records import Plan, TimerKind, VerifiedCase

BLOCKS = 12
"""Pairs of turns on a case."""

LOW_RANK, HIGH_RANK = 2, 9
"""Of the sorted differences of 12 blocks, from 0: between the third and the tenth lies the median in 96 of 100 races,
whatever the distribution (the sign test's interval)."""

WINDOW_MS, LEAST_WINDOW_MS = 10.0, 5.0
"""That a turn should last, by the run's latencies: a hundred times what a message between two processes takes, and half
of it where the run was short."""

GPU_WINDOWS = 2.0
"""Of such windows in a turn on a GPU: what is subtracted there takes longer than the calls do."""

WINDOWS = 40
"""Of such time that a race takes about: two turns of calls in 13 blocks, and drawing their inputs."""

MOST_CALLS, MOST_CALLS_ON_GPU = 32, 512
"""In a turn. On a GPU short calls need many: drawing their inputs takes the host some tens of microseconds each."""

MEMORY_BYTES = 256 << 20
"""Of the inputs and outputs of a turn in shared memory, which limits its calls; at least one. On a GPU its free memory
does (`drawn.MEMORY_SHARE`)."""

JUDGED_CALLS = 2
"""Of each block of which results are judged: the last one, and one by chance."""

JUDGED_BLOCKS = 2
"""Blocks of a case whose results are judged, by chance."""


class DeclinedError(Exception):
    """The candidate does not do this case, and says so."""


class BrokenError(Exception):
    """One side raised an error."""


class LateError(Exception):
    """The candidate had other results when the clock stopped than it handed out later."""


def way_for(plan: Plan) -> Way:
    """As the run's timer has it: a call on an idle stream, or the GPU's time alone."""
    if plan.device == "cpu":
        return Way.SHARED
    return Way.ALONE if plan.timer is TimerKind.CALL else Way.GRAPH


@dataclass(frozen=True)
class Race:
    """One case."""

    baseline_ms: float
    """Per call, the blocks' median."""
    candidate_ms: float
    saved_ms: tuple[float, ...]
    """Of each block, per call, sorted."""
    judged: tuple[VerifiedCase, ...]
    way: Way = Way.SHARED
    """In which both sides' calls were made."""

    @property
    def low_ms(self) -> float:
        return self.saved_ms[LOW_RANK]

    @property
    def high_ms(self) -> float:
        return self.saved_ms[HIGH_RANK]

    @property
    def saved(self) -> float:
        return statistics.median(self.saved_ms)


@dataclass(frozen=True)
class _Bout:
    """Turns of both on the same values."""

    calls: int
    way: Way
    seed: int
    challenge: int


class Ring:
    """Two contestants. The baseline's process makes the inputs and judges, as no candidate was ever in it."""

    def __init__(self, plan: Plan, judge: Party, candidate: Party, name: str, chance: random.Random) -> None:
        self._plan = plan
        self._judge = judge
        self._candidate = candidate
        self._name = name
        self._chance = chance
        self._weights = chance.getrandbits(62)
        self._way = way_for(plan)
        self._shown = ""
        """The candidate's last sketches."""

    def check(self, case: Case) -> tuple[VerifiedCase, ...]:
        """Results of one call, judged. Raises DeclinedError, BrokenError, LateError and AuditLostError."""
        way = Way.QUEUED if self._way is Way.GRAPH else self._way  # nothing is timed
        bout = _Bout(*self._ready(case, 1, way), *self._seeds())
        self._fill(bout)
        self._turn(self._candidate, bout, Pace.CALLS)
        return self._verdicts(bout, range(bout.calls))

    def race(self, case: Case, baseline_ms: float, budget_s: float) -> Race:
        """All blocks of a case, in about ``budget_s`` if that can be; errors as of ``check``."""
        wanted = self._calls(
            case, baseline_ms, max(LEAST_WINDOW_MS, min(WINDOW_MS, 1e3 * budget_s / WINDOWS))
        )
        calls, way = self._ready(case, wanted, self._way)
        judged_blocks = set(self._chance.sample(range(BLOCKS), JUDGED_BLOCKS))
        base: list[float] = []
        own: list[float] = []
        judged: list[VerifiedCase] = []
        for block in range(-1, BLOCKS):  # the first warms up
            bout = _Bout(calls, way, *self._seeds())
            self._fill(bout)
            took = self._both(bout)
            if block >= 0:
                base.append(took[0])
                own.append(took[1])
            if block in judged_blocks:
                slots = {calls - 1, *self._chance.sample(range(calls - 1), min(calls - 1, JUDGED_CALLS - 1))}
                judged += self._verdicts(bout, sorted(slots))
        saved = sorted(a - b for a, b in zip(base, own, strict=True))
        return Race(statistics.median(base), statistics.median(own), tuple(saved), tuple(judged), way)

    def _both(self, bout: _Bout) -> tuple[float, float]:
        """Milliseconds of a call of each, what copying takes left out. In random order."""
        took: dict[str, float] = {}
        turns = ["base", "own", "copies", "prepared copies"]
        self._chance.shuffle(turns)
        for turn in turns:
            if turn == "base":
                took[turn] = self._turn(self._judge, bout, Pace.CALLS)
            elif turn == "own":
                took[turn] = self._turn(self._candidate, bout, Pace.CALLS)
            else:
                took[turn] = self._turn(self._judge, bout, Pace(turn))
        return (
            (took["base"] - took["prepared copies"]) / bout.calls,
            (took["own"] - took["copies"]) / bout.calls,
        )

    def _turn(self, party: Party, bout: _Bout, pace: Pace) -> float:
        """Milliseconds. In all ways but that of shared memory the inputs' seed comes when the clock runs, and the
        clock stops when the sketch of the results is there, whose seed comes when the calls are made."""
        run = Ask(Task.RUN, calls=bout.calls, pace=pace)
        if bout.way is Way.SHARED:
            by_processor = self._plan.timer is TimerKind.CPU
            turn = party.take_turn(run, by_processor=by_processor)
            _require(*turn.answers)
            return turn.processor_ms if by_processor else turn.wall_ms
        turn = party.take_turn(
            replace(run, task=Task.WAKE),
            replace(run, seed=bout.seed),
            Ask(Task.SHOW, calls=bout.calls, challenge=bout.challenge),
            untimed=1,
        )
        _require(*turn.answers)
        if party is self._candidate:
            self._shown = turn.answers[-1].shown
        return turn.wall_ms

    def _calls(self, case: Case, baseline_ms: float, window_ms: float) -> int:
        if self._way is not Way.SHARED:
            return min(int(GPU_WINDOWS * window_ms / max(baseline_ms, 1e-4)) + 1, MOST_CALLS_ON_GPU)
        wanted = int(window_ms / max(baseline_ms, 1e-4)) + 1
        room = MEMORY_BYTES // max(1, case.memory_bytes(2) - case.memory_bytes(1))
        return max(1, min(wanted, room, MOST_CALLS))

    def _ready(self, case: Case, calls: int, way: Way) -> tuple[int, Way]:
        """Both sides, for as many calls as both have memory for, in a way that both can go."""
        while True:
            for party in (self._judge, self._candidate):
                ask = Ask(Task.READY, cases=(case,), calls=calls, seed=self._weights, way=way)
                (answer,) = party.take_turn(ask).answers
                _require(answer)
                fewer, slower = 0 < answer.calls < calls, way is Way.GRAPH and answer.way is not way
                calls, way = (answer.calls if fewer else calls), (Way.QUEUED if slower else way)
                if fewer or slower:
                    break
            else:
                return calls, way

    def _seeds(self) -> tuple[int, int]:
        """Of values and of sketches: new ones in every bout."""
        return self._chance.getrandbits(62), self._chance.getrandbits(62)

    def _fill(self, bout: _Bout) -> None:
        if bout.way is Way.SHARED:
            _require(*self._judge.take_turn(Ask(Task.FILL, seed=bout.seed, calls=bout.calls)).answers)

    def _verdicts(self, bout: _Bout, chosen: Sequence[int]) -> tuple[VerifiedCase, ...]:
        """Of the candidate's results, by values that are made again from the seed."""
        if bout.way is not Way.SHARED:
            _require(*self._candidate.take_turn(Ask(Task.FETCH, chosen=tuple(chosen))).answers)
        ask = Ask(
            Task.JUDGE,
            implementation=self._name,
            calls=bout.calls,
            seed=bout.seed,
            chosen=tuple(chosen),
            challenge=bout.challenge,
            shown=self._shown,
        )
        (answer,) = self._judge.take_turn(ask).answers
        _require(answer)
        if answer.late:
            raise LateError(answer.late)
        return answer.judged


def _require(*answers: Answer) -> None:
    for answer in answers:
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
            _require(*party.take_turn(Ask(Task.LOAD, plan=plan, implementation=each)).answers)
        yield Ring(plan, judge, candidate, name, chance)

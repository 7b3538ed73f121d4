"""Baseline and candidate by turns, in processes apart, each call on inputs of its own."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import comb

from cudadent42.audit.messages import NONE_LARGE, SETS, Answer, Ask, Pace, Task
from cudadent42.audit.party import Party, Turn
from cudadent42.audit.referee import Referee, shared_memory
from cudadent42.audit.store import Side, Store
from cudadent42.model.cases import Case
from cudadent42.model.integrity import Way
from cudadent42.model.records import Plan, TimerKind, VerifiedCase

BLOCKS, GPU_BLOCKS = 12, 24
"""Pairs of turns on a case. On a GPU they are short beside what begins a case."""

EARLY_BLOCKS = 7
"""On the CPU, after which a race may end where each block of them alone would confirm it: of a candidate whose saving
is too small half of the blocks or more would not, so that all seven do in 1 of 128 races."""

SHARE_OUTSIDE = 0.05
"""Of races whose saving lies outside of the interval, at most."""

PACED_EVERY = 4
"""Blocks, of which one measures what copying takes where both sides copy alike: the saving does not contain it, only
the latencies that are shown do."""

WINDOW_MS, LEAST_WINDOW_MS, LEAST_GPU_WINDOW_MS = 10.0, 3.0, 5.0
"""That a turn should last, by the run's latencies: a hundred times what a message between two processes takes, and less
where the run was short. On a CPU drawing the inputs takes several times what the calls do."""

GPU_WINDOWS = 2.0
"""Of such windows in a turn on a GPU: what is subtracted there takes longer than the calls do."""

WINDOWS, WINDOWS_ON_GPU = 60, 40
"""Of such time that a race takes about: two turns of calls in 13 blocks, drawing their inputs, and the references."""

MOST_CALLS, MOST_CALLS_ON_GPU = 16, 512
"""In a turn. On a GPU short calls need many: drawing their inputs takes the host some tens of microseconds each."""

MEMORY_BYTES = 256 << 20
"""Of the inputs and outputs of a turn in shared memory, which limits its calls; at least one. On a GPU its free memory
does (`drawn.MEMORY_SHARE`)."""

JUDGED_CALLS = 2
"""Of each block of which results are judged: the last one, and one by chance; on the CPU one of those whose time
counts, as who is fast in these alone may be inexact in these alone."""

JUDGED_BLOCKS = 2
"""Blocks of a case whose results are judged, by chance."""

UNLIKE_BLOCKS = 2
"""Blocks of a case in which results that are unlike the baseline's are judged too."""


WATCHED_BLOCKS, WATCHED_MS = 3, 1.0
"""Blocks with a call of each side for whose end the referee waits awake, and what a call of the baseline's takes there
at most: a longer one gains nothing by what waking takes, and a referee that is awake takes a processor from it."""


LARGE_FACTOR = 8.0
"""Bounds by which a result of large values may be off: a few rows make up all of its error, and that of honest kernels
was up to 1.5 bounds. Who overflows, or leaves out what is large, is off by hundreds."""


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
    compared: int = 0
    """Results that were compared with the baseline's."""

    @property
    def low_ms(self) -> float:
        return self.saved_ms[outer_rank(len(self.saved_ms))]

    @property
    def high_ms(self) -> float:
        return self.saved_ms[-1 - outer_rank(len(self.saved_ms))]

    @property
    def saved(self) -> float:
        return statistics.median(self.saved_ms)


def outer_rank(blocks: int) -> int:
    """Of the sorted differences, from 0: between this one and its mirror image lies the median in 95 of 100 races or
    more, whatever the distribution (the sign test's interval). 2 of 12, 6 of 24."""
    below, rank = 0, -1
    while (below := below + comb(blocks, rank + 1)) <= SHARE_OUTSIDE / 2 * 2**blocks:
        rank += 1
    return max(rank, 0)


@dataclass(frozen=True)
class _Bout:
    """Turns of both on the same values."""

    calls: int
    way: Way
    seed: int
    challenge: int
    large: int = NONE_LARGE
    """The call that has some large values."""


@dataclass(frozen=True)
class _Block:
    """Milliseconds of a call, with what copying takes."""

    base: float
    own: float
    copies: Mapping[Pace, float]
    """What it takes; empty where that was not measured."""


def _race(blocks: Sequence[_Block], judged: tuple[VerifiedCase, ...], way: Way, calls: int) -> Race:
    """Where every block measured what copying takes, each subtracts its own. Else both sides copy alike, so that it is
    not in the difference, and the middle of what was measured is taken off the latencies."""
    if all(block.copies for block in blocks):
        base = [block.base - block.copies[Pace.PREPARED_COPIES] for block in blocks]
        own = [block.own - block.copies[Pace.COPIES] for block in blocks]
    else:
        copying = statistics.median(took for block in blocks for took in block.copies.values())
        base, own = (
            [took - copying for took in side] for side in zip(*((b.base, b.own) for b in blocks), strict=True)
        )
    saved = sorted(a - b for a, b in zip(base, own, strict=True))
    compared = calls * len(blocks)
    return Race(statistics.median(base), statistics.median(own), tuple(saved), judged, way, compared)


def _never(race: Race) -> bool:
    return False


class Ring:
    """Two contestants. The baseline's process makes the inputs and judges, as no candidate was ever in it."""

    def __init__(
        self, plan: Plan, judge: Party, candidate: Party, name: str, chance: random.Random, store: Store
    ) -> None:
        self._plan = plan
        self._judge = judge
        self._candidate = candidate
        self._store = store
        self._name = name
        self._chance = chance
        self._weights = chance.getrandbits(62)
        self._way = way_for(plan)
        self._shown = ""
        """The candidate's last sketches."""
        self.clock = time.monotonic
        """By which ``preparing_s`` is counted."""
        self.preparing_s = 0.0
        """What the candidate's side took to be made ready."""
        self._fastest: tuple[int, ...] = ()
        """Calls of the candidate's last turn whose time counts."""
        self._alike = True
        """Whether the judge copies for its calls what the candidate does, and no more."""

    def check(self, case: Case) -> tuple[VerifiedCase, ...]:
        """Results of one call, judged. Raises DeclinedError, BrokenError, LateError and AuditLostError."""
        way = Way.QUEUED if self._way is Way.GRAPH else self._way  # nothing is timed
        bout = _Bout(*self._ready(case, 1, way), *self._seeds())
        self._fill(bout)
        self._turn(self._candidate, bout, Pace.CALLS)
        return self._verdicts(bout, range(bout.calls))

    def race(
        self, case: Case, baseline_ms: float, budget_s: float, enough: Callable[[Race], bool] = _never
    ) -> Race:
        """All blocks of a case, in about ``budget_s`` if that can be; errors as of ``check``.

        ``enough``: whether what `EARLY_BLOCKS` show needs no more of them."""
        on_cpu = self._way is Way.SHARED
        least_ms, windows = (LEAST_WINDOW_MS, WINDOWS) if on_cpu else (LEAST_GPU_WINDOW_MS, WINDOWS_ON_GPU)
        wanted = self._calls(case, baseline_ms, max(least_ms, min(WINDOW_MS, 1e3 * budget_s / windows)))
        calls, way = self._ready(case, wanted, self._way)
        count = BLOCKS if way is Way.SHARED else GPU_BLOCKS
        judged_blocks = self._spread(count, JUDGED_BLOCKS)
        others = [number for number in range(EARLY_BLOCKS) if number not in judged_blocks]
        large_block = self._chance.choice(others) if way is Way.SHARED else None
        watched_blocks = self._spread(count, WATCHED_BLOCKS if self._watches(baseline_ms) else 0)
        blocks: list[_Block] = []
        judged: list[VerifiedCase] = []
        unlike_blocks = 0
        for number in range(-1, count):  # the first warms up
            few = number < 0 and way is Way.SHARED
            large = self._chance.randrange(calls) if number == large_block else NONE_LARGE
            bout = _Bout(-(-calls // 4) if few else calls, way, *self._seeds(), large)
            self._fill(bout)
            block = self._block(
                bout,
                paced=not self._alike or number % PACED_EVERY == 0,
                watched=self._chance.randrange(bout.calls) if number in watched_blocks else None,
            )
            unlike = tuple(each for each in self._unlike(bout) if each != bout.large)
            if number >= 0:
                blocks.append(block)
            slots: set[int] = set()
            if number in judged_blocks:
                slots |= {calls - 1, *self._some(self._counting(calls), JUDGED_CALLS - 1)}
            if bout.large != NONE_LARGE:
                judged += map(of_large_values, self._verdicts(bout, (bout.large,)))
            if unlike and unlike_blocks < UNLIKE_BLOCKS:
                unlike_blocks += 1
                slots |= {*self._some(unlike, JUDGED_CALLS)}
            if slots:
                judged += self._verdicts(bout, sorted(slots))
            if number + 1 == EARLY_BLOCKS and way is Way.SHARED:
                early = _race(blocks, tuple(judged), way, calls)
                if enough(early):
                    return early
        return _race(blocks, tuple(judged), way, calls)

    def _spread(self, blocks: int, count: int) -> set[int]:
        """Of so many blocks ``count``, by chance: half of them or more among those after which a race may end."""
        first = -(-count // 2)
        early = self._chance.sample(range(EARLY_BLOCKS), first)
        return {*early, *self._chance.sample(range(EARLY_BLOCKS, blocks), count - first)}

    def _watches(self, baseline_ms: float) -> bool:
        """Processor time has all work in it, whenever that is done."""
        return self._way is Way.SHARED and self._plan.timer is not TimerKind.CPU and baseline_ms < WATCHED_MS

    def _counting(self, calls: int) -> Sequence[int]:
        """Of the candidate's last turn the calls but the last one whose time counts; all where that is not known, and
        where it is the last one's alone."""
        return [each for each in self._fastest if each < calls - 1] or range(calls - 1)

    def _some(self, numbers: Sequence[int], count: int) -> list[int]:
        return self._chance.sample(numbers, min(len(numbers), count))

    def _block(self, bout: _Bout, *, paced: bool, watched: int | None = None) -> _Block:
        """A turn of each, in random order; ahead of them, with ``paced``, what copying takes. ``watched``: a call for
        whose end this process waits awake."""
        paces = [Pace.COPIES] if self._alike else [Pace.COPIES, Pace.PREPARED_COPIES]
        paces = self._chance.sample(paces, len(paces) if paced else 0)
        copies = {pace: self._turn(self._judge, bout, pace) for pace in paces}
        took: dict[Party, float] = {}
        for party in self._chance.sample((self._judge, self._candidate), 2):
            took[party] = self._turn(party, bout, Pace.CALLS, watched)
        return _Block(took[self._judge], took[self._candidate], copies)

    def _unlike(self, bout: _Bout) -> tuple[int, ...]:
        """Of all the candidate's results of a bout, those that are not like the baseline's. Float64 then says whose
        are wrong."""
        if bout.way is Way.SHARED:
            self._store.lay_out(bout.calls)
        ask = Ask(Task.COMPARE, calls=bout.calls, challenge=bout.challenge, shown=self._shown)
        (answer,) = self._judge.take_turn(ask).answers
        _require(answer)
        return answer.unlike

    def _turn(self, party: Party, bout: _Bout, pace: Pace, watched: int | None = None) -> float:
        """Milliseconds of a call. In all ways but that of shared memory the inputs' seed comes when the clock runs, and
        the clock stops when the sketch of the results is there, whose seed comes when the calls are made."""
        run = Ask(Task.RUN, calls=bout.calls, pace=pace)
        if bout.way is Way.SHARED:
            turn = self._calls_of(party, run, watched)
            if party is self._candidate:
                self._fastest = turn.fastest
            return turn.processor_ms if self._plan.timer is TimerKind.CPU else turn.wall_ms
        turn = party.take_turn(
            replace(run, task=Task.WAKE),
            replace(run, seed=bout.seed),
            Ask(Task.SHOW, calls=bout.calls, challenge=bout.challenge),
            untimed=1,
        )
        _require(*turn.answers)
        if party is self._candidate:
            self._shown = turn.answers[-1].shown
        return turn.wall_ms / bout.calls

    def _calls_of(self, party: Party, run: Ask, watched: int | None) -> Turn:
        run = replace(run, awake=self._plan.timer is not TimerKind.CPU)
        side = Side.CANDIDATE if party is self._candidate else Side.JUDGE
        turn = party.take_calls(
            run,
            lambda number: self._store.feed(side, number),
            lambda number: self._store.take(side, number),
            by_processor=self._plan.timer is TimerKind.CPU,
            watched=watched,
        )
        _require(*turn.answers)
        return turn

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
                began_s = self.clock()
                (answer,) = party.take_turn(ask).answers
                if party is self._candidate:
                    self.preparing_s += self.clock() - began_s
                _require(answer)
                if party is self._judge:
                    self._alike = not answer.prepares
                    self._store.arrange(answer.input_bytes, answer.output_bytes)
                # In shared memory there is room for all: who denies it would make each turn a call of a cold judge.
                fewer = way is not Way.SHARED and 0 < answer.calls < calls
                slower = way is Way.GRAPH and answer.way is not way
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
            _require(
                *self._judge.take_turn(
                    Ask(Task.FILL, seed=bout.seed, calls=bout.calls, large=bout.large)
                ).answers
            )
            self._store.clear(bout.calls)

    def _verdicts(self, bout: _Bout, chosen: Sequence[int]) -> tuple[VerifiedCase, ...]:
        """Of the candidate's results, by values that are made again from the seed."""
        if bout.way is Way.SHARED:
            self._store.lay_out(bout.calls)
        else:
            _require(*self._candidate.take_turn(Ask(Task.FETCH, chosen=tuple(chosen))).answers)
        ask = Ask(
            Task.JUDGE,
            implementation=self._name,
            calls=bout.calls,
            seed=bout.seed,
            large=bout.large,
            chosen=tuple(chosen),
            challenge=bout.challenge,
            shown=self._shown,
        )
        (answer,) = self._judge.take_turn(ask).answers
        _require(answer)
        if answer.late:
            raise LateError(answer.late)
        return answer.judged


def of_large_values(verdict: VerifiedCase) -> VerifiedCase:
    """The same by wider bounds; a number that is none stays wrong."""
    error, bound = verdict.error, verdict.bound
    if error is None or bound is None:
        return verdict
    norms = ((error.max, bound.max), (error.rms, bound.rms), (error.worst_row, bound.worst_row))
    passed = all(norm <= LARGE_FACTOR * allowed for norm, allowed in norms)
    return replace(verdict, passed=True, detail="") if passed else verdict


def _require(*answers: Answer) -> None:
    for answer in answers:
        if answer.declined:
            raise DeclinedError(answer.declined)
        if answer.error:
            raise BrokenError(answer.error)


@contextmanager
def ring(plan: Plan, referee: Referee, name: str, chance: random.Random) -> Iterator[Ring]:
    """Both sides loaded. Raises AuditLostError and BrokenError."""
    size = 2 * MEMORY_BYTES + 2 * max(case.memory_bytes(2) for case in plan.cases)
    with ExitStack() as stack:
        judges, candidates, stores = (stack.enter_context(shared_memory(size)) for _ in range(3))
        judge = referee.start([each.fileno() for each in (judges, candidates, stores)], owns_escaped=False)
        candidate = referee.start([candidates.fileno()], owns_escaped=True)
        for party in (judge, candidate):
            stack.callback(referee.dismiss, party)
        for party, each in ((judge, plan.baseline), (candidate, name)):
            _require(*party.take_turn(Ask(Task.LOAD, plan=plan, implementation=each)).answers)
            party.check_clock()
        store = stack.enter_context(Store(judges.fileno(), candidates.fileno(), stores.fileno(), SETS))
        yield Ring(plan, judge, candidate, name, chance, store)

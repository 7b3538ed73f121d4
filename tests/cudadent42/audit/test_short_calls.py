"""Turns of single calls on a CPU: what is taken of their times, and when a race has seen enough."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from unittest.mock import Mock

import pytest

from cudadent42.audit import party as party_module
from cudadent42.audit.messages import NONE_LARGE, Answer, Ask, Pace, Task
from cudadent42.audit.party import Party, Turn
from cudadent42.audit.race import BLOCKS, EARLY_BLOCKS, JUDGED_BLOCKS, JUDGED_CALLS, Race, Ring, _Block, _Bout
from cudadent42.audit.stage import each_block_confirms, gain_is_confirmed, wants_another
from cudadent42.base.serialise import dumps
from cudadent42.decisions.claims import SHORT_MS
from cudadent42.model.cases import Case
from cudadent42.model.integrity import Way
from cudadent42.model.records import Comparison, TimerKind, Verdict, VerifiedCase

MAKES_CALLS = """
import os, sys
requests, answers = int(sys.argv[1]), int(sys.argv[2])
while os.read(requests, 1) != b"\\n":
    continue
for _ in range(int(sys.argv[3])):
    os.read(requests, 1)
    os.write(answers, b".")
os.write(answers, sys.argv[4].encode() + b"\\n")
os.read(requests, 1)
"""
CALLS = 8


@pytest.fixture
def party() -> Iterator[Party]:
    requests, to_contestant = os.pipe()
    from_contestant, answers = os.pipe()
    arguments = [str(requests), str(answers), str(CALLS), dumps(Answer(), indent=None)]
    process = subprocess.Popen([sys.executable, "-c", MAKES_CALLS, *arguments], pass_fds=(requests, answers))
    os.close(requests)
    os.close(answers)
    party = Party(process.pid, to_contestant, from_contestant)
    yield party
    process.kill()
    process.wait()
    party.close()


def test_calls_that_were_held_up_do_not_make_a_turn_longer(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five of eight calls take a thousand times as long: threads that wait for a processor, or to be woken."""
    took_ms = [1000.0, 1.0, 1000.0, 2.0, 1000.0, 3.0, 1000.0, 1000.0]
    readings = itertools.chain.from_iterable((0, round(1e6 * each)) for each in took_ms)
    monkeypatch.setattr(party_module.time, "perf_counter_ns", lambda: next(readings))
    turn = party.take_calls(Ask(Task.RUN, calls=CALLS), lambda number: None, lambda number: None)
    assert turn.wall_ms == 3.0
    assert turn.fastest == (1, 3, 5)


class Counted:
    """A clock of processor time: what its owner ran until now, in milliseconds."""

    def __init__(self, ran_ms: list[float]) -> None:
        self._ran_ns = iter([round(1e6 * each) for each in ran_ms])

    def read_ns(self) -> int:
        return next(self._ran_ns)

    def close(self) -> None:
        return


def test_processor_time_is_all_from_one_output_to_the_next(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So work ahead of a request, or behind its answer, counts."""
    ran_ms = [0.0, *itertools.accumulate([9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])]
    monkeypatch.setattr(party, "_clock", Counted(ran_ms))
    ask = Ask(Task.RUN, calls=CALLS)
    turn = party.take_calls(ask, lambda number: None, lambda number: None, by_processor=True)
    assert turn.processor_ms == 3.0
    assert turn.fastest == (1, 2, 3)


@dataclass
class FakeRing(Ring):
    """Blocks as they are given, without any process."""

    blocks: Iterator[_Block]

    def __post_init__(self) -> None:
        self._chance = random.Random(0)
        self._way = Way.SHARED
        self._alike = True
        self._fastest: tuple[int, ...] = ()
        self.judged_at: list[int] = []
        self.large_at: list[int] = []
        self.chosen: list[Sequence[int]] = []
        self.made = 0
        self.now_s = 0.0

    def _calls(self, case: Case, baseline_ms: float, window_ms: float) -> int:
        return 4

    def _watches(self, baseline_ms: float) -> bool:
        return False

    def _ready(self, case: Case, calls: int, way: Way) -> tuple[int, Way]:
        return calls, way

    def _fill(self, bout: _Bout) -> None:
        return

    def _block(self, bout: _Bout, *, paced: bool, watched: int | None = None) -> _Block:
        self.made += 1
        return next(self.blocks)

    def _unlike(self, bout: _Bout) -> tuple[int, ...]:
        return ()

    def _verdicts(self, bout: _Bout, chosen: Sequence[int]) -> tuple[VerifiedCase, ...]:
        if bout.large != NONE_LARGE:
            self.large_at.append(self.made)
            return ()
        self.judged_at.append(self.made)
        self.chosen.append(chosen)
        return ()


CASE: Case = None  # type: ignore[assignment]
ROW = Comparison("a", "fp32", "mine", "pytorch", 2.0, 1.9, 2.1, Verdict.FASTER, 1.0, 2.0, 25)


def enough(race: Race) -> bool:
    return each_block_confirms(ROW, race)


def block(saved_ms: float) -> _Block:
    return _Block(2.0, 2.0 - saved_ms, {Pace.COPIES: 0.0, Pace.PREPARED_COPIES: 0.0})


@pytest.mark.parametrize(
    ("worst_ms", "blocks"),
    [
        (0.6, EARLY_BLOCKS),
        (0.4, BLOCKS),  # less than half of what the run says
        (-1.0, BLOCKS),
    ],
)
def test_a_race_ends_early_where_each_block_alone_confirms(worst_ms: float, blocks: int) -> None:
    ring = FakeRing(block(saved) for saved in [0.0, 1.0, worst_ms, *[1.0] * BLOCKS])
    race = ring.race(CASE, 2.0, 1.0, enough)
    assert len(race.saved_ms) == blocks
    assert race.low_ms > 0.0
    assert 1 <= len(ring.judged_at) <= JUDGED_BLOCKS


def test_without_being_asked_for_it_no_race_ends_early() -> None:
    assert len(FakeRing(block(1.0) for _ in range(99)).race(CASE, 2.0, 1.0).saved_ms) == BLOCKS


def test_a_speed_up_that_half_of_the_saving_does_not_bear_out_does_not_end_a_race() -> None:
    row = Comparison("a", "fp32", "mine", "pytorch", 20.0, 19.0, 21.0, Verdict.FASTER, 0.1, 2.0, 25)
    ring = FakeRing(block(1.2) for _ in range(99))
    assert len(ring.race(CASE, 2.0, 1.0, lambda race: each_block_confirms(row, race)).saved_ms) == BLOCKS


@pytest.mark.parametrize("seed", range(5))
def test_some_results_of_the_first_blocks_are_judged_whatever_chance(seed: int) -> None:
    ring = FakeRing(block(1.0) for _ in range(99))
    ring._chance = random.Random(seed)
    ring.race(CASE, 2.0, 1.0, enough)
    assert ring.judged_at


@pytest.mark.parametrize("seed", range(5))
def test_one_call_of_the_first_blocks_has_large_values(seed: int) -> None:
    """In no block of which results are held to the usual bounds."""
    ring = FakeRing(block(1.0) for _ in range(99))
    ring._chance = random.Random(seed)
    ring.race(CASE, 2.0, 1.0, enough)
    (made,) = ring.large_at
    assert 2 <= made <= 1 + EARLY_BLOCKS  # the first warms up
    assert made not in ring.judged_at


@pytest.mark.parametrize(
    ("fastest", "judged"), [((1,), {1}), ((1, 2, 3), {1, 2}), ((3,), {0, 1, 2}), ((), {0, 1, 2})]
)
def test_beside_the_last_call_one_is_judged_whose_time_counts(
    fastest: tuple[int, ...], judged: set[int]
) -> None:
    """Who is fast in a quarter of the calls, which make the turn's time, may be inexact in these alone."""
    seen: set[int] = set()
    for seed in range(12):
        ring = FakeRing(block(1.0) for _ in range(99))
        ring._chance, ring._fastest = random.Random(seed), fastest
        ring.race(CASE, 2.0, 1.0)
        assert {(len(slots), slots[-1]) for slots in ring.chosen} == {(JUDGED_CALLS, 3)}
        seen |= {slots[0] for slots in ring.chosen}
    assert seen == judged


def test_which_calls_counted_is_of_the_candidate_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = FakeRing(iter(()))
    ring._judge, ring._candidate = Mock(), Mock()
    turns = {ring._judge: Turn((), 1.0, 1.0, (0,)), ring._candidate: Turn((), 1.0, 1.0, (2,))}
    ring._plan = Mock(timer=TimerKind.CPU)
    monkeypatch.setattr(ring, "_calls_of", lambda party, run, watched: turns[party])
    for party in (ring._candidate, ring._judge):
        ring._turn(party, _Bout(4, Way.SHARED, 0, 0), Pace.CALLS)
    assert ring._fastest == (2,)


class Slow:
    """A side for which everything takes so many seconds of the ring's clock."""

    def __init__(self, ring: FakeRing, takes_s: float) -> None:
        self._ring, self._takes_s = ring, takes_s

    def take_turn(self, ask: Ask) -> Turn:
        self._ring.now_s += self._takes_s
        return Turn((Answer(calls=ask.calls),), 0.0, 0.0)


def test_what_the_candidate_takes_to_prepare_is_counted_apart() -> None:
    """So that a sealed audit, which has so much time, looks at no case less for it."""
    ring = FakeRing(block(1.0) for _ in range(1))
    ring.now_s, ring.preparing_s, ring._weights, ring._store = 0.0, 0.0, 0, Mock()
    ring.clock = lambda: ring.now_s
    ring._judge, ring._candidate = Slow(ring, 1.0), Slow(ring, 30.0)  # type: ignore[assignment]
    Ring._ready(ring, CASE, 4, Way.SHARED)
    assert (ring.now_s, ring.preparing_s) == (31.0, 30.0)


def race_of(low: float, middle: float, high: float) -> Race:
    saved = [low] * 3 + [middle] * 6 + [high] * 3
    return Race(2.0, 2.0 - middle, tuple(saved), ())


@pytest.mark.parametrize(
    ("race", "again"),
    [
        (race_of(-0.5, 0.9, 1.5), True),  # neither nothing nor what the run says is left out
        (race_of(-0.5, 0.6, 0.9), True),
        (race_of(0.1, 0.9, 1.5), False),  # it is not nothing
    ],
)
def test_a_race_that_could_not_tell_is_made_again(race: Race, again: bool) -> None:
    assert wants_another(ROW, race, "a/fp32") is again


def test_a_race_that_leaves_out_half_of_the_saving_is_enough_where_nobody_is_accused() -> None:
    row = replace(ROW, speedup=1.4)
    assert not wants_another(row, race_of(-0.5, 0.2, 0.4), "a/fp32")
    assert wants_another(row, race_of(-0.5, 0.2, 0.6), "a/fp32")


def test_what_is_too_short_is_not_raced_again() -> None:
    short_ms = SHORT_MS / 2
    row = Comparison(
        "a", "fp32", "mine", "pytorch", 2.0, 1.9, 2.1, Verdict.FASTER, short_ms, 2 * short_ms, 25
    )
    noisy = Race(2 * short_ms, short_ms, tuple([-1.0] * 6 + [1.0] * 6), ())
    assert not wants_another(row, noisy, "a/fp32")


Simulated = Callable[[random.Random], float]


def share_confirmed(saved_ms: Simulated, rounds: int = 3000) -> float:
    """Of races whose blocks save so much: as the stage decides, with a second race where the first could not tell."""
    chance, confirmed = random.Random(1), 0
    for _ in range(rounds):
        for _ in range(2):
            race = FakeRing(block(saved_ms(chance)) for _ in range(99)).race(CASE, 2.0, 1.0, enough)
            sound = gain_is_confirmed(ROW, race)
            if sound or not wants_another(ROW, race, "a/fp32"):
                break
        confirmed += sound
    return confirmed / rounds


@pytest.mark.slow
@pytest.mark.parametrize("noise_ms", [0.1, 1.0, 5.0])
def test_what_saves_nothing_is_seldom_confirmed(noise_ms: float) -> None:
    assert share_confirmed(lambda chance: chance.gauss(0.0, noise_ms)) < 0.05


@pytest.mark.slow
def test_what_saves_what_it_says_is_confirmed_though_a_fifth_of_the_blocks_is_disturbed() -> None:
    def saved(chance: random.Random) -> float:
        disturbed = chance.choice([-3.0, 3.0]) if chance.random() < 0.2 else 0.0
        return 1.0 + chance.gauss(0.0, 0.15) + disturbed

    assert share_confirmed(saved) > 0.95

"""Turns on inputs that a contestant draws itself, and the referee's clock around them."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from cudadent42.audit import drawn
from cudadent42.audit import party as party_module
from cudadent42.audit.drawn import DrawnTurns
from cudadent42.audit.messages import Answer, Ask, Pace, Task
from cudadent42.audit.party import Party
from cudadent42.audit.prepared import Prepared, prepare
from cudadent42.base.serialise import dumps
from cudadent42.model.integrity import Way
from cudadent42.operations import definition, numerics
from cudadent42.operations.attention.case import AttentionCase

CASE = AttentionCase("small", "fp32", 1, 2, 2, 32, 32, 32)
CALLS = 4


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    (pytorch,) = (each for each in definition("attention").implementations() if each.name == "pytorch")
    return prepare(CASE, "cpu", pytorch, anew=False, weights=3)


@pytest.fixture
def arenas() -> list[mmap.mmap]:
    return [mmap.mmap(-1, 1 << 20) for _ in range(2)]


@pytest.fixture
def turns(prepared: Prepared, arenas: list[mmap.mmap]) -> DrawnTurns:
    return DrawnTurns(prepared, arenas, CALLS, Way.QUEUED, None)


ANSWERS = """
import os, sys
for _ in open(int(sys.argv[1])):
    os.write(int(sys.argv[2]), sys.argv[3].encode() + b"\\n")
"""
"""A process that answers every line."""

RUN = Ask(Task.RUN, calls=CALLS, seed=11)


def test_a_turns_values_follow_from_its_seed(turns: DrawnTurns) -> None:
    turns.run(RUN)
    first = turns._outputs.clone()
    assert len({each.sum().item() for each in first}) == CALLS  # each call has its own
    turns.run(replace(RUN, seed=12))
    assert not torch.equal(turns._outputs, first)
    turns.run(RUN)
    assert torch.equal(turns._outputs, first)


def test_results_are_those_of_the_inputs_that_the_judge_draws(turns: DrawnTurns, prepared: Prepared) -> None:
    turns.run(RUN)
    for number in (0, CALLS - 1):
        prepared.draw(RUN.seed, number)
        right = numerics(CASE).pytorch(CASE, prepared.sets[number % drawn.SETS])
        torch.testing.assert_close(turns._outputs[number], right)


def test_what_is_woken_up_with_is_nothing_of_the_turn(turns: DrawnTurns) -> None:
    turns.run(RUN)
    before = turns._outputs.clone()
    turns.wake(replace(RUN, seed=0))
    assert torch.equal(turns._outputs, before)  # the values of the turn before


def test_copies_call_nothing(turns: DrawnTurns, prepared: Prepared) -> None:
    turns.run(replace(RUN, pace=Pace.COPIES))
    assert all(torch.equal(each, prepared.stale) for each in turns._outputs)


@pytest.mark.parametrize("chosen", [(0,), (1, CALLS - 1)])
def test_the_judge_is_told_of_what_came_later(
    chosen: tuple[int, ...], prepared: Prepared, arenas: list[mmap.mmap], turns: DrawnTurns
) -> None:
    judge = DrawnTurns(prepared, [arenas[1], arenas[0]], CALLS, Way.QUEUED, None)
    turns.run(RUN)
    ask = Ask(Task.JUDGE, implementation="mine", calls=CALLS, seed=RUN.seed, chosen=chosen, challenge=5)
    ask = replace(ask, shown=turns.show(replace(ask, task=Task.SHOW)))
    turns.fetch(ask)
    answer = judge.judge(ask)
    assert answer.late == ""
    assert [each.passed for each in answer.judged] == [True] * len(chosen)
    assert "others than it said" in judge.judge(replace(ask, challenge=6)).late
    assert "did not say" in judge.judge(replace(ask, shown="")).late


@pytest.mark.parametrize("wrong", [(), (2,), (0, 3)])
def test_every_result_is_compared_with_the_judges_own(
    wrong: tuple[int, ...], prepared: Prepared, arenas: list[mmap.mmap], turns: DrawnTurns
) -> None:
    judge = DrawnTurns(prepared, [arenas[1], arenas[0]], CALLS, Way.QUEUED, None)
    show = Ask(Task.SHOW, calls=CALLS, challenge=5)
    judge.run(RUN)
    judge.show(show)
    turns.run(RUN)
    for number in wrong:
        turns._outputs[number] = turns._outputs[number - 1]
    compare = replace(show, task=Task.COMPARE, shown=turns.show(show))
    assert judge.compare(compare) == wrong
    assert judge.compare(replace(compare, shown="")) == tuple(range(CALLS))


def test_calls_that_wait_draw_the_same_values_one_by_one(
    prepared: Prepared, arenas: list[mmap.mmap], turns: DrawnTurns
) -> None:
    alone = DrawnTurns(prepared, arenas, CALLS, Way.ALONE, None)
    alone.run(RUN)
    turns.run(RUN)
    assert torch.equal(alone._outputs, turns._outputs)


def test_there_are_as_many_calls_as_memory(
    monkeypatch: pytest.MonkeyPatch, prepared: Prepared, arenas: list[mmap.mmap]
) -> None:
    a_call = 4 * CASE.batch * CASE.num_heads * CASE.seqlen_q * CASE.head_dim * 4
    monkeypatch.setattr(drawn, "MEMORY_BYTES", 3 * a_call)
    assert DrawnTurns(prepared, arenas, 100, Way.QUEUED, None).calls == 3
    assert DrawnTurns(prepared, arenas, 100, Way.ALONE, None).calls == 12  # of outputs alone
    monkeypatch.setattr(drawn, "MEMORY_BYTES", 1)
    assert DrawnTurns(prepared, arenas, 100, Way.QUEUED, None).calls == 1


def test_where_there_is_no_graph_calls_are_queued(prepared: Prepared, arenas: list[mmap.mmap]) -> None:
    assert DrawnTurns(prepared, arenas, 1, Way.GRAPH, None).way is Way.QUEUED


def test_the_clock_begins_behind_what_is_untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    requests, to_contestant = os.pipe()
    from_contestant, answers = os.pipe()
    command = [sys.executable, "-c", ANSWERS, str(requests), str(answers), dumps(Answer(), indent=None)]
    process = subprocess.Popen(command, pass_fds=(requests, answers))
    os.close(requests)
    os.close(answers)
    party = Party(process.pid, to_contestant, from_contestant)
    sent: list[bytes] = []
    send = party._send

    def counted(line: bytes) -> None:
        sent.append(line)
        send(line)

    monkeypatch.setattr(party, "_send", counted)
    monkeypatch.setattr(party_module.time, "perf_counter_ns", lambda: 1_000_000 * len(sent))
    try:
        turn = party.take_turn(Ask(Task.WAKE), Ask(Task.RUN), Ask(Task.SHOW), untimed=1)
        assert (len(turn.answers), turn.wall_ms) == (3, 2.0)
        assert party.take_turn(Ask(Task.RUN)).wall_ms == 1.0
    finally:
        process.kill()
        process.wait()
        party.close()

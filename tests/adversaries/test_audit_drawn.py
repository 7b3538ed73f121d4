"""The audit's way on a GPU, on the CPU: each side draws its inputs from a seed that comes when the clock runs, and says
what its results are before it stops. These candidates rewrite the lab's own part in their process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import audits
import lab
import pytest

from cudadent42.audit import race
from cudadent42.audit.stage import Audited
from cudadent42.model.integrity import Breach, Grade, Way

_HEAD = """
from cudadent42.audit.drawn import DrawnTurns
from flashmoe_science import flash_attention

honest = DrawnTurns.wake, DrawnTurns.run, DrawnTurns.show, DrawnTurns.fetch
wake, run, show, fetch = honest


def attention(query, key, value, *, causal, softmax_scale):
    return flash_attention(query, key, value, causal=causal, softmax_scale=softmax_scale)
"""

CANDIDATES = {
    "plain": "",
    "ahead_of_the_clock": """
def compute_ahead(self, ask):
    '''All that can be had ahead of the clock, so that there is nothing to do when it runs.'''
    wake(self, ask)
    for number in range(ask.calls):
        self._draw(ask.seed, number)
    self._pass(ask.pace, ask.calls)

DrawnTurns.wake = compute_ahead
DrawnTurns.run = lambda self, ask: None
""",
    "behind_the_clock": """
def compute_behind(self, ask):
    '''Nothing while the clock runs, all of it when results are fetched.'''
    run(self, self.asked)
    fetch(self, ask)

DrawnTurns.run = lambda self, ask: setattr(self, "asked", ask)
DrawnTurns.fetch = compute_behind
""",
    "says_nothing": """
DrawnTurns.show = lambda self, ask: ""
""",
    "some_of_it_later": """
import torch

def leave_out(self, ask):
    '''A twentieth of every result is left for later.'''
    run(self, ask)
    self.whole = self._outputs.clone()
    self._outputs.flatten(1)[:, : self._outputs[0].numel() // 20].zero_()

def hand_out(self, ask):
    self._outputs.copy_(self.whole)
    fetch(self, ask)

DrawnTurns.run, DrawnTurns.fetch = leave_out, hand_out
""",
    "only_what_is_fetched": """
def compute_fetched(self, ask):
    '''Only the calls whose results are fetched, when it is known which.'''
    for number in ask.chosen:
        self._draw(self.asked.seed, number)
    self._pass(self.asked.pace, self.asked.calls)
    fetch(self, ask)

DrawnTurns.run = lambda self, ask: setattr(self, "asked", ask)
DrawnTurns.fetch = compute_fetched
""",
}

LATE = ("behind_the_clock", "says_nothing", "some_of_it_later", "only_what_is_fetched")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drawn")


@pytest.fixture(scope="module")
def audit(folder: Path) -> Iterator[Audited]:
    """One audit of them all, in the way that falls back from a graph."""
    for name, text in CANDIDATES.items():
        (folder / f"{name}.py").write_text(_HEAD + text)
    names = [candidate(folder, name) for name in CANDIDATES]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr(race, "way_for", lambda plan: Way.GRAPH)
        yield audits.audited(
            names, folder / "audit.log", results=audits.claim(names, 0.2, 0.002), sealed=True
        )


def candidate(folder: Path, name: str) -> str:
    return lab.candidate(folder / f"{name}.py")


def findings(audit: Audited, folder: Path, name: str) -> set[tuple[Breach, Grade]]:
    own = candidate(folder, name)
    return {(each.breach, each.grade) for each in audit.findings if each.implementation == own}


@pytest.mark.parametrize("name", LATE)
def test_results_that_came_later(name: str, audit: Audited, folder: Path) -> None:
    """On a busy machine the parent may look so late that the result is there, and the saving is not: one of the two."""
    expected = {(Breach.LATE_WORK, Grade.FAILED)}, {(Breach.FAST_ONLY_IN_RUN, Grade.FAILED)}
    assert findings(audit, folder, name) in expected


def test_what_was_computed_ahead_is_wrong(audit: Audited, folder: Path) -> None:
    breaches = {breach for breach, _ in findings(audit, folder, "ahead_of_the_clock")}
    assert breaches & {Breach.FAST_ONLY_IN_RUN, Breach.HIDDEN_SHAPE}


def test_a_plain_one_is_checked_and_right(audit: Audited, folder: Path) -> None:
    failed = {each for each in findings(audit, folder, "plain") if each[1] is Grade.FAILED}
    assert not failed
    (confirmation,) = (
        each for each in audit.confirmations if each.implementation == candidate(folder, "plain")
    )
    assert confirmation.way is Way.QUEUED  # a processor has no graphs
    assert confirmation.calls_checked == 4


def test_no_cheat_is_confirmed(audit: Audited, folder: Path) -> None:
    confirmed = {each.implementation for each in audit.confirmations if each.confirmed}
    assert confirmed <= {candidate(folder, "plain")}

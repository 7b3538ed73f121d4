"""The audit's turns on a CPU: who rewrites its own part of them has nothing to leave out, and can neither begin ahead
of the clock nor go on behind it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import audits
import lab
import pytest
import torch

from cudadent42.audit.messages import SETS, Ask, Pace, Task
from cudadent42.audit.party import EarlyError, Party
from cudadent42.audit.prepared import prepare
from cudadent42.audit.referee import shared_memory
from cudadent42.audit.shared import SharedTurns
from cudadent42.audit.stage import Audited
from cudadent42.audit.store import Side, Store
from cudadent42.model.integrity import Breach
from cudadent42.model.records import TimerKind
from cudadent42.operations.attention.implementations import ALL

PYTORCH = next(each for each in ALL if each.name == "pytorch")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


def test_inputs_are_prepared_where_they_are_handed_over() -> None:
    """Nothing is copied for a call, so there is no copy whose time a candidate could save."""
    arena = mmap.mmap(-1, 1 << 20)
    prepared = prepare(lab.CASE, "cpu", PYTORCH, False, 0, arena)
    memory = torch.frombuffer(arena, dtype=torch.uint8)
    first, last = memory.data_ptr(), memory.data_ptr() + len(memory)
    for inputs, written in zip(prepared.sets, prepared.written, strict=True):
        assert inputs.tensors == written
        assert all(first <= tensor.data_ptr() < last for tensor in written)
    calls: list[int] = []
    turns = SharedTurns(prepared, [arena], 2 * SETS, lambda awake: calls.append(0), lambda: calls.append(1))
    turns.run(Ask(Task.RUN, calls=2 * SETS, pace=Pace.CALLS))
    assert calls == [0, 1] * (2 * SETS)
    for slot, call in zip(turns._window, prepared.calls, strict=True):
        assert torch.equal(slot.output, call())


@pytest.mark.parametrize("calls", [1, 2])
def test_few_calls_are_prepared_on_as_few_sets(calls: int) -> None:
    """A long call is a turn by itself, and preparing makes a call for each set."""
    arena = mmap.mmap(-1, 1 << 20)
    prepared = prepare(lab.CASE, "cpu", PYTORCH, False, 0, arena, calls)
    assert len(prepared.sets) == len(prepared.calls) == calls
    turns = SharedTurns(prepared, [arena], calls, lambda awake: None, lambda: None)
    turns.run(Ask(Task.RUN, calls=calls, pace=Pace.CALLS))
    for slot, call in zip(turns._window, prepared.calls, strict=True):
        assert torch.equal(slot.output, call())


class Memory(bytearray):
    """A window that tells in which order it is written, and what is in it behind the last part."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.written: list[int] = []
        self.parts = b""

    def __setitem__(self, where: slice, what: bytes) -> None:  # type: ignore[override]
        self.written.append(where.start)
        super().__setitem__(where, what)
        self.parts = bytes(self)


INPUT_BYTES, OUTPUT_BYTES, CALLS = 1 << 14, 1 << 12, 5


@contextmanager
def store() -> Iterator[tuple[Store, list[bytes]]]:
    """With the inputs of some calls, which it has taken out of the judge's memory."""
    size = CALLS * (INPUT_BYTES + 2 * OUTPUT_BYTES)
    with shared_memory(size) as judges, shared_memory(size) as candidates, shared_memory(size) as both:
        inputs = [os.urandom(INPUT_BYTES) for _ in range(CALLS)]
        for number, each in enumerate(inputs):
            os.pwrite(both.fileno(), each, number * (INPUT_BYTES + 2 * OUTPUT_BYTES))
        with Store(judges.fileno(), candidates.fileno(), both.fileno(), SETS) as kept:
            kept.arrange(INPUT_BYTES, OUTPUT_BYTES)
            kept.clear(CALLS)
            for number in range(CALLS):
                start = number * (INPUT_BYTES + 2 * OUTPUT_BYTES)
                assert os.pread(both.fileno(), INPUT_BYTES, start) == bytes(INPUT_BYTES)
            yield kept, inputs


def test_what_a_call_begins_with_is_handed_over_last() -> None:
    with store() as (kept, inputs):
        window = Memory(SETS * (INPUT_BYTES + OUTPUT_BYTES))
        kept._windows[Side.CANDIDATE] = window  # type: ignore[assignment]
        kept.feed(Side.CANDIDATE, 4)
    offset = 4 % SETS * (INPUT_BYTES + OUTPUT_BYTES)
    assert window[offset : offset + INPUT_BYTES] == inputs[4]
    assert window[offset + INPUT_BYTES : offset + INPUT_BYTES + OUTPUT_BYTES] == b"\xff" * OUTPUT_BYTES
    assert window.written == sorted(window.written, reverse=True)
    assert window.written[-1] == offset


def test_no_row_is_whole_until_all_inputs_are_there() -> None:
    """Of a large batch the keys, the values and most queries are there while the rest is copied, which takes as long as
    the work on them."""
    with store() as (kept, inputs):
        window = Memory(SETS * (INPUT_BYTES + OUTPUT_BYTES))
        kept._windows[Side.CANDIDATE] = window  # type: ignore[assignment]
        kept.feed(Side.CANDIDATE, 0)
    assert window[:INPUT_BYTES] == inputs[0]
    row_bytes = 1 << 10
    for start in range(0, INPUT_BYTES, row_bytes):
        row = slice(start, start + row_bytes)
        assert window.parts[row] != inputs[0][row]


class Written(bytearray):
    """A window whose last entry comes when an output is copied out of it as a whole."""

    def __getitem__(self, where: slice) -> bytearray:  # type: ignore[override]
        if where.stop - where.start == OUTPUT_BYTES:
            super().__setitem__(slice(where.start, where.stop), bytes(OUTPUT_BYTES))
        return super().__getitem__(where)


def test_an_output_is_looked_at_before_it_is_copied() -> None:
    """Of a large one the copy takes as long as the call: who runs ahead of it could finish meanwhile."""
    with store() as (kept, _):
        kept.feed(Side.CANDIDATE, 0)
        kept.take(Side.CANDIDATE, 0)  # it stays as it is
        kept._windows[Side.CANDIDATE] = Written(SETS * (INPUT_BYTES + OUTPUT_BYTES))  # type: ignore[assignment]
        kept.feed(Side.CANDIDATE, 0)
        with pytest.raises(EarlyError):
            kept.take(Side.CANDIDATE, 0)


def audited(name: str, log: Path, baseline_ms: float = 1.0) -> Audited:
    results = audits.claim([name], baseline_ms, baseline_ms / 2)
    return audits.audited([name], log, results=results, timer=TimerKind.CALL)


def findings(name: str, log: Path, baseline_ms: float = 1.0) -> tuple[set[Breach], str, int]:
    """Breaches, what is said of them, and how many results were compared."""
    audit = audited(name, log, baseline_ms)
    words = "; ".join(each.evidence for each in audit.findings)
    compared = sum(each.calls_compared for each in audit.confirmations)
    return {each.breach for each in audit.findings}, words, compared


def test_who_says_too_early_that_it_is_done_hands_out_what_it_has(tmp_path: Path) -> None:
    """Or is seen at it, where its late work meets a look at the output."""
    breaches, words, _ = findings(lab.cheat("done_early"), tmp_path / "audit.log", baseline_ms=0.2)
    assert breaches & {Breach.FAST_ONLY_IN_RUN, Breach.HIDDEN_SHAPE, Breach.LATE_WORK}, words


def test_who_is_waited_for_awake_is_never_slept_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sleeper takes some time to wake, in which an output could be finished that was said to be done."""
    waited: list[float] = []
    read, write = os.pipe()

    class Poll:
        def poll(self, wait_ms: float) -> bool:
            waited.append(wait_ms)
            if len(waited) == 3:
                os.write(write, b".")
            return len(waited) > 3

    party = Party(os.getpid(), os.dup(write), read)
    monkeypatch.setattr(party, "_answered", Poll())
    assert party._byte(60.0, awake=True) == b"."
    assert waited[:4] == [0, 0, 0, 0]
    os.close(write)
    party.close()


def test_a_candidate_does_not_choose_how_long_the_turns_are(tmp_path: Path) -> None:
    """Four calls are the fewest of a turn that it has no part in; there are fewer turns where the machine is busy."""
    audit = audited(lab.cheat("fewer_calls"), tmp_path / "audit.log")
    words = "; ".join(each.evidence for each in audit.findings)
    assert audit.confirmations, words
    for each in audit.confirmations:
        assert each.calls_compared >= 4 * each.blocks, words

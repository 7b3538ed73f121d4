"""Rows 12, 14, 15 and 16 of the table: cheats that read or write what the lab itself keeps in memory, or its plans."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import audits
import lab
import pytest

from cudadent42.model.integrity import Breach, Grade

IN_ONE_WORKER = ("slow_in_warm_up", "errors_reset")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> lab.Seen:
    log = tmp_path_factory.mktemp("state") / "worker.log"
    return lab.put_before([lab.cheat(name) for name in IN_ONE_WORKER], log)


@pytest.mark.parametrize("name", IN_ONE_WORKER)
def test_a_finding_stays_and_does_not_depend_on_how_many_calls_there_are(name: str, seen: lab.Seen) -> None:
    own = [each for each in seen.findings() if each.implementation == lab.cheat(name)]
    assert {(each.breach, each.grade) for each in own} == {(Breach.WRONG_WHILE_TIMED, Grade.FAILED)}
    assert "an output of a timed block is wrong" in own[0].evidence
    assert seen.failures(lab.cheat(name))


def test_a_block_that_was_never_measured(tmp_path: Path) -> None:
    """The real block comes as well, so the parent sees one twice."""
    name = lab.cheat("message_forged")
    seen = lab.put_before([name], tmp_path / "worker.log")
    assert "its event pipe was written to by others (block 0 twice)" in seen.failures(name)
    assert not seen.failures("pytorch")
    assert "block 0 twice" in seen.benched.skipped[lab.CASE.id]  # which samples are real, nobody can tell


def test_the_expected_result_is_in_no_memory_that_a_candidate_can_read(tmp_path: Path) -> None:
    """In the worker it may lie beside the inputs; in the audit it is in another process."""
    name = lab.cheat("expected_scanned")
    audit = audits.audited([name], tmp_path / "audit.log", results=audits.claim([name], 0.2, 0.002))
    failed = [each for each in audit.findings if each.grade is Grade.FAILED]
    assert {each.breach for each in failed} & {Breach.FAST_ONLY_IN_RUN, Breach.HIDDEN_SHAPE}
    assert not any(each.confirmed for each in audit.confirmations)

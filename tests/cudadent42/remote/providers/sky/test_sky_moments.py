"""What another terminal or a full disk does at the worst moments of a run on a machine of SkyPilot's."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from sky_lab import SPEC, Sky, only_start, says

from cudadent42.base.errors import UsageError
from cudadent42.remote.core import record
from cudadent42.remote.core.record import JobRecord
from cudadent42.remote.core.run import Ended
from cudadent42.remote.providers.sky import provider as sky
from cudadent42.remote.providers.sky.cluster import Cluster
from cudadent42.remote.providers.sky.spec import Spec
from cudadent42.runs import starts
from cudadent42.runs.starts import StartOutcome


def of_another_terminal() -> JobRecord:
    """A run on the machine that was asked for while this terminal waited for an answer."""
    begun = starts.request(SPEC.machine, SPEC.rate)
    now = datetime.now(timezone.utc).isoformat()
    made = JobRecord(record.new_job(), SPEC.cluster, "/nowhere", (), now, folder="there", start=begun)
    record.save(made)
    return made


@pytest.mark.parametrize("keep", [False, True])
def test_a_machine_that_another_terminal_asked_for_is_left_to_it(cloud: Sky, keep: bool) -> None:
    """Both found no machine of that name; the one that ends first, or is refused there, would take it down."""
    other = of_another_terminal()
    with pytest.raises(UsageError, match=f"asked for already, for {other.job}.* remote attach {other.job}"):
        run(cloud, None, replace(SPEC, keep=keep))
    assert not (cloud.folder / "calls").exists()
    assert only_start().id == other.start


def test_a_kept_machine_that_another_terminal_used_meanwhile_is_not_taken_down(cloud: Sky) -> None:
    cloud.run(replace(SPEC, keep=True))
    kept = only_start().id
    other = replace(of_another_terminal(), start=kept)
    starts.mark(starts.load()[-1].id, StartOutcome.FAILED)
    record.save(other)
    with pytest.raises(UsageError, match=other.job):
        run(cloud, kept)
    cloud.output.rename(cloud.output.parent / "first")
    run(cloud, kept, replace(SPEC, keep=True))
    assert [call[0] for call in cloud.calls()] == ["launch", "launch"]


def test_a_run_that_nothing_waits_for_keeps_no_machine_up(cloud: Sky) -> None:
    """One of a machine that is gone since was never brought back."""
    other = of_another_terminal()
    starts.mark(other.start, StartOutcome.DELETED)
    run(cloud, None)
    assert [call[0] for call in cloud.calls()] == ["launch", "down"]


def test_a_run_is_on_the_machine_of_its_start_whatever_the_clock_was_set_to(cloud: Sky) -> None:
    """Its machine would be taken down with what it measured."""
    made = of_another_terminal()
    starts.mark(made.start, StartOutcome.READY)
    record.save(replace(made, started="2001-01-01T00:00:00+00:00"))
    says(cloud, "UP")
    with pytest.raises(UsageError, match=f"has what {made.job} measured"):
        sky.kept_start(SPEC)


def test_a_kept_machine_that_is_gone_by_now_is_a_new_start(cloud: Sky) -> None:
    """Another terminal took it down while this one waited for an answer."""
    cloud.run(replace(SPEC, keep=True))
    kept = only_start().id
    says(cloud, None)
    starts.mark(kept, StartOutcome.DELETED)
    cloud.output.rename(cloud.output.parent / "first")
    run(cloud, kept)
    first, second = starts.load()
    assert first.id == kept
    assert (first.ready is not None, second.outcome) == (True, StartOutcome.DELETED)


def test_host_keys_that_cannot_be_kept_are_found_before_anything_is_asked_for(
    cloud: Sky, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found after the launch, nobody would be told of the machine, nor how what it measured is had back."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "100%"))
    with pytest.raises(UsageError, match="cannot be told to keep host keys"):
        cloud.run()
    assert not (cloud.folder / "calls").exists()
    assert starts.load() == ()
    with pytest.raises(UsageError, match="no run elsewhere waits"):
        record.find(None)


def test_a_journal_that_cannot_take_the_end_loses_neither_the_run_nor_its_output(
    cloud: Sky, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = starts.mark

    def full(identity: str, outcome: StartOutcome, *rest: Any, **more: Any) -> None:
        if outcome is StartOutcome.DELETED:
            raise UsageError("cannot put it on record")
        mark(identity, outcome, *rest, **more)

    monkeypatch.setattr(starts, "mark", full)
    ended = cloud.ended()
    assert (ended.returned.output, ended.trouble) == ("the result\n", None)
    assert "cannot put it on record" in cloud.said


def test_an_interrupt_of_the_end_says_what_may_go_on(cloud: Sky, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(at: Cluster) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Cluster, "end", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cloud.run()
    assert "it may still cost money: sky status --refresh, sky down c42-l4" in cloud.said[-1]
    assert only_start().ended is None


def test_an_interrupt_of_the_end_of_one_that_did_not_run_says_so_too(
    cloud: Sky, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cloud.folder / "says").write_text("something new")

    def interrupted(at: Cluster) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Cluster, "end", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cloud.run()
    assert "it may still cost money: sky status --refresh, sky down c42-l4" in cloud.said[-1]
    assert only_start().ended is None


def run(cloud: Sky, kept: str | None, spec: Spec = SPEC) -> Ended:
    return cloud.launched(kept, spec, ())

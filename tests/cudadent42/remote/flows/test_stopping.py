"""The end of runs on machines of one's own, which have no start on record."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest
from sshd import Server

from cudadent42.base.errors import UsageError
from cudadent42.remote.core import hosts, record
from cudadent42.remote.core import job as jobs
from cudadent42.remote.core.address import parse
from cudadent42.remote.core.hosts import Remote, save
from cudadent42.remote.core.job import JobState
from cudadent42.remote.core.record import JobRecord
from cudadent42.remote.core.run import workspace_of
from cudadent42.remote.flows.stopping import stop_all

PYTHON = """#!/bin/sh
mkdir -p "$5"
sleep 1000
"""


def on_record(remote: Remote) -> JobRecord:
    save(remote)
    begun = JobRecord(
        record.new_job(), remote.name, "/nowhere/out", (), datetime.now(timezone.utc).isoformat()
    )
    record.save(begun)
    return begun


@pytest.mark.parametrize("removed", [False, True])
def test_a_run_is_found_in_the_folder_that_it_was_started_in(
    server: Server, tmp_path: Path, removed: bool
) -> None:
    """The remote has another folder since, or its name is gone."""
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    mine = Remote("mine", parse(server.address), "first folder", str(python))
    begun = on_record(mine)
    record.save(replace(begun, folder="first folder", address=server.address))
    (server.folder / "home/first folder/tree").mkdir(parents=True)
    workspace = workspace_of(mine)
    jobs.start(workspace, begun.job, "cpu", ())
    hosts.remove("mine")
    if not removed:
        save(Remote("mine", parse(server.address), "second folder"))
    (ended,) = stop_all((), print)
    assert ended.ended
    assert jobs.state(workspace, begun.job).state is JobState.DONE


def test_records_of_before_folders_were_kept_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    remote = Remote("mine", parse("ssh://host"), "a folder")
    begun = on_record(remote)
    path = record.jobs_folder() / f"{begun.job}.json"
    old = {
        key: value for key, value in json.loads(path.read_text()).items() if key not in ("folder", "address")
    }
    path.write_text(json.dumps({**old, "schema_version": 1}))
    assert record.remote_of(record.find(begun.job)) == remote
    hosts.remove("mine")
    with pytest.raises(UsageError, match="no remote 'mine'"):
        record.remote_of(record.find(begun.job))


def test_runs_are_ended_and_one_machine_that_does_not_answer_keeps_no_other(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    mine = Remote("mine", parse(server.address), python=str(python))
    unreachable = on_record(Remote("away", parse("ssh://127.0.0.1:1")))
    begun = on_record(mine)
    (server.folder / "home/cudadent42-remote/tree").mkdir(parents=True)
    workspace = workspace_of(mine)
    jobs.start(workspace, begun.job, "cpu", ())
    away, ended = stop_all((), print)
    assert (away.ended, ended.ended) == (False, True)
    assert away.name == f"{unreachable.job} on away"
    assert "cannot be reached" in away.what
    assert f"remote attach {begun.job}" in ended.what
    assert jobs.state(workspace, begun.job).state is JobState.DONE
    assert [each.fetched for each in record.records()] == [False, False]

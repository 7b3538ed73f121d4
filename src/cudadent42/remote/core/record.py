"""What this machine knows of its runs elsewhere: a small file each, so that another terminal can go on tomorrow."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from cudadent42.base.errors import LabError, NewerVersionError, UsageError
from cudadent42.base.files import write_text
from cudadent42.base.folders import make_private, state_folder
from cudadent42.base.reading import read_json
from cudadent42.base.serialise import decode, dumps
from cudadent42.remote.core import hosts
from cudadent42.remote.core.address import SshAddress, parse
from cudadent42.remote.core.hosts import Remote

SCHEMA_VERSION = 2
"""2: `folder`, `address` and `start`."""


@dataclass(frozen=True)
class CloudRecord:
    """The machine that was started for a run, or found running: enough to end it from another terminal."""

    machine: str
    """``gce://PROJECT/ZONE/INSTANCE``."""
    rate: str
    start: str | None
    """The start's identity in the journal of starts; None where it ran before, and not by us."""
    since: str
    """When it was asked for; UTC, ISO 8601."""
    after: str
    reach: str
    spot: bool
    results: str
    """Where the run folder is copied to; empty for nowhere."""


@dataclass(frozen=True)
class JobRecord:
    job: str
    remote: str
    output: str
    """Folder here that the run folder goes to."""
    arguments: tuple[str, ...]
    """Of ``cudadent42 run`` there."""
    started: str
    """UTC, ISO 8601."""
    fetched: bool = False
    exit_code: int | None = None
    cloud: CloudRecord | None = None
    folder: str | None = None
    """There, as the remote had it when the run began; None in records of before that was kept."""
    address: str = ""
    """As `folder`, of a machine that ssh reaches by itself; a cloud's is in ``cloud``."""
    start: str = ""
    """As `folder`, of a machine of SkyPilot's: by it its host key is known."""
    schema_version: int = SCHEMA_VERSION


def jobs_folder() -> Path:
    return state_folder() / "remote"


def new_job() -> str:
    """A name that no other run has; it begins with the time, to the second."""
    return f"{datetime.now(timezone.utc):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def save(record: JobRecord) -> None:
    folder = make_private(jobs_folder())
    write_text(folder / f"{record.job}.json", dumps(replace(record, schema_version=SCHEMA_VERSION)))


def forget(job: str) -> None:
    """Of a run that was put on record, and then could not be started."""
    (jobs_folder() / f"{job}.json").unlink(missing_ok=True)


def records() -> tuple[JobRecord, ...]:
    """All, the oldest first. Raises UsageError where one cannot be read."""
    all_records = [_read(path) for path in jobs_folder().glob("*.json")]
    return tuple(sorted(all_records, key=lambda each: (each.started, each.job)))


def readable() -> tuple[tuple[JobRecord, ...], tuple[str, ...]]:
    """Those that can be read, the oldest first; and what is wrong with each of the others.

    For what has to go on all the same: a damaged file keeps no machine from being shown and ended.
    """
    intact, damaged = [], []
    for path in sorted(jobs_folder().glob("*.json")):
        try:
            intact.append(_read(path))
        except LabError as error:
            damaged.append(str(error))
    return tuple(sorted(intact, key=lambda each: (each.started, each.job))), tuple(damaged)


def find(job: str | None) -> JobRecord:
    """The record of ``job``; of the last run that was not brought back yet where it is None. Raises UsageError."""
    candidates = records() if job is None else readable()[0]
    if job is None:
        waiting = [record for record in candidates if not record.fetched]
        if not waiting:
            raise UsageError("no run elsewhere waits to be brought back; `cudadent42 remote jobs` lists all")
        return waiting[-1]
    chosen = next((record for record in candidates if record.job == job), None)
    if chosen is None:
        raise UsageError(f"no run {job!r} was started from here; `cudadent42 remote jobs` lists all")
    return chosen


def waiting_on(machine: str) -> tuple[JobRecord, ...]:
    """Runs on a cloud's machine, by its name there, that were not brought back, the oldest first."""
    return tuple(
        record
        for record in readable()[0]
        if record.cloud is not None and record.cloud.machine == machine and not record.fetched
    )


def remote_of(begun: JobRecord) -> Remote:
    """The remote of a run, with the folder that the run is in: it may have been changed or removed since.

    The address is the one that the remote has now, because machines move; where that name is gone, or is a machine of
    another kind, the one that it had. A machine of SkyPilot's is the one of its start. Raises UsageError where nothing
    is known.
    """
    if begun.folder is None:
        return hosts.get(begun.remote)
    if begun.start:
        return Remote(begun.remote, parse(begun.address), begun.folder, start=begun.start)
    registered = hosts.remotes().get(begun.remote)
    if registered is None or (begun.cloud is None and not isinstance(registered.address, SshAddress)):
        registered = Remote(
            begun.remote, parse(begun.address if begun.cloud is None else begun.cloud.machine)
        )
    return replace(registered, folder=begun.folder)


def moved_from(remote: Remote) -> tuple[str, ...]:
    """What is to be said of runs that wait to be brought back, where a remote gets another address.

    They are looked for at its present one, see `remote_of`.
    """
    before = hosts.remotes().get(remote.name)
    if before is None or before.address == remote.address:
        return ()
    return tuple(
        f"{record.job} is not back yet; it was started when {remote.name} was {before.address}, and is looked for at "
        f"{remote.address} now"
        for record in readable()[0]
        if record.remote == remote.name and record.cloud is None and not record.fetched
    )


def _read(path: Path) -> JobRecord:
    try:
        document = read_json(path)
        if document.get("schema_version", 0) > SCHEMA_VERSION:
            raise NewerVersionError(f"{path} was written by a newer version of cudadent42; use that one")
        return decode(JobRecord, document)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"{path} is damaged: {error}; remove it to forget that run") from error

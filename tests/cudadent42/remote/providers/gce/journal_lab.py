"""Starts and runs on record, for tests of what is on of them."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from standin import BENCH, Cloud

from cudadent42.cost import rates
from cudadent42.remote.core import record
from cudadent42.remote.core.address import parse
from cudadent42.remote.core.hosts import make, save
from cudadent42.remote.core.record import CloudRecord, JobRecord
from cudadent42.remote.flows.survey import Survey, survey
from cudadent42.runs import starts
from cudadent42.runs.starts import StartOutcome

FRESH = "gce://my-project/us-central1-a/cudadent42-run-20261101-120000-abcdef"
LABELS = {"cudadent42": "fresh"}


def look(later: timedelta = timedelta(0)) -> Survey:
    return survey(rates.load(), datetime.now(timezone.utc) + later)


def a_start(machine: str = BENCH, ready: bool = True) -> str:
    begun = starts.request(machine, "gcp-l4")
    if ready:
        starts.mark(begun, StartOutcome.READY)
    return begun


def of(identity: str) -> starts.MachineStart:
    return next(start for start in starts.load() if start.id == identity)


def a_job(
    cloud: Cloud, begun: str, machine: str = BENCH, output: str = "/nowhere/out", **variables: str
) -> JobRecord:
    """A run on record, of a remote that reaches ``machine``."""
    name = machine.rpartition("/")[2][:20].rstrip("-")
    save(make(name, parse(machine), rate="gcp-l4", python=cloud.python(**variables)))
    on = CloudRecord(machine, "gcp-l4", begun, of(begun).requested, "keep:30", "auto", False, "")
    made = JobRecord(record.new_job(), name, output, (), of(begun).requested, cloud=on)
    record.save(made)
    return made

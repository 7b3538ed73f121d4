"""The ledger's tables. All of it follows from run folders, session folders and the journal of machine starts.

Raw samples are not in it: they stay in ``samples.csv``, to which `runs.path` leads; ``timings`` has their number and
quantiles. Times are UTC in ISO 8601, which sorts as text in every database; money is not stored, because rates change.
"""

from __future__ import annotations

from sqlalchemy import Boolean, Column, Float, Index, Integer, MetaData, String, Table, Text

SCHEMA_VERSION = 2

_ID = String(64)
_NAME = String(255)

metadata = MetaData()

meta = Table(
    "ledger_meta",
    metadata,
    Column("key", _NAME, primary_key=True),
    Column("value", Text, nullable=False),
)
"""``VERSION_KEY``; ``REBUILDING_KEY`` while a rebuild goes on or after it was killed; ``REBUILD_ON_KEY`` while rows of
other machines are missing that only these can make anew."""

VERSION_KEY = "schema_version"
REBUILDING_KEY = "rebuilding"
"""When it began."""
REBUILD_ON_KEY = "rebuild_on"
"""The machines, as a JSON list."""

runs = Table(
    "runs",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("path", Text, nullable=False),
    Column("host", _NAME, nullable=False),  # the machine on which `path` is
    Column("session", _ID),
    Column("status", _NAME, nullable=False),
    Column("error", Text, nullable=False),
    Column("started", _NAME, nullable=False),
    Column("ended", _NAME),
    Column("seconds", Float),  # of wall-clock time; a killed run's until its last sign of life
    Column("rate", _NAME, nullable=False),
    Column("suite", _NAME, nullable=False),
    Column("device", _NAME, nullable=False),
    Column("timer", _NAME, nullable=False),
    Column("cache", _NAME, nullable=False),
    Column(
        "machine", Text, nullable=False
    ),  # the processor that was measured, by name; on a CPU with its instructions
    Column("summary", Text, nullable=False),
    Column("version", _NAME, nullable=False),
    Column("revision", _NAME, nullable=False),  # short, with -dirty; empty for an installed wheel
    Column("branch", Text, nullable=False),
    Column("baseline", Text, nullable=False),
    Column("candidate", Text),
    Column("speedup", Float),
    Column("ci_low", Float),
    Column("ci_high", Float),
    Column("verdict", _NAME),
    Column("noise_floor", Float),
    Column("verified", Boolean),  # null where verification did not end
    Column("samples", Integer, nullable=False),
    Index("runs_by_start", "started"),
    Index("runs_by_session", "session"),
)

cases = Table(
    "cases",
    metadata,
    Column("run", _ID, primary_key=True),
    Column("name", _NAME, primary_key=True),
    Column("dtype", _NAME, primary_key=True),
    Column("shape", Text, nullable=False),  # the case as JSON
)

comparisons = Table(
    "comparisons",
    metadata,
    Column("run", _ID, primary_key=True),
    Column("name", _NAME, primary_key=True),
    Column("dtype", _NAME, primary_key=True),
    Column("implementation", _NAME, primary_key=True),
    Column("role", _NAME, nullable=False),  # candidate, other or control
    Column("baseline", Text, nullable=False),
    Column("speedup", Float),
    Column("ci_low", Float),
    Column("ci_high", Float),
    Column("verdict", _NAME, nullable=False),
    Column("latency_ms", Float),
    Column("baseline_latency_ms", Float),
    Column("blocks", Integer, nullable=False),
    Column("flagged_blocks", Integer, nullable=False),
    Column("revision", _NAME, nullable=False),  # of the implementation's code: its own file's, else the run's
    Index("comparisons_by_case", "name", "dtype"),
)

timings = Table(
    "timings",
    metadata,
    Column("run", _ID, primary_key=True),
    Column("name", _NAME, primary_key=True),
    Column("dtype", _NAME, primary_key=True),
    Column("implementation", _NAME, primary_key=True),
    Column("samples", Integer, nullable=False),
    Column("flagged", Integer, nullable=False),  # samples of disturbed blocks
    Column("min_ms", Float),
    Column("p10_ms", Float),
    Column("median_ms", Float),
    Column("p90_ms", Float),
    Column("max_ms", Float),
    Column("memory_mb", Float),  # the largest
)

sessions = Table(
    "sessions",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("path", Text, nullable=False),
    Column("host", _NAME, nullable=False),
    Column("name", Text, nullable=False),
    Column("status", _NAME, nullable=False),
    Column("started", _NAME, nullable=False),
    Column("ended", _NAME),
    Column("seconds", Float),
    Column("rate", _NAME, nullable=False),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("session", _ID, primary_key=True),
    Column("position", Integer, primary_key=True),
    Column("name", Text, nullable=False),
    Column("planned_minutes", Float),
    Column("minutes", Float),
    Column("outcome", _NAME, nullable=False),
)

machine_starts = Table(
    "machine_starts",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("host", _NAME, nullable=False),  # from which it was started
    Column("machine", Text, nullable=False),
    Column("rate", _NAME, nullable=False),
    Column("session", _ID),
    Column("requested", _NAME, nullable=False),
    Column("ready", _NAME),
    Column("ended", _NAME),
    Column("outcome", _NAME, nullable=False),
    Column("reason", Text, nullable=False),
)

RUN_PARTS = (cases, comparisons, timings)
"""What belongs to one run, by its column ``run``."""

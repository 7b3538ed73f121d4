"""JSON Schemas of the files that runs, races, profiles, bisections and sessions leave: made from the records that these
are written from, so that there is one description of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cudadent42.base.errors import UsageError
from cudadent42.base.json_schema import DIALECT, Builder, Schema
from cudadent42.base.toml import did_you_mean
from cudadent42.decisions.gates import SCHEMA_VERSION as GATES_VERSION
from cudadent42.flows.race import bisect
from cudadent42.model.records import Results, VerifyReport
from cudadent42.model.script import Replay
from cudadent42.profiles.records import DIAGNOSIS, PROFILE, Diagnosis, Profile
from cudadent42.profiles.records import SCHEMA_VERSION as PROFILE_VERSION
from cudadent42.runs.gate_report import GATES, GatesDocument
from cudadent42.runs.replays import REPLAY
from cudadent42.runs.run_folder import LOG, MANIFEST, RESULTS, VERIFY, LogLine, Manifest
from cudadent42.runs.run_folder import SCHEMA_VERSION as RUN_VERSION
from cudadent42.runs.sessions import EVENTS
from cudadent42.session.clock import Instant
from cudadent42.session.events import KINDS
from cudadent42.session.events import SCHEMA_VERSION as SESSION_VERSION


@dataclass(frozen=True)
class File:
    """A file that has a schema."""

    name: str
    """Of the schema."""
    file: str
    """As it is called in its folder."""
    version: int
    """Of the folder or file; it grows where an older reader would misread what is written."""
    kind: type[Any] | None
    """The record that the file is, or that each of its lines is. None for the events of a session, which are many."""
    by_line: bool = False
    """Whether each line is a document of its own."""

    @property
    def id(self) -> str:
        return f"urn:cudadent42:{self.name}:{self.version}"


FILES: Mapping[str, File] = {
    each.name: each
    for each in (
        File("manifest", MANIFEST, RUN_VERSION, Manifest),
        File("results", RESULTS, RUN_VERSION, Results),
        File("verify", VERIFY, RUN_VERSION, VerifyReport),
        File("log", LOG, RUN_VERSION, LogLine, by_line=True),
        File("gates", GATES, GATES_VERSION, GatesDocument),
        File("profile", PROFILE, PROFILE_VERSION, Profile),
        File("diagnosis", DIAGNOSIS, PROFILE_VERSION, Diagnosis),
        File("replay", REPLAY, RUN_VERSION, Replay),
        File("bisection", bisect.FILES.setup, bisect.SCHEMA_VERSION, bisect.Setup),
        File("bisection-step", bisect.FILES.entries, bisect.SCHEMA_VERSION, bisect.Step, by_line=True),
        File("session-event", EVENTS, SESSION_VERSION, None, by_line=True),
    )
}
"""By the schema's name."""


def schema(name: str) -> Schema:
    """The schema of that name. Raises UsageError, naming those there are."""
    file = FILES.get(name)
    if file is None:
        raise UsageError(
            f"unknown schema {name!r}; expected one of {', '.join(FILES)}{did_you_mean(name, FILES)}"
        )
    builder = Builder()
    body = _session_event(builder) if file.kind is None else builder.body(file.kind)
    return {"$schema": DIALECT, "$id": file.id, **builder.whole(body)}


def _session_event(builder: Builder) -> Schema:
    """As ``session.events.to_line`` writes it."""
    when = builder.body(Instant)
    return {
        "title": "SessionEvent",
        "description": "One event of a session, with its place in the log and when it happened.",
        "anyOf": [
            {
                "type": "object",
                "properties": {
                    "number": {"type": "integer"},
                    **when["properties"],
                    "event": {"const": name},
                    "data": builder.of(kind),
                },
                "required": ["number", *when["required"], "event", "data"],
                "additionalProperties": False,
            }
            for name, kind in KINDS.items()
        ],
    }

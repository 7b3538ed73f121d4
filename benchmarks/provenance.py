"""Where and from which source a benchmark's figures come, for the JSON files of the benchmarks."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

from cudadent42.model.device_names import parse_device
from cudadent42.preflight.runner import gather, inspect
from cudadent42.runs.source import revision


def provenance(device: str) -> dict[str, object]:
    """Date, source revision, and this machine's summary, hardware and versions (what is a path is left out).

    Args:
        device: ``cpu`` or ``cuda``.
    """
    machine = inspect(gather(parse_device(device), Path("runs")))
    source = revision()
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "revision": None if source is None else source.commit,
        "changed_source": source is None or source.dirty,
        "machine": machine.summary,
        "facts": {key: value for key, value in machine.facts.items() if not str(value).startswith("/")},
    }

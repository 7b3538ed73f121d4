"""Instructions, cycles and cache misses of a CPU kernel, counted by ``perf stat`` where the system allows it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cudadent42.stages.profile import child

EVENTS = ("instructions:u", "cycles:u", "cache-misses:u", "cache-references:u")
REPEAT_S = 1.0
"""For which the call is repeated while it is counted."""
_LINE_BYTES = 64
_PARANOID = Path("/proc/sys/kernel/perf_event_paranoid")
_USER_ALLOWED = 2
"""Up to this level a user may count what runs in user space of their own processes."""


@dataclass(frozen=True)
class Counted:
    """What was counted while the call was repeated, or why not."""

    values: dict[str, float]
    """By event, without ``:u``."""
    missing: dict[str, str]


def unavailable() -> str | None:
    """Why nothing can be counted here, with what would change that; None where it can be tried."""
    if shutil.which("perf") is None:
        return "perf is not installed (apt-get install linux-perf, or linux-tools-generic on Ubuntu)"
    try:
        level = int(_PARANOID.read_text())
    except (OSError, ValueError):
        return None
    if level > _USER_ALLOWED and os.geteuid() != 0:
        return f"perf_event_paranoid is {level}; sudo sysctl kernel.perf_event_paranoid={_USER_ALLOWED}"
    return None


def count(command: Sequence[str], folder: Path, environment: Mapping[str, str], timeout_s: float) -> Counted:
    """Run ``command`` under perf. It switches counting on and off through the pipes ``control`` and ``ack``, which are
    made in ``folder``."""
    control, ack, output = folder / "control", folder / "ack", folder / "perf.csv"
    for pipe in (control, ack):
        os.mkfifo(pipe)
    arguments = [
        *("perf", "stat", "--delay", "-1", "--control", f"fifo:{control},{ack}"),
        *("--field-separator", ";", "--output", str(output), "--event", ",".join(EVENTS), "--"),
        *command,
    ]
    try:
        done = child.run(arguments, timeout_s=timeout_s, environment=environment)
    except (OSError, subprocess.TimeoutExpired) as error:
        return _none(f"perf did not finish: {error}")
    if done.returncode != 0 or not output.is_file():
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        return _none(f"perf failed: {lines[-1][:200] if lines else f'exit code {done.returncode}'}")
    return parse(output.read_text(encoding="utf-8", errors="replace"))


def _none(reason: str) -> Counted:
    return Counted({}, {event.partition(":")[0]: reason for event in EVENTS})


def parse(text: str) -> Counted:
    """The output of ``perf stat`` with semicolons between fields."""
    values: dict[str, float] = {}
    missing: dict[str, str] = {}
    for line in text.splitlines():
        fields = line.split(";")
        if len(fields) < 3 or line.startswith("#"):
            continue
        name = fields[2].partition(":")[0]
        try:
            values[name] = float(fields[0])
        except ValueError:
            missing[name] = f"perf says {fields[0].strip('<>')} (a virtual machine may have no counters)"
    for event in EVENTS:
        name = event.partition(":")[0]
        if name not in values:
            missing.setdefault(name, "perf did not report it")
    return Counted(values, missing)


def metrics(counted: Counted, calls: int, bytes_min: float) -> dict[str, float]:
    """The quantities that rules speak of, per call."""
    per_call: dict[str, float] = {}
    get: Callable[[str], float | None] = counted.values.get
    instructions, cycles, misses = get("instructions"), get("cycles"), get("cache-misses")
    if instructions is not None and calls:
        per_call["cpu_instructions"] = instructions / calls
        if cycles:
            per_call["cpu_instructions_per_cycle"] = instructions / cycles
    if cycles is not None and calls:
        per_call["cpu_cycles"] = cycles / calls
    if misses is not None and calls:
        per_call["cpu_miss_bytes"] = misses / calls * _LINE_BYTES
        if bytes_min > 0:
            per_call["cpu_miss_bytes_share"] = per_call["cpu_miss_bytes"] / bytes_min
    return per_call

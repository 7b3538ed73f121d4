"""Nsight Compute: how it is run on one call, and how its reports are read."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cudadent42.base.errors import LabError, MachineNotReadyError
from cudadent42.base.output import OutputLog
from cudadent42.base.paths import real_path
from cudadent42.preflight.ncu_install import remedy, tool
from cudadent42.profiles.metrics import RawMetric, light_set
from cudadent42.stages.profile import child

_IMPORT_TIMEOUT_S = 60
MAX_LAUNCHES = 16
"""Kernels of one call that are looked at."""

_INTERFACE = Path("extras/python")
_READER = Path(__file__).with_name("ncu_reader.py")

_DENIED = "ERR_NVGPUCTRPERM"
_NO_LIBRARY = "LibraryNotLoaded"
"""What it says under gVisor, for one, whoever asks."""

_OTHER_DRIVER = "driver is not compatible"
_DRIVER_REMEDY = "install the Nsight Compute of the driver's CUDA version, which `nvidia-smi` shows"

_ERRORS = re.compile(r"==ERROR==\s*(.*)")


@dataclass(frozen=True)
class Report:
    """What one profiled launch is called, and its metrics by Nsight Compute's names."""

    kernel: str
    metrics: dict[str, RawMetric]


class CountersDeniedError(MachineNotReadyError):
    """This user may not read the GPU's counters, or this machine has none to read."""


class ProfilerFailedError(LabError):
    """Nsight Compute ran and gave no profile."""


def command(
    ncu: Path,
    output: Path,
    target: Sequence[str],
    *,
    full: bool,
    cold: bool,
    kernel: str = "",
    launches: int = MAX_LAUNCHES,
) -> list[str]:
    """The command line that profiles what ``target`` does between cudaProfilerStart and cudaProfilerStop.

    The clocks are left alone. ``cold`` empties the caches before each pass; ``kernel`` is a regular expression of
    function names, for a call of many kernels; no more than ``launches`` are looked at.
    """
    chosen = ["--set", "full", "--import-source", "yes"] if full else []
    return [
        str(ncu),
        *("--clock-control", "none", "--cache-control", "all" if cold else "none"),
        *("--profile-from-start", "off", "--launch-count", str(launches)),
        *(("--kernel-name", f"regex:{kernel}") if kernel else ()),
        *chosen,
        *("--metrics", ",".join(light_set())),
        *("--force-overwrite", "--export", str(output)),
        *target,
    ]


def run(
    arguments: Sequence[str],
    output: Path,
    *,
    timeout_s: float,
    log: Path,
    kernel: str = "",
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run such a command; what it and the target print goes to ``log``. ``kernel`` is that of `command`.

    Raises:
        CountersDeniedError: the counters may not be read here; the message has the remedy.
        ProfilerFailedError: no report came of it, for the reason given.
    """
    log.unlink(missing_ok=True)  # of an earlier profile of the folder
    with closing(OutputLog(log)) as printed:
        try:
            done = child.run(arguments, timeout_s=timeout_s, environment=environment, output=printed)
        except OSError as error:
            raise ProfilerFailedError(f"{arguments[0]} does not run: {error.strerror}") from error
        except subprocess.TimeoutExpired as error:
            raise ProfilerFailedError(
                f"ncu was still running after {timeout_s:.0f} s; see {log.name}, or take a smaller case"
            ) from error
    text = log.read_text(errors="replace")
    if _DENIED in text:
        raise CountersDeniedError(
            f"this user may not read the GPU's performance counters ({_DENIED}); {remedy()}"
        )
    if done.returncode != 0 or not output.is_file():
        reason = _reason(text, kernel)
        if done.returncode < 0:
            reason = f"it was ended by signal {-done.returncode}; the last it said: {reason}"
        raise ProfilerFailedError(f"ncu profiled nothing ({reason}); see {log.name}")


def _reason(text: str, kernel: str = "") -> str:
    if _NO_LIBRARY in text:
        return "this sandbox or virtual machine does not let the profiler reach the GPU's counters"
    errors = _ERRORS.findall(text)
    if errors:
        remedy = f"; {_DRIVER_REMEDY}" if _OTHER_DRIVER in text else ""
        return str(errors[-1]).strip()[:300] + remedy
    if "No kernels were profiled" in text:
        return (
            f"no kernel of the call has a name like {kernel!r}" if kernel else "the call launched no kernel"
        )
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "it printed nothing"


def read(ncu: Path, report: Path) -> list[Report]:
    """Every launch in a report: through NVIDIA's Python interface where it works, else by a CSV export.

    Raises ProfilerFailedError where neither works.
    """
    reports = _read_in_python(ncu, report)
    return read_csv(export_csv(ncu, report)) if reports is None else reports


def _read_in_python(ncu: Path, report: Path) -> list[Report] | None:
    """None where the interface is not installed, is for another Python, or ends the process."""
    interface = next((path / _INTERFACE for path in _roots(ncu) if (path / _INTERFACE).is_dir()), None)
    if interface is None:
        return None
    arguments = [sys.executable, str(_READER), str(interface), str(report)]
    try:
        done = subprocess.run(
            arguments, input="\n".join(light_set()), capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S
        )
        launches = json.loads(done.stdout) if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return None
    return None if launches is None else [_report(launch) for launch in launches]


def _report(launch: dict[str, Any]) -> Report:
    metrics = {
        name: RawMetric(math.nan if value is None else value, unit)
        for name, (value, unit) in launch["metrics"].items()
    }
    return Report(launch["kernel"], metrics)


def _roots(ncu: Path) -> list[Path]:
    """Folders that may be the installation of an ``ncu``, which can be a script elsewhere."""
    version = ".".join(map(str, tool(ncu).version[:3]))
    elsewhere = Path("/opt/nvidia/nsight-compute").glob(f"{version}*") if version else ()
    return [*real_path(ncu).parents, *elsewhere]


def export_csv(ncu: Path, report: Path) -> str:
    """A report's raw page as CSV, in base units. Raises ProfilerFailedError."""
    arguments = [str(ncu), "--import", str(report), "--page", "raw", "--csv", "--print-units", "base"]
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ProfilerFailedError(f"ncu cannot read {report.name} back: {error}") from error
    if done.returncode != 0:
        raise ProfilerFailedError(
            f"ncu cannot read {report.name} back ({_reason(done.stdout + done.stderr)})"
        )
    return done.stdout


def read_csv(text: str) -> list[Report]:
    """Every launch of such a CSV: a line of names, a line of units, a line per launch.

    Raises ProfilerFailedError for what is no such table.
    """
    table = "\n".join(line for line in text.splitlines() if line and not line.startswith("=="))
    rows = list(csv.DictReader(io.StringIO(table)))
    if not rows or "Kernel Name" not in rows[0]:
        raise ProfilerFailedError("the profiler's CSV has no table of kernels in it")
    units, launches = rows[0], rows[1:]
    return [
        Report(
            row["Kernel Name"] or "",
            {
                name: RawMetric(_number(value), units.get(name) or "")
                for name, value in row.items()
                if name is not None and isinstance(value, str) and _is_metric(name)
            },
        )
        for row in launches
    ]


def _is_metric(name: str) -> bool:
    return "__" in name


def _number(text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return math.nan

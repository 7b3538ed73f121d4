"""What a run elsewhere costs beyond the run, and what it survives: on loopback, through a real sshd.

    python benchmarks/remote.py overhead --count 7 --output FOLDER
    python benchmarks/remote.py cuts --count 50 --output FOLDER
    python benchmarks/remote.py names --count 200 --output FOLDER
    python benchmarks/remote.py bootstrap --count 1 --output FOLDER

``overhead``: ``run --on`` less the time from the start of the run's own process there to its exit code, in an
environment that is there already; with a connection that is shared with the call before, and with a new one.
``cuts``: ``run --on`` with a changed working tree, its connection cut at a moment drawn evenly from the time that a
whole one takes: sending, bootstrap, run and fetching. Then: is the whole run folder back, and does a process run there?
``names``: folders, files, cases, branches and hosts whose names are commands: was one executed?
``bootstrap``: a bare root made with debootstrap to "Preflight OK", and the same again (the test's own measurement).

Each writes one JSON file into FOLDER, row by row; a file that is there already is added to. ``--there`` keeps the far
side's home with its environment, so that a later call finds it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from loopback import NAME, ROOT, Loopback, loopback
from provenance import provenance

from cudadent42.base.errors import UsageError
from cudadent42.remote.core import job as jobs
from cudadent42.remote.core.address import parse
from cudadent42.remote.core.hosts import Remote
from cudadent42.remote.core.job import JobState, Workspace
from cudadent42.remote.core.ssh import Connection, connect
from cudadent42.remote.core.tree import read_tree

Row = dict[str, object]

SMALLEST = ("--suite=small", "--case=tiny", "--dtype=fp32", "--repeats=5", "--device=cpu")
GRACE_S = 10.0
"""For processes there to end once the run folder is back."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("overhead", "cuts", "names", "bootstrap"))
    parser.add_argument(
        "--count", type=int, required=True, help="Rows in the end; 0 only prepares the far side."
    )
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--there", type=Path, help="Keeps the far side's home.")
    parser.add_argument("--output", type=Path, required=True)
    chosen = parser.parse_args()
    path = chosen.output / f"{chosen.what}.json"
    document: Row = {
        "schema_version": 1,
        "benchmark": f"remote {chosen.what}",
        **provenance("cpu"),
        "rows": [],
    }
    if path.exists():
        document = json.loads(path.read_text(encoding="utf-8"))
    rows = document["rows"]
    assert isinstance(rows, list)
    missing = range(len(rows), chosen.count)
    if chosen.what == "bootstrap":
        write(path, document, bare_roots(missing), bootstrap_summary)
        return
    with loopback(chosen.there) as far:
        measured, summary = {
            "overhead": (overheads, overhead_summary),
            "cuts": (cuts, cuts_summary),
            "names": (names, names_summary),
        }[chosen.what]
        write(path, document, measured(far, missing, chosen.seed), summary)


def write(path: Path, document: Row, new: Iterator[Row], summary: Callable[[list[Row]], Row]) -> None:
    """The rows as they come, each with what all of them say so far."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = document["rows"]
    assert isinstance(rows, list)
    for row in new:
        rows.append(row)
        document["summary"] = summary(rows)
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(row), flush=True)
    print(json.dumps(document.get("summary")))


# ---------------------------------------------------------------- overhead


def overheads(far: Loopback, missing: range, seed: int) -> Iterator[Row]:
    warm_up(far)
    for number in missing:
        new = number % 2 == 1
        if new:
            far.end_connections_here()
        yield {"connection": "new" if new else "shared", **one_overhead(far)}


def one_overhead(far: Loopback) -> Row:
    """A ``run --on``, and when the same run's own process there began and had ended. Times by the kernel's clocks."""
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log"
        begun = time.time()
        process = far.cudadent42("run", f"--on={NAME}", f"--output-dir={scratch}/run", *SMALLEST, log=log)
        run_begun = run_ended = None
        while process.poll() is None:
            run_begun = run_begun or first_start(far)
            run_ended = run_ended or exit_written(far)
            time.sleep(0.02 if run_begun else 0.1)
        ended = time.time()
        if process.returncode != 0 or run_begun is None or run_ended is None:
            raise SystemExit(log.read_text())
    return {
        "run_on_s": round(ended - begun, 3),
        "run_s": round(run_ended - run_begun, 3),
        "before_s": round(run_begun - begun, 3),
        "after_s": round(ended - run_ended, 3),
        "overhead_s": round(ended - begun - (run_ended - run_begun), 3),
    }


def first_start(far: Loopback) -> float | None:
    """When the process of ``cudadent42 run`` there was started; None where there is none yet."""
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    for pid, command in far.commands():
        if b"cudadent42" in command and b"run" in command:
            with suppress(OSError):
                ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[19])
                return boot + ticks / os.sysconf("SC_CLK_TCK")
    return None


def exit_written(far: Loopback) -> float | None:
    """When the run's exit code was on record there; None as long as it is not."""
    for path in (far.folder / "jobs").glob("*/exit"):
        with suppress(OSError):
            return path.stat().st_mtime
    return None


def warm_up(far: Loopback) -> None:
    """The tree, the environment and the compiled kernels get there."""
    with tempfile.TemporaryDirectory() as scratch:
        timed_run_on(far, Path(scratch), SMALLEST)


def timed_run_on(far: Loopback, scratch: Path, arguments: tuple[str, ...]) -> tuple[float, str]:
    """Seconds of a whole ``run --on``, and what it said."""
    log = scratch / "log"
    begun = time.monotonic()
    code = far.cudadent42(
        "run", f"--on={NAME}", f"--output-dir={scratch / 'run'}", *arguments, log=log
    ).wait()
    took = time.monotonic() - begun
    if code != 0:
        raise SystemExit(log.read_text())
    return took, log.read_text()


def overhead_summary(rows: list[Row]) -> Row:
    def median(field: str, connection: str) -> float | None:
        values = [float(str(row[field])) for row in rows if row["connection"] == connection]
        return round(statistics.median(values), 3) if values else None

    return {
        connection: {field: median(field, connection) for field in ("before_s", "after_s", "overhead_s")}
        for connection in ("shared", "new")
    }


# ---------------------------------------------------------------- cuts


def ended_there(far: Loopback) -> int:
    return far.server.cut()


def ended_here(far: Loopback) -> int:
    return far.end_connections_here()


def frozen(far: Loopback) -> int:
    """Nothing comes through for a while, then the connection ends."""
    sessions = far.server.sessions()
    for pid in sessions:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    time.sleep(3)
    return far.server.cut()


WAYS = {"ended there": ended_there, "ended here": ended_here, "frozen, then ended": frozen}


def cuts(far: Loopback, missing: range, seed: int) -> Iterator[Row]:
    warm_up(far)
    with tempfile.TemporaryDirectory() as scratch:
        change(far, "measuring")
        whole_s, _ = timed_run_on(far, Path(scratch), SMALLEST)
        wanted = samples(Path(scratch) / "run")
    for number in missing:
        chance = random.Random(f"{seed} {number}")
        row = None
        while row is None:  # a moment after the end is drawn again
            row = one_cut(far, chance, whole_s, wanted, number)
        yield row


def one_cut(far: Loopback, chance: random.Random, whole_s: float, wanted: int, number: int) -> Row | None:
    change(far, f"{number} {chance.random()}")
    how = chance.choice(list(WAYS))
    at_s = chance.uniform(0, whole_s)
    with tempfile.TemporaryDirectory() as scratch:
        log, run = Path(scratch) / "log", Path(scratch) / "run"
        begun = time.monotonic()
        process = far.cudadent42("run", f"--on={NAME}", f"--output-dir={run}", *SMALLEST, log=log)
        with suppress(subprocess.TimeoutExpired):
            process.wait(at_s)
        cut = 0
        while process.poll() is None and not cut:
            stage = stage_of(far, log)
            cut = WAYS[how](far)
            cut_s = time.monotonic() - begun
            time.sleep(0.05)
        code = process.wait()
        took = time.monotonic() - begun
        left, waited = left_behind(far)
        if not cut:
            return None
        return {
            "how": how,
            "at_s": round(cut_s, 2),
            "during": stage,
            "connections_cut": cut,
            "seconds": round(took, 1),
            "exit_code": code,
            "whole_folder": is_whole(run, wanted),
            "jobs_left_there": sum(1 for _ in (far.folder / "jobs").iterdir()),
            "processes_left_there": len(left),
            "waited_for_processes_s": waited,
            **({} if code == 0 else {"said": log.read_text()[-500:]}),
        }


def change(far: Loopback, text: str) -> None:
    """The working tree becomes another, so that it is sent again."""
    (far.project / "round.txt").write_text(text + "\n")


def stage_of(far: Loopback, log: Path) -> str:
    """How far a run was, by what it has said and left there."""
    said = log.read_text(errors="replace")
    if "sent " not in said:
        return "sending"
    if "started " not in said:
        return "starting"
    folders = list((far.folder / "jobs").iterdir())
    if any((folder / "exit").exists() for folder in folders):
        return "fetching"
    return "running" if any((folder / "run").exists() for folder in folders) else "bootstrap and preflight"


def left_behind(far: Loopback) -> tuple[list[int], float]:
    """Processes there after the end, and how long they were waited for."""
    begun = time.monotonic()
    while (left := far.processes()) and time.monotonic() - begun < GRACE_S:
        time.sleep(0.1)
    return left, round(time.monotonic() - begun, 1)


def samples(run: Path) -> int:
    return len((run / "samples.csv").read_text().splitlines()) - 1


def is_whole(run: Path, wanted: int) -> bool:
    if not all(
        (run / name).exists() for name in ("manifest.json", "results.json", "report.html", "remote.log")
    ):
        return False
    status = json.loads((run / "manifest.json").read_text())["status"]
    return status == "finished" and samples(run) == wanted


def cuts_summary(rows: list[Row]) -> Row:
    return {
        "cuts": len(rows),
        "folders_brought_back": sum(bool(row["whole_folder"]) and row["exit_code"] == 0 for row in rows),
        "processes_left_there": sum(int(str(row["processes_left_there"])) for row in rows),
        "jobs_left_there": sum(int(str(row["jobs_left_there"])) for row in rows),
        "during": dict(Counter(str(row["during"]) for row in rows)),
        "how": dict(Counter(str(row["how"]) for row in rows)),
    }


# ---------------------------------------------------------------- names

TEMPLATES = (
    "$({})",
    "`{}`",
    "; {} ;",
    "' ; {} ; '",
    '" ; {} ; "',
    "\\' ; {}",
    "\n{}\n",
    "| {}",
    "& {} &",
    "-oProxyCommand={}",
    "--rsh={}",
    "-e {}",
    "$(({})) ${{x:-$({})}}",
    "a b $({})",
    "*?[a] `{}`",
    "~root/$({})",
    "!{}",
    "\x1b]0;{}\x07",
    "é\u202e$({})",
    "#{}\n$({})",
)
"""Around a command: what a shell, OpenSSH, tar or git could take for theirs."""

PYTHON_THERE = """#!/bin/sh
# In the place of a Python with the lab: keeps what it was called with.
output=$5
mkdir -p "$output"
shift 5
for argument; do printf '%s\\0' "$argument"; done >"$output/arguments"
"""


def names(far: Loopback, missing: range, seed: int) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as scratch:
        python = Path(scratch) / "python"
        python.write_text(PYTHON_THERE)
        python.chmod(0o755)
        connection = connect(parse(far.server.address))
        for number in missing:
            # A name of its own in /tmp: neither a folder here nor one there decides what is found.
            canary = Path(tempfile.gettempdir()) / f"cudadent42-canary-{os.getpid()}-{number}"
            template = TEMPLATES[number % len(TEMPLATES)]
            command = random.Random(f"{seed} {number}").choice(
                (f"touch {canary}", f"touch${{IFS}}{canary}", f">{canary}")
            )
            hostile = template.format(command, command).replace("{}", command)
            by_a_shell = would_execute(hostile, canary)
            with tempfile.TemporaryDirectory() as folder:
                arrived = use(far, connection, hostile, str(python), Path(folder))
            executed = canary.exists()
            canary.unlink(missing_ok=True)
            name = hostile.replace(str(canary), "CANARY")
            yield {"name": name, **arrived, "executed_by_a_shell": by_a_shell, "executed": executed}


def would_execute(name: str, canary: Path) -> bool:
    """Whether a shell that is given the name unquoted does it: the control of what is looked at."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["sh", "-c", f"echo {name}"], cwd=folder, capture_output=True, check=False)
    executed = canary.exists()
    canary.unlink(missing_ok=True)
    return executed


def use(far: Loopback, connection: Connection, name: str, python: str, scratch: Path) -> Row:
    """One hostile name in each place that takes one: what of it arrived as it was, and what was refused."""
    try:
        host = parse(f"ssh://{name}").destination
    except UsageError:
        host = None
    project = scratch / "project"
    branch = make_project(project, name)
    workspace = Workspace(
        connection, Remote(NAME, parse(far.server.address), f"far {name}".replace("/", "_"), python)
    )
    jobs.send(workspace, read_tree(project))
    jobs.start(workspace, "job-1", "cpu", (f"--case={name}", name))
    while jobs.state(workspace, "job-1").state is JobState.RUNNING:
        time.sleep(0.05)
    jobs.fetch(workspace, "job-1", scratch / "back")
    jobs.forget(workspace, "job-1")
    there = far.home / f"far {name}".replace("/", "_") / "tree"
    arguments = (scratch / "back/run/arguments").read_bytes()
    return {
        "host_refused": host is None,
        "branch_taken_by_git": branch,
        "folder_and_file_arrived": (there / file_name(name)).read_text() == "content",
        "case_arrived": arguments == f"--case={name}\0{name}\0".encode(),
    }


def make_project(project: Path, name: str) -> bool:
    """A repository with a file and, where git takes it, a branch of that name; whether it took it."""
    git = ("git", "-C", str(project), "-c", "user.name=benchmark", "-c", "user.email=benchmark@localhost")
    subprocess.run(["git", "init", "-q", str(project)], check=True)
    (project / file_name(name)).write_text("content")
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "first"], check=True)
    made = subprocess.run([*git, "checkout", "-q", "-b", name.replace(" ", "${IFS}")], capture_output=True)
    return made.returncode == 0


def file_name(name: str) -> str:
    return name.replace("/", "_")


def names_summary(rows: list[Row]) -> Row:
    fields = (
        "executed",
        "executed_by_a_shell",
        "host_refused",
        "branch_taken_by_git",
        "folder_and_file_arrived",
        "case_arrived",
    )
    return {"names": len(rows), **{field: sum(bool(row[field]) for row in rows) for field in fields}}


# ---------------------------------------------------------------- bootstrap


def bare_roots(missing: range) -> Iterator[Row]:
    test = "tests/test_bootstrap.py::test_a_bare_root_becomes_ready_in_one_command"
    for _ in missing:
        with tempfile.TemporaryDirectory() as scratch:
            report = Path(scratch) / "report.xml"
            arguments = (test, "--net", "--slow", "-q", "-p", "no:cacheprovider", f"--junitxml={report}")
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *arguments], cwd=ROOT, capture_output=True, text=True
            )
            printed = {
                str(item.get("name")): str(item.get("value"))
                for item in ElementTree.parse(report).getroot().iter("property")
            }
        if done.returncode != 0 or "first_s" not in printed:
            raise SystemExit(done.stdout[-3000:])
        yield {
            "first_s": float(printed["first_s"]),
            "second_s": [float(each) for each in printed["second_s"].split()],
        }


def bootstrap_summary(rows: list[Row]) -> Row:
    seconds = [each for row in rows for each in row["second_s"]]  # type: ignore[attr-defined]
    return {
        "slowest_first_s": max(float(str(row["first_s"])) for row in rows),
        "slowest_second_s": max(seconds),
    }


if __name__ == "__main__":
    main()

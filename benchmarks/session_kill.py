"""SIGKILL at a random moment of a real session, many times: does it always go on, and is every sample still there?

    python benchmarks/session_kill.py --kills 100 --output benchmarks/results/<date>-session-kill

Each round begins ``cudadent42 session run`` (preflight, worker, verification, timing of a small suite on the CPU) in a
project of its own and kills the process, and nothing but it, at a moment drawn evenly from the time that a whole run
takes. The process is forked from one that has imported everything already, which saves seconds without a write.

A sample counts as measured once the parent has it and has written it. Before and after each kill, and after the session
went on, the rows of every ``samples.csv`` are compared: what was there must be there, unchanged. And for each block
that ``log.jsonl`` has on record there must be a row of each implementation. After every kill the next command must take
the session up and put the cut-off work on record; at the end the session is led through its last checkpoint.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from provenance import provenance

ROOT = Path(__file__).resolve().parent.parent

GOOD_CODES = (0, 1, 6)
"""A race may well find no difference: the gates' exit codes are no failure here."""

PRELOADED = (
    "torch",
    "cudadent42.commands.cli",
    "cudadent42.flows.pipeline",
    "cudadent42.flows.race",
    "cudadent42.stages.report.html",
    "cudadent42.stages.report.markdown",
    "cudadent42.session.report.html",
    "matplotlib.backends.backend_svg",
)
"""Imported once, before the processes that are killed are forked."""

SUITE = """
name = "kill"
dtypes = ["fp32"]
repeats = {repeats}
warmup = 0
implementations = ["pytorch", "{candidate}"]
case = [
    {{ name = "one", batch = 1, num_heads = 1, seqlen = 32, head_dim = 32 }},
    {{ name = "two", batch = 1, num_heads = 1, seqlen = 64, head_dim = 32 }},
]
"""

KERNEL = """
from torch.nn.functional import scaled_dot_product_attention

TIMES = {times}


def attention(query, key, value, *, causal, softmax_scale):
    if causal or query.shape[1] != key.shape[1] or query.shape[3] != 32:
        raise NotImplementedError("only what this benchmark measures")
    for _ in range(TIMES):
        out = scaled_dot_product_attention(query, key, value, scale=softmax_scale)
    return out


attention.peer_of = "PyTorch"
"""

PROTOCOL = """
schema_version = 1
name = "kill"
budget_minutes = 600

[[checkpoint]]
name = "baseline"
work = "measure"
minutes = 10

[[checkpoint]]
name = "fix"
work = "change"
minutes = 10

[[checkpoint]]
name = "document"
work = "document"
minutes = 1
"""


@dataclass
class Summary:
    kills: int = 0
    resumes: int = 0
    """Kills after which the session could be read and its next command took it up."""
    samples_measured: int = 0
    samples_lost: int = 0
    blocks_without_samples: int = 0
    finished_before_the_kill: int = 0
    interrupted_by: dict[str, int] = field(default_factory=dict)
    """What was going on at the kill, by the last stage of the run folder's log."""
    torn_lines: int = 0
    """Kills that left a torn last line in a file."""
    trouble: list[str] = field(default_factory=list)
    seconds: float = 0.0
    python: str = sys.version.split()[0]
    seed: int = 0


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True
    ).stdout


def environment(home: Path) -> dict[str, str]:
    homes = {name: str(home / name.lower()) for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME")}
    return {**os.environ, **homes, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Command:
    """A command of the session in a forked process."""

    pid: int
    output: Path

    def wait(self, until_s: float = float("inf")) -> int | None:
        """The exit code; None if it still runs at that time of ``time.monotonic``."""
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() >= until_s:
                return None
            time.sleep(0.002)


def begin(project: Path, *arguments: str) -> Command:
    """Begin ``cudadent42 session`` with these arguments."""
    output = project.parent / "output.txt"
    child = os.fork()
    if child == 0:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(project)
        os.environ.update(environment(project.parent))
        sys.argv = ["cudadent42", "session", *arguments]
        from cudadent42.commands import cli

        code = cli.main()
        sys.stdout.flush()
        os._exit(code)
    return Command(child, output)


def run(project: Path, *arguments: str) -> tuple[int | None, str]:
    """Exit code and output of a command that is waited for."""
    command = begin(project, *arguments)
    code = command.wait()
    return code, command.output.read_text(errors="replace")


def make_project(folder: Path, repeats: int) -> Path:
    project = folder / "project"
    project.mkdir()
    git(project, "init", "-q")
    git(project, "config", "user.email", "benchmark@localhost")
    git(project, "config", "user.name", "benchmark")
    (project / "mine.py").write_text(KERNEL.format(times=3))
    (project / "suite.toml").write_text(SUITE.format(repeats=repeats, candidate="mine.py:attention"))
    (project / "protocol.toml").write_text(PROTOCOL)
    git(project, "add", "-A")
    git(project, "commit", "-qm", "the project")
    return project


def rows(session: Path) -> dict[str, bytes]:
    """The whole rows of every samples file, by its path."""
    counts = {}
    for path in session.glob("runs/*/samples.csv"):
        data = path.read_bytes()
        counts[str(path.relative_to(session))] = data[: data.rfind(b"\n") + 1]
    return counts


def torn(session: Path) -> bool:
    files = [session / "events.jsonl", *session.glob("runs/*/samples.csv"), *session.glob("runs/*/log.jsonl")]
    return any(
        data and not data.endswith(b"\n") for data in (path.read_bytes() for path in files if path.exists())
    )


def blocks_without_samples(session: Path) -> int:
    """Blocks on record in a run's log whose rows are not all in its samples file."""
    missing = 0
    for folder in session.glob("runs/*"):
        if not (folder / "samples.csv").exists():
            continue
        text = (folder / "samples.csv").read_text()
        table = list(csv.DictReader(text[: text.rfind("\n") + 1].splitlines()))
        have = Counter((f"{row['case']}/{row['dtype']}", row["block"]) for row in table)
        wanted = max(have.values(), default=0)
        for line in (folder / "log.jsonl").read_text().split("\n")[:-1]:
            entry = json.loads(line)
            if entry["event"] == "block":
                conditions = entry["conditions"]
                missing += have[(conditions["case"], str(conditions["block"]))] != wanted
    return missing


def stage_of(session: Path) -> str:
    """What the last run was at."""
    folders = sorted(session.glob("runs/*"))
    if not folders or not (folders[-1] / "log.jsonl").exists():
        return "before a run folder"
    if (folders[-1] / "manifest.json").exists():
        status = json.loads((folders[-1] / "manifest.json").read_text())["status"]
        if status == "finished":
            return "after a run"
    stages = [
        entry["name"]
        for entry in map(json.loads, (folders[-1] / "log.jsonl").read_text().split("\n")[:-1])
        if entry["event"] == "stage"
    ]
    return stages[-1] if stages else "before its first stage"


def one_round(project: Path, session: Path, chance: random.Random, whole_s: float, summary: Summary) -> float:
    """Begin work, kill it at a moment of a run that takes ``whole_s``, look, go on; how long a run takes."""
    before = rows(session)
    began = time.monotonic()
    until = began + chance.uniform(0, whole_s)
    command = begin(project, "run", "--keep")
    code = command.wait(until)
    if code is None:
        os.kill(command.pid, signal.SIGKILL)
        code = command.wait()
    if code != -signal.SIGKILL:
        summary.finished_before_the_kill += 1
        if code not in GOOD_CODES:
            summary.trouble.append(f"exit code {code}: {command.output.read_text()[-300:]}")
        return time.monotonic() - began
    summary.kills += 1
    stage = stage_of(session)
    summary.interrupted_by[stage] = summary.interrupted_by.get(stage, 0) + 1
    summary.torn_lines += torn(session)
    killed = rows(session)
    code, said = run(project, "note", f"after kill {summary.kills}")
    if code == 0 and f"after kill {summary.kills}" in events(session):
        summary.resumes += 1
    else:
        summary.trouble.append(f"not resumed: {code}: {said[-300:]}")
    after = rows(session)
    for path, data in {**before, **killed}.items():
        kept = after.get(path, b"")
        if not kept.startswith(data):
            summary.samples_lost += max(1, len(set(data.splitlines()) - set(kept.splitlines())))
    return whole_s


def events(session: Path) -> str:
    return (session / "events.jsonl").read_text()


def lead_to_its_end(project: Path, summary: Summary) -> None:
    """The session after all the kills is one like any other."""
    (project / "mine.py").write_text(KERNEL.format(times=1))
    for step in (("run", "--keep"), ("next", "--override", "the benchmark's end"), ("run",), ("next",)):
        code, said = run(project, *step)
        if code not in GOOD_CODES:
            summary.trouble.append(f"{' '.join(step)}: {code}: {said[-300:]}")
    code, said = run(project, "status")
    if ": finished" not in said:
        summary.trouble.append(f"at the end: {said[:300]}")


def stream(kills: int, seed: int, repeats: int) -> Summary:
    """One session, killed so many times: first at its baseline, for the second half at a change that is raced."""
    for name in PRELOADED:
        importlib.import_module(name)
    chance = random.Random(seed)
    summary = Summary()
    with tempfile.TemporaryDirectory() as folder:
        project = make_project(Path(folder), repeats)
        code, said = run(
            project,
            *(
                "start",
                "kill",
                "--protocol",
                "./protocol.toml",
                "--suite",
                "suite.toml",
                "--race-suite",
                "suite.toml",
            ),
            *("--implementation", "mine.py:attention", "--device", "cpu", "--ignore-preflight"),
            *("--repeats", str(repeats)),
        )
        if code != 0:
            raise SystemExit(said)
        session = Path(said.splitlines()[0])
        whole_s = whole_run(project)
        while summary.kills < kills // 2:
            whole_s = one_round(project, session, chance, whole_s, summary)
        run(project, "next", "--override", "a kill may have come last")
        number = 0
        while summary.kills < kills:
            number += 1
            (project / "mine.py").write_text(KERNEL.format(times=3 + number))
            whole_s = one_round(project, session, chance, whole_s, summary)
        summary.blocks_without_samples = blocks_without_samples(session)
        lead_to_its_end(project, summary)
        summary.samples_measured = sum(data.count(b"\n") - 1 for data in rows(session).values() if data)
    return summary


def whole_run(project: Path) -> float:
    """Seconds that a run takes which is not killed."""
    began = time.monotonic()
    code, said = run(project, "run")
    if code not in GOOD_CODES:
        raise SystemExit(said)
    return time.monotonic() - began


def together(summaries: list[Summary]) -> Summary:
    """The sum of all streams."""
    total = Summary()
    for name in ("kills", "resumes", "samples_measured", "samples_lost", "blocks_without_samples"):
        setattr(total, name, sum(getattr(each, name) for each in summaries))
    total.finished_before_the_kill = sum(each.finished_before_the_kill for each in summaries)
    total.torn_lines = sum(each.torn_lines for each in summaries)
    total.interrupted_by = dict(sum((Counter(each.interrupted_by) for each in summaries), Counter()))
    total.trouble = [line for each in summaries for line in each.trouble]
    return total


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--streams", type=int, default=2, help="sessions at a time, each in its own project")
    parser.add_argument("--repeats", type=int, default=150, help="paired blocks per case")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    began = time.monotonic()
    shares = [
        options.kills // options.streams + (i < options.kills % options.streams)
        for i in range(options.streams)
    ]
    with ProcessPoolExecutor(options.streams) as pool:
        seeds = range(options.seed, options.seed + options.streams)
        summary = together(list(pool.map(stream, shares, seeds, [options.repeats] * options.streams)))
    summary.seed = options.seed
    summary.seconds = round(time.monotonic() - began, 1)
    options.output.mkdir(parents=True, exist_ok=True)
    document = {"schema_version": 1, "benchmark": "session_kill", **provenance("cpu"), **asdict(summary)}
    (options.output / "summary.json").write_text(json.dumps(document, indent=2) + "\n")
    print(json.dumps({**document, "facts": None}, indent=2))
    good = (
        summary.resumes == summary.kills and not summary.samples_lost and not summary.blocks_without_samples
    )
    return 0 if good and not summary.trouble else 1


if __name__ == "__main__":
    sys.exit(main())

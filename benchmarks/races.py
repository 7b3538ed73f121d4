"""How often a race between two versions is wrong: of a version against itself, and against one made slower.

    python benchmarks/races.py same --count 200 --output FOLDER
    python benchmarks/races.py slower --count 60 --output FOLDER
    python benchmarks/races.py bisect --count 20 --output FOLDER
    python benchmarks/races.py same --count 200 --parallel 14 --seconds 150 --output FOLDER

Every race is what ``cudadent42 compare`` (or ``bisect``) does with its defaults, with a worker process of its own, on
copies of this project's sources, or for ``bisect`` on a clone of HEAD. A slower kernel has a chain of dependent
multiply-adds added to the CPU kernel, in proportion to its work. Each command writes one JSON file into FOLDER, line
by line while it goes on.

Races are of one thread each, so on a machine with many processors ``--parallel`` holds that many at once, each pinned
to a processor of its own. They share its caches and its memory, which disturbs both sides of a race alike.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from provenance import provenance

from cudadent42.base.observer import Quiet
from cudadent42.flows import pipeline
from cudadent42.flows.race import DEFAULT_CHOICES, RaceOptions, as_run, ignore_folder
from cudadent42.flows.race.bisect import bisect as run_bisect
from cudadent42.plan import Choices, RunOptions
from cudadent42.stages import gates
from cudadent42.versions.sources import export

ROOT = Path(__file__).resolve().parent.parent
KERNEL = Path("src/flashmoe_science/kernels/cpu/attention_forward.cpp")
PLACE = "    return job.out_of_memory ? OUT_OF_MEMORY : SUCCESS;\n"

SLOWER = """    // Extra work on purpose: {share:.0%} of the time of the cases of the suite race-cpu.
    const double per_product = p.seqlen_q == 1 ? 0.0766 : p.causal ? 0.0122 : 0.0119;
    const double products = (double)p.batch * p.heads * p.seqlen_q * p.seqlen_k * p.head_dim;
    double chain = 1.0;
    for (int64_t step = (int64_t)({share} * per_product * products); step > 0; --step) chain = chain * 0.999999 + 1e-9;
    __asm__ volatile("" : : "x"(chain));
"""

COMMITS = 16
SLOWDOWN = 0.10
"""Of the commit that a bisection looks for."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("same", "slower", "truth", "bisect"))
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--share", type=float, default=0.03, help="How much slower, for slower and truth.")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--parallel", type=int, default=1, help="Races at once, for same and slower.")
    parser.add_argument("--seconds", type=float, default=1e9, help="After which no further race begins.")
    chosen = parser.parse_args()
    chosen.output.mkdir(parents=True, exist_ok=True)
    run = {"same": same, "slower": slower, "truth": truth, "bisect": bisect}[chosen.what]
    with tempfile.TemporaryDirectory() as scratch:
        rows = run(chosen, Path(scratch))
        write(chosen.output / f"{chosen.what}.json", chosen, rows)


def write(path: Path, chosen: argparse.Namespace, rows: Iterator[dict[str, object]]) -> None:
    """The rows as they come, and a summary at the end; a file that is there already is added to."""
    document = {"what": chosen.what, "share": chosen.share, **provenance("cpu"), "rows": []}
    if path.exists():
        document = json.loads(path.read_text(encoding="utf-8"))
    for row in rows:
        document["rows"].append(row)
        document["summary"] = summary(document["rows"])
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(len(document["rows"]), json.dumps(document["summary"]), flush=True)


def summary(rows: list[dict[str, object]]) -> dict[str, object]:
    count = {
        "count": len(rows),
        "with_findings": sum(bool(row.get("findings")) for row in rows),
        "median_seconds": sorted(float(row["seconds"]) for row in rows)[len(rows) // 2],
    }
    if "right" in rows[0]:
        return {**count, "right": sum(bool(row["right"]) for row in rows)}
    words = [str(row["verdict"]) for row in rows]
    cases = [str(word) for row in rows for word in row["cases"].values()]
    return {
        **count,
        "verdicts": {word: words.count(word) for word in sorted(set(words))},
        "verdicts_of_cases": {word: cases.count(word) for word in sorted(set(cases))},
        "races_with_a_case_called": sum(
            any(word in ("faster", "slower") for word in row["cases"].values()) for row in rows
        ),
    }


# ---------------------------------------------------------------- races


@dataclass(frozen=True)
class Pair:
    """Two versions that are prepared to be raced, any number of times."""

    run: pipeline.RunOptions
    prepared: pipeline.Prepared
    kept: Path
    """Folder of the first race."""


def same(chosen: argparse.Namespace, scratch: Path) -> Iterator[dict[str, object]]:
    tree = copied(scratch, "tree")
    return races(pair(tree, tree, chosen.output / "same"), chosen)


def slower(chosen: argparse.Namespace, scratch: Path) -> Iterator[dict[str, object]]:
    return races(pair(copied(scratch, "parent"), slowed(scratch, chosen), chosen.output / "slower"), chosen)


def truth(chosen: argparse.Namespace, scratch: Path) -> Iterator[dict[str, object]]:
    """How much slower it is, from many blocks."""
    choices = replace(DEFAULT_CHOICES, precision=0.0005, repeats=4000, budget_s=100.0)
    both = copied(scratch, "parent"), slowed(scratch, chosen)
    chosen.count, chosen.parallel = 1, 1
    return races(pair(*both, chosen.output / "truth", choices), chosen)


def slowed(scratch: Path, chosen: argparse.Namespace) -> Path:
    tree = copied(scratch, "slower")
    make_slower(tree, chosen.share)
    return tree


def pair(parent: Path, child: Path, kept: Path, choices: Choices = DEFAULT_CHOICES) -> Pair:
    """The machine is looked at once."""
    options = RunOptions(
        choices=choices,
        device="cpu",
        command=("cudadent42", "compare", parent.name, child.name),
        ignore_preflight=True,
        with_report=False,
    )
    run = as_run((export(str(parent)), export(str(child))), options)
    return Pair(run, pipeline.prepare(run, Quiet()), kept)


def races(both: Pair, chosen: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Races of the same two versions. The run folder of the first is kept."""
    stop = time.monotonic() + chosen.seconds
    folders = [None if both.kept.exists() else both.kept, *[None] * (chosen.count - 1)]
    tasks = [(both, stop, folder) for folder in folders]
    if chosen.parallel == 1:
        yield from filter(None, map(race_in_time, tasks))
        return
    context = multiprocessing.get_context("fork")
    processors = context.SimpleQueue()
    for number in spread(chosen.parallel):
        processors.put(number)
    with context.Pool(chosen.parallel, pin, (processors,)) as pool:
        yield from filter(None, pool.imap_unordered(race_in_time, tasks))


def spread(count: int) -> Sequence[int]:
    """So many of the processors that this process may use, evenly; the last ones are left to everything else."""
    allowed = sorted(os.sched_getaffinity(0))
    if count > len(allowed):
        raise SystemExit(f"--parallel {count}: there are {len(allowed)} processors")
    return allowed[:count]


def pin(processors: multiprocessing.SimpleQueue[int]) -> None:
    os.sched_setaffinity(0, {processors.get()})


def race_in_time(task: tuple[Pair, float, Path | None]) -> dict[str, object] | None:
    both, stop, kept = task
    return one_race(both, kept) if time.monotonic() < stop else None


def one_race(both: Pair, kept: Path | None) -> dict[str, object]:
    began = time.monotonic()
    seed = random.SystemRandom().randrange(1 << 32)
    with tempfile.TemporaryDirectory() as scratch:
        seeded = replace(both.prepared, plan=replace(both.prepared.plan, seed=seed))
        asked = replace(both.run, output=kept or Path(scratch, "run"), with_report=kept is not None)
        outcome = pipeline.execute(seeded, asked, Quiet(), ignore_folder)
    results = outcome.results
    return {
        "seconds": round(time.monotonic() - began, 1),
        "load": round(os.getloadavg()[0], 1),
        "seed": seed,
        "verdict": results.verdict.value,
        "findings": [finding.line for finding in results.integrity.findings] if results.integrity else [],
        "speedup": results.speedup_geomean,
        "interval": [results.speedup_geomean_ci_low, results.speedup_geomean_ci_high],
        "noise_floor": results.noise_floor,
        "cases": {row.name: row.verdict.value for row in results.cases},
        "speedups": {row.name: row.speedup for row in results.cases},
        "control": {row.name: row.speedup for row in results.control},
        "blocks": {row.name: row.blocks for row in results.cases},
        "flagged": {row.name: row.flagged_blocks for row in results.cases},
    }


# ---------------------------------------------------------------- bisection


def bisect(chosen: argparse.Namespace, scratch: Path) -> Iterator[dict[str, object]]:
    for number in range(chosen.count):
        with history(scratch, position := random.SystemRandom().randrange(1, COMMITS)) as (
            repository,
            commits,
        ):
            folder = chosen.output / "bisect"
            folder = folder if number == 0 and not folder.exists() else scratch / "bisect"
            shutil.rmtree(scratch / "bisect", ignore_errors=True)
            began = time.monotonic()
            options = RunOptions(
                choices=replace(DEFAULT_CHOICES, cases=("prompt",)),
                device="cpu",
                output=folder,
                command=("cudadent42", "bisect"),
                gate=gates.load("default"),
                ignore_preflight=True,
            )
            raced = RaceOptions(run=options, repository=repository)
            outcome = run_bisect(commits[0], commits[-1], raced, Quiet())
            yield {
                "seconds": round(time.monotonic() - began, 1),
                "load": os.getloadavg()[0],
                "place": position,
                "found": commits.index(outcome.commit) if outcome.commit in commits else None,
                "right": outcome.commit == commits[position],
                "ending": outcome.ending.value,
                "steps": [step.mark.value for step in outcome.steps],
            }


@contextmanager
def history(scratch: Path, position: int) -> Iterator[tuple[Path, list[str]]]:
    """A repository of 16 commits to the real package, and their names; the one at ``position`` is the slow one."""
    repository = clone(scratch, f"history-{position}")
    commits = [git(repository, "rev-parse", "HEAD").strip()]
    files = sorted((repository / "src/flashmoe_science").rglob("*.py"))
    for number in range(1, COMMITS):
        if number == position:
            make_slower(repository, SLOWDOWN)
        elif number % 4 == 0:
            append(repository / KERNEL, f"// Change {number} of the kernel's text, and of nothing else.\n")
        else:
            append(
                files[number % len(files)], f"# Change {number}, of this file's text and of nothing else.\n"
            )
        commits.append(commit(repository, f"Change {number}"))
    try:
        yield repository, commits
    finally:
        shutil.rmtree(repository)


# ---------------------------------------------------------------- trees and repositories


def copied(scratch: Path, name: str) -> Path:
    """The sources of the package, in a folder of their own."""
    package = Path("src/flashmoe_science")
    shutil.copytree(ROOT / package, scratch / name / package, ignore=shutil.ignore_patterns("__pycache__"))
    return scratch / name


def clone(scratch: Path, name: str = "repository") -> Path:
    path = scratch / name
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(path)], check=True)
    return path


def make_slower(repository: Path, share: float) -> None:
    path = repository / KERNEL
    text = path.read_text(encoding="utf-8")
    if text.count(PLACE) != 1:
        raise SystemExit(f"{KERNEL} has changed: expected one line {PLACE.strip()!r}")
    path.write_text(text.replace(PLACE, SLOWER.format(share=share) + PLACE), encoding="utf-8")


def append(path: Path, line: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(line)


def commit(repository: Path, message: str) -> str:
    git(repository, "-c", "user.name=races", "-c", "user.email=races@localhost", "commit", "-qam", message)
    return git(repository, "rev-parse", "HEAD").strip()


def git(repository: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(repository), *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout


if __name__ == "__main__":
    main()

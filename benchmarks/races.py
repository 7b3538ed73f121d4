"""How often a race between two versions is wrong: of a version against itself, and against one made slower.

    python benchmarks/races.py same --count 200 --output FOLDER
    python benchmarks/races.py slower --count 60 --output FOLDER
    python benchmarks/races.py bisect --count 20 --output FOLDER

Every race is what ``cudadent42 compare`` (or ``bisect``) does with its defaults, with a worker process of its own, on a
clone of this repository's HEAD. A slower kernel has a chain of dependent multiply-adds added to the CPU kernel, in
proportion to its work. Each command writes one JSON file into FOLDER, line by line while it goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
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


def same(chosen: argparse.Namespace, scratch: Path) -> Iterator[dict[str, object]]:
    repository = clone(scratch)
    return races(repository, "HEAD", "HEAD", chosen.count, scratch, chosen.output / "same")


def slower(chosen: argparse.Namespace, scratch: Path) -> Iterator[dict[str, object]]:
    repository = clone(scratch)
    make_slower(repository, chosen.share)
    commit(repository, "The same, slower")
    return races(repository, "HEAD~1", "HEAD", chosen.count, scratch, chosen.output / "slower")


def truth(chosen: argparse.Namespace, scratch: Path) -> Iterator[dict[str, object]]:
    """How much slower it is, from many blocks."""
    repository = clone(scratch)
    make_slower(repository, chosen.share)
    commit(repository, "The same, slower")
    choices = replace(DEFAULT_CHOICES, precision=0.0005, repeats=4000, budget_s=100.0)
    return races(repository, "HEAD~1", "HEAD", 1, scratch, chosen.output / "truth", choices)


def races(
    repository: Path,
    parent: str,
    child: str,
    count: int,
    scratch: Path,
    kept: Path,
    choices: Choices = DEFAULT_CHOICES,
) -> Iterator[dict[str, object]]:
    """Races of the same two versions; the machine is looked at once. The run folder of the first is kept."""
    options = RunOptions(
        choices=choices,
        device="cpu",
        command=("cudadent42", "compare", parent, child),
        ignore_preflight=True,
        with_report=False,
    )
    run = as_run((export(parent, repository), export(child, repository)), options)
    prepared = pipeline.prepare(run, Quiet())
    for _ in range(count):
        first = not kept.exists()
        folder = kept if first else scratch / "run"
        shutil.rmtree(scratch / "run", ignore_errors=True)
        began = time.monotonic()
        seed = random.SystemRandom().randrange(1 << 32)
        seeded = replace(prepared, plan=replace(prepared.plan, seed=seed))
        asked = replace(run, output=folder, with_report=first)
        results = pipeline.execute(seeded, asked, Quiet(), ignore_folder).results
        yield {
            "seconds": round(time.monotonic() - began, 1),
            "load": round(os.getloadavg()[0], 1),
            "seed": seed,
            "verdict": results.verdict.value,
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


# ---------------------------------------------------------------- repositories


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

"""Thousands of hostile command lines, files and folders.

python tests/hard/fuzz.py {options|files|folders} [--seed S] [--count N] [--output FILE]

Each case has a seed of its own (S, S + 1, ...), so that `--seed CASE --count 1` is that case again. Prints a line for
each fault, writes seeds and counts as JSON, and exits with 1 if there was a fault.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
for _path in (str(ROOT / "src"), str(Path(__file__).parent)):
    if _path not in sys.path:
        sys.path.insert(0, _path)

import files  # noqa: E402 - they lie beside this file
import folders  # noqa: E402
import forked  # noqa: E402
import options  # noqa: E402

COUNTS = {"options": 2000, "files": 2000, "folders": 1000}
"""Of a nightly run."""

_PROGRAMS = ("git", "sh", "c++", "g++", "cc", "gcc")
"""That the commands may find: none that asks another machine."""


@dataclass(frozen=True)
class Fault:
    seed: int
    arguments: tuple[str, ...]
    what: str
    said: str


@dataclass(frozen=True)
class Fuzzed:
    kind: str
    seed: int
    count: int
    seconds: float
    exit_codes: dict[int, int]
    faults: tuple[Fault, ...]

    def document(self) -> dict[str, Any]:
        counts = Counter(fault.what.partition(":")[0] for fault in self.faults)
        names = ("crash", "traceback", "control character", "long message", "no document")
        return {
            "schema_version": 1,
            "kind": self.kind,
            "first_seed": self.seed,
            "count": self.count,
            "seconds": round(self.seconds, 1),
            "exit_codes": {str(code): times for code, times in sorted(self.exit_codes.items())},
            "faults": {name: counts[name] for name in names},
            "cases": [vars(fault) | {"arguments": list(fault.arguments)} for fault in self.faults],
        }


def fuzz(
    kind: str, seed: int, count: int, on_case: Callable[[int], None] = lambda case: None, stop: bool = False
) -> Fuzzed:
    """``count`` cases of a kind, in a folder of their own; ``stop``: at the first fault."""
    forked.preload()
    began = time.monotonic()
    codes: Counter[int] = Counter()
    all_faults: list[Fault] = []
    with _workplace() as (workplace, environment):
        for case in range(seed, seed + count):
            on_case(case)
            chance = random.Random(f"{kind} {case}")
            folder = workplace / "deep" / "er" / "case"
            folder.mkdir(parents=True)
            config = Path(environment["XDG_CONFIG_HOME"])
            arguments = _case(kind, chance, folder, config, workplace)
            ended = forked.run(arguments, folder, environment)
            codes[ended.code] += 1
            for what in forked.faults(ended):
                fault = Fault(case, ended.arguments, what, (ended.err or ended.out)[-3000:])
                all_faults.append(fault)
                print(f"{kind} {case}: {what}: {arguments!a:.300}", flush=True)
            for left in (workplace / "deep", config):
                shutil.rmtree(left, ignore_errors=True)
            if stop and all_faults:
                break
    return Fuzzed(kind, seed, count, time.monotonic() - began, dict(codes), tuple(all_faults))


def _case(kind: str, chance: random.Random, folder: Path, config: Path, workplace: Path) -> list[str]:
    if kind == "options":
        return options.line(chance)
    if kind == "files":
        (folder.parent / "example").symlink_to(workplace / "examples")
        return files.write(chance, folder, config)
    return folders.damage(chance, folder, workplace / "examples")


@contextmanager
def _workplace() -> Iterator[tuple[Path, dict[str, str]]]:
    """A folder with examples, and an environment in which nothing outside of it is changed."""
    with tempfile.TemporaryDirectory(prefix="cudadent42-fuzz-") as name:
        workplace = Path(name).resolve()
        programs = workplace / "bin"
        programs.mkdir()
        for program in _PROGRAMS:
            path = shutil.which(program)
            if path:
                (programs / program).symlink_to(path)
        environment = {
            "HOME": str(workplace / "home"),
            "PATH": str(programs),
            "TMPDIR": str(workplace),
            "COLUMNS": "140",
            "OMP_NUM_THREADS": "1",
            "GIT_CEILING_DIRECTORIES": str(workplace.parent),
            "CUDADENT42_LEDGER": str(workplace / "ledger.sqlite"),
            "FLASHMOE_CACHE_DIR": str(workplace / "cache"),
            **{f"XDG_{kind}_HOME": str(workplace / kind.lower()) for kind in ("CONFIG", "STATE", "CACHE")},
        }
        (workplace / "home").mkdir()
        folders.make_run(workplace / "examples/run")
        folders.make_tuning(workplace / "examples/tuning")
        _make_session(workplace / "examples", environment)
        yield workplace, environment


def _make_session(examples: Path, environment: dict[str, str]) -> None:
    """A session that was begun in a small repository."""
    project = examples / "project"
    project.mkdir()
    (project / "kernel.py").write_text("def attention(q, k, v, *, causal, softmax_scale):\n    return q\n")
    for words in (
        ("init", "-q"),
        ("add", "-A"),
        ("-c", "user.name=x", "-c", "user.email=x@localhost", "commit", "-qm", "x"),
    ):
        subprocess.run(["git", "-C", str(project), *words], check=True)
    arguments = ("session", "start", "example", "--suite", "small", "--ignore-preflight")
    ended = forked.run(arguments, project, environment)
    if ended.code:
        raise RuntimeError(f"the example session did not start: {ended.err}")
    [session] = (path for path in (project / "sessions").iterdir() if (path / "events.jsonl").is_file())
    shutil.copytree(session, examples / "session")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=sorted(COUNTS))
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--count", type=int, help="of cases; default: a nightly run's")
    parser.add_argument("--output", type=Path, help="where seeds and counts are written, as JSON")
    given = parser.parse_args()
    done = fuzz(given.kind, given.seed, COUNTS[given.kind] if given.count is None else given.count)
    document = done.document()
    text = json.dumps(document, indent=2) + "\n"
    if given.output is not None:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(text)
    print(f"{done.kind}: {done.count} cases in {done.seconds:.0f} s, {len(done.faults)} faults", flush=True)
    return 1 if done.faults else 0


def nightly(kind: str) -> int:
    """As `tools/harden.py` calls it, SEED COUNT: each seed goes to standard error, the count is last; until a fault."""
    seed, count = map(int, sys.argv[1:3])
    done = fuzz(kind, seed, count, lambda case: print(f"seed {case}", file=sys.stderr, flush=True), stop=True)
    for fault in done.faults:
        print(f"{fault.what}: {fault.arguments!a}\n{fault.said!a}", file=sys.stderr)
    if not done.faults:
        print(json.dumps({"done": count}))
    return 1 if done.faults else 0


if __name__ == "__main__":
    sys.exit(main())

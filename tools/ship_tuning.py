"""Put tunings that were made on a GPU elsewhere into the package: tables, and the folders that these rest on.

    python tools/ship_tuning.py TUNING... --date 2026-11-23

TUNING is a tuning's folder, unpacked. What was confirmed goes into the package's tables, as `cudadent42 tune install
--package` puts it. The folder is kept under benchmarks/results as ``<date>-h200-tuned-<name>``, without the races' own
folders: their blocks are in the journal. Paths of the machine there are made relative. ``<date>-h200-tuned/tuned.json``
gets what each raced case came to, for docs/figures.md: its confirmed ratio, or 1 where the default stays.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src")]

from cudadent42.base.errors import LabError, UsageError  # noqa: E402 (this file may be run, or loaded by its path)
from cudadent42.tune.installing import check  # noqa: E402
from cudadent42.tune.journal import FILES, read  # noqa: E402
from cudadent42.tune.space import DEFAULT  # noqa: E402
from cudadent42.tune.state import State, fold  # noqa: E402
from cudadent42.tune.table import install  # noqa: E402
from flashmoe_science.tuned.lookup import PACKAGE_FOLDER  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
KIND = "h200-tuned"
SUMMARY = "tuned.json"
_LEFT_OUT = ("races", "fleet", "workers", "stop", ".lock")
_TEXTS = (".json", ".jsonl", ".html", ".md", ".log", ".toml", ".txt")


@dataclass(frozen=True)
class Cell:
    """One raced case."""

    tuning: str
    case: str
    arm: str
    ratio: float
    """Of the configuration that calls get now, over the usual choice: 1 where that stays."""
    low: float
    high: float


def cells_of(state: State, name: str) -> list[Cell]:
    """What each case of a tuning came to. One that was not finished keeps the default."""
    winners = {each.case: each for each in state.winners}
    cells = []
    for case in state.cases:
        won = winners.get(case)
        cells.append(
            Cell(name, case, DEFAULT, 1.0, 1.0, 1.0)
            if won is None
            else Cell(name, case, won.arm, won.ratio, won.low, won.high)
        )
    return cells


def kept(tuning: Path, target: Path, root: str) -> Path:
    """A copy of the tuning without its races, whose texts name no path below ``root``. Raises UsageError where one is
    there."""
    if target.exists():
        raise UsageError(f"{target} is there already; remove it, or give another --date")
    shutil.copytree(tuning, target, ignore=lambda folder, names: set(_LEFT_OUT) & set(names))
    for path in target.rglob("*"):
        if path.is_file() and path.suffix in _TEXTS and root:
            text = path.read_text(encoding="utf-8")
            path.write_text(text.replace(f"{root.rstrip('/')}/", ""), encoding="utf-8")
    return target


def root_of(tuning: Path) -> str:
    """The checkout's folder on the machine of the tuning: what its space lies below."""
    space = json.loads((tuning / FILES.setup).read_text(encoding="utf-8"))["space"]
    head, mark, _ = space.rpartition("/benchmarks/spaces/")
    return head if mark else str(Path(space).parent)


def ship(tuning: Path, date: str, results: Path, tables: Path) -> list[Cell]:
    """One tuning; its cells. Raises LabError."""
    name = tuning.name.removeprefix("h200-")
    state = fold(*read(tuning))
    if state.setup.kernel.startswith("file:"):
        raise UsageError(
            f"{tuning} is of a kernel in a file of its own; only the library's go into the package"
        )
    links = [path for path in tuning.rglob("*") if path.is_symlink()]
    if links:
        raise UsageError(
            f"{links[0]} is a link, and what it leads to would be kept; expected files and folders alone"
        )
    folder = kept(tuning, results / f"{date}-{KIND}-{name}", root_of(tuning))
    if state.winners:
        try:
            table = install(state, folder, tables)
        except LabError:
            shutil.rmtree(folder)  # evidence of no table
            raise
        print(f"{name}: {len(table.entries)} regions into {table.path.name}")
    else:
        print(f"{name}: the default stays everywhere")
    return cells_of(state, name)


def summarise(cells: list[Cell], folder: Path) -> dict[str, float]:
    """Writes the summary of all tunings of a date, those that are in it already included; what it says."""
    path = folder / SUMMARY
    before = json.loads(path.read_text(encoding="utf-8"))["cells"] if path.is_file() else []
    names = {each.tuning for each in cells}
    rows = [each for each in before if each["tuning"] not in names] + [asdict(each) for each in cells]
    said = {
        "cells": len(rows),
        "tuned": sum(each["arm"] != DEFAULT for each in rows),
        "slower": sum(each["high"] < 1.0 for each in rows),
        "geomean": math.exp(math.fsum(math.log(each["ratio"]) for each in rows) / len(rows)),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"summary": said, "cells": rows}, indent=1) + "\n", encoding="utf-8")
    return said


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("tunings", type=Path, nargs="+", metavar="TUNING")
    parser.add_argument("--date", required=True)
    given = parser.parse_args()
    try:
        cells = [cell for each in given.tunings for cell in ship(each, given.date, RESULTS, PACKAGE_FOLDER)]
        print(json.dumps(summarise(cells, RESULTS / f"{given.date}-{KIND}")))
        for entry in check():
            if entry.problem:
                print(f"{entry.table}, {entry.kernel}: {entry.problem}")
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Write the tables of docs/figures.md from committed run folders.

    python tools/update_figures.py

Each row reads the newest folder of its kind under benchmarks/results (`<date>-<kind>`, such as
`2026-11-20-h200-hopper`), and says so where there is none. No figure on the page is typed by hand.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tools")]

from figure_readers import loaded  # noqa: E402 (this file may be run, or loaded by its path)
from figure_rows import TABLES, Row  # noqa: E402

from cudadent42.base.errors import LabError, UsageError  # noqa: E402
from cudadent42.runs.run_folder import RunStatus  # noqa: E402

PAGE = ROOT / "docs" / "figures.md"
RESULTS = ROOT / "benchmarks" / "results"
NOTHING_YET = "not measured yet"
OVERRIDE_VARIABLE = "FLASHMOE_CUDA_KERNEL"


# ---------------------------------------------------------------- the page


def newest(row: Row, results: Path) -> Path | None:
    """The newest ``<date>-<kind>`` that has what the row reads; folders start with their date."""
    folders = results.glob(f"[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]-{row.kind}")
    return max(filter(row.among, folders), default=None)


def doubt(row: Row, folder: Path) -> str:
    """What the folder does not prove about the kernel that ran."""
    if not row.kernel or loaded(folder).manifest.environment.get(OVERRIDE_VARIABLE) == row.kernel:
        return ""
    return f", which does not record `{OVERRIDE_VARIABLE}={row.kernel}`"


def claim(folder: Path) -> str:
    """What the run's own report says of its figure; nothing where it is no run, or one that did not ask."""
    if not (folder / "manifest.json").is_file():
        return ""
    results = loaded(folder).results
    if results is None:
        return (
            ", a run that was interrupted" if loaded(folder).manifest.status is RunStatus.INTERRUPTED else ""
        )
    refused = bool(results.claim_reason) and not results.claim_allowed
    return ", whose audit allows no claim" if refused else ""


def line(row: Row, results: Path) -> str:
    """One line of a table."""
    asked = ", ".join(bound.asked for bound in row.bounds if bound.asked)
    folder = newest(row, results)
    if folder is None:
        return f"| {row.what} | {asked} | {NOTHING_YET} | |"
    values = row.read(folder)
    if not all(math.isfinite(value) for value in values):
        raise UsageError(f"{folder}: not a finite figure for {row.what!r}")
    parts = []
    for bound, value in zip(row.bounds, values, strict=True):
        parts.append(bound.text(value) + ("" if bound.holds(value) else " (**not reached**)"))
    source = f"[{folder.name}](../benchmarks/results/{folder.name}){doubt(row, folder)}{claim(folder)}"
    return f"| {row.what} | {asked} | {', '.join(parts)} | {source} |"


def updated(page: str, results: Path = RESULTS) -> str:
    """The page with what is between each table's markers exchanged."""
    for name, rows in TABLES.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        before, found_begin, rest = page.partition(begin)
        _, found_end, after = rest.partition(end)
        if not found_begin or not found_end:
            raise UsageError(f"the page lacks {begin} or {end}; put them around the table")
        head = ["| what | asked | reached | run folder |", "| --- | --- | --- | --- |"]
        table = "\n".join([begin, *head, *(line(row, results) for row in rows), end])
        page = before + table + after
    return page


def main() -> int:
    """Command line."""
    try:
        PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

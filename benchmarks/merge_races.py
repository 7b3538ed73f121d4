"""One file of races from shares that were run beside each other: `races.py`, a folder for each pair of processors.

    python benchmarks/merge_races.py SHARE... --output FOLDER

Shares of one revision and one machine only. A share that lacks a kind of race, or has none yet, is left out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from races import summary

KINDS = ("same", "slower")

OF_ONE_KIND = ("what", "share", "revision", "changed_source", "machine")
"""What shares have in common."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shares", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, required=True)
    chosen = parser.parse_args()
    chosen.output.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        paths = [share / f"{kind}.json" for share in chosen.shares]
        documents = [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]
        if documents:
            document = merged(documents)
            text = json.dumps(document, indent=1) + "\n"
            (chosen.output / f"{kind}.json").write_text(text, encoding="utf-8")
            print(kind, json.dumps(document["summary"]), flush=True)


def merged(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """All races in one. Raises SystemExit where they are of two kinds, machines or revisions."""
    first, *others = documents
    for other in others:
        unlike = [name for name in OF_ONE_KIND if first[name] != other[name]]
        if unlike:
            raise SystemExit(f"these shares do not belong together: they differ in {', '.join(unlike)}")
    rows = [{**row, "share": number} for number, each in enumerate(documents) for row in each["rows"]]
    return {**first, "shares": len(documents), "rows": rows, "summary": summary(rows)}


if __name__ == "__main__":
    main()

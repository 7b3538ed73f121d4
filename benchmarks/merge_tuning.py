"""One file of sweeps from shares that were run beside each other: `tuning.py`, a folder for each pair of processors.

    python benchmarks/merge_tuning.py SHARE... --output FOLDER

Shares of one revision and one machine only, and no sweep twice. A share that has no sweep yet is left out.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from tuning import Killed, Sweep, write

OF_ALL = ("revision", "changed_source", "machine")
"""What shares have in common."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shares", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, required=True)
    chosen = parser.parse_args()
    paths = [share / "tuning.json" for share in chosen.shares]
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]
    if not documents:
        raise SystemExit("none of these shares has a sweep")
    print(json.dumps(merge(documents, chosen.output)))


def merge(documents: list[dict[str, Any]], output: Path) -> dict[str, float]:
    """All sweeps and kills in one file; its summary. Raises SystemExit where the shares do not belong together."""
    measured_on = documents[0]["provenance"]
    for other in documents[1:]:
        unlike = [name for name in OF_ALL if measured_on[name] != other["provenance"][name]]
        if unlike:
            raise SystemExit(f"these shares do not belong together: they differ in {', '.join(unlike)}")
    rows = [row for document in documents for row in document["sweeps"]]
    twice = [seed for seed, count in Counter(row["seed"] for row in rows).items() if count > 1]
    if twice:
        raise SystemExit(
            f"sweeps {', '.join(map(str, sorted(twice)))} are in more than one share; give each its own --first"
        )
    sweeps = [
        Sweep(**{**row, "winners": tuple(row["winners"])})
        for row in sorted(rows, key=lambda row: row["seed"])
    ]
    kills = [
        Killed(**{**row, "failures": tuple(row["failures"])})
        for document in documents
        for row in document["kills"]
    ]
    return write(output, {**measured_on, "shares": len(documents)}, sweeps, kills)


if __name__ == "__main__":
    main()

"""Draw the tutorial's pictures from the committed run that it speaks of.

python tools/update_pictures.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from cudadent42.runs.checking import load_checked  # noqa: E402
from cudadent42.stages.report.figures.control import control  # noqa: E402
from cudadent42.stages.report.figures.errors import errors  # noqa: E402
from cudadent42.stages.report.figures.speedup import speedup  # noqa: E402
from cudadent42.stages.report.view import View  # noqa: E402

RUN = ROOT / "benchmarks/results/2026-11-20-cpu-default"
FOLDER = ROOT / "docs/pictures"


def pictures() -> dict[str, str]:
    """By file name, each picture as the run's report has it."""
    view = View(load_checked(RUN))
    return {
        "speedup.svg": speedup(view, None, wide=True),
        "errors.svg": errors(view, None, wide=True),
        "noise-floor.svg": control(view, None, wide=True),
    }


def main() -> int:
    for name, picture in pictures().items():
        (FOLDER / name).write_text(picture, encoding="utf-8", newline="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

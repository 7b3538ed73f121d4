"""Write the README's result section from committed run folders.

    python tools/update_readme.py benchmarks/results/<run> [more runs]

Also writes each run's report and picture. Every figure in the section is read from the folders it names.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from cudadent42.base.errors import LabError, UsageError  # noqa: E402
from cudadent42.model import text  # noqa: E402
from cudadent42.runs.run_folder import load_run  # noqa: E402
from cudadent42.stages import report  # noqa: E402 (the tree's own package, installed or not)
from cudadent42.stages.report.view import View  # noqa: E402

BEGIN, END = "<!-- result:begin -->", "<!-- result:end -->"


def section(folders: list[str]) -> str:
    """The Markdown between the markers, for folders given relative to the repository."""
    return "\n".join([BEGIN, *(line for folder in folders for line in _result(folder)), END])


def replace_section(readme: str, new: str) -> str:
    """``readme`` with the section exchanged."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UsageError(f"README.md lacks {BEGIN} or {END}; put them around the result section")
    return before + new + after


def _result(folder: str) -> list[str]:
    view = View(load_run(ROOT / folder))
    results = view.run.results
    if results is None or not view.complete or not view.checked or view.failures:
        raise UsageError(f"{folder} is not a finished, verified run; only such a run may be shown")
    words = ", ".join(f"{count} {verdict.value}" for verdict, count in view.verdicts.items())
    parts = [f"**{view.headline}.** {view.subline}: {words}."]
    if view.extremes:
        low, high = view.extremes
        if low.comparison and high.comparison:
            parts.append(
                f"Slowest {text.ratio(low.comparison.speedup)} ({low.name} {low.case.dtype}), "
                f"fastest {text.ratio(high.comparison.speedup)} ({high.name} {high.case.dtype})."
            )
    if results.noise_floor == results.noise_floor:
        parts.append(f"Noise floor ±{text.percent(results.noise_floor)}.")
    parts.append(view.verification_line)
    versions = f"`{text.clean(view.run.machine.summary)}`"
    return [
        "",
        " ".join(parts),
        "",
        f"![Speed-up of every case with its 95 % interval]({folder}/speedup.svg)",
        "",
        f"{versions}, {view.date[:10]}. The whole run: [{folder}]({folder}).",
        "",
    ]


def _inside(path: Path) -> str:
    if not path.resolve().is_relative_to(ROOT):
        raise UsageError(f"{path} is outside the repository; copy the run to benchmarks/results first")
    return path.resolve().relative_to(ROOT).as_posix()


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a committed run folder")
    try:
        folders = [_inside(path) for path in parser.parse_args().folders]
        new = section(folders)
        for folder in folders:
            report.write(ROOT / folder)
        readme = ROOT / "README.md"
        readme.write_text(replace_section(readme.read_text(encoding="utf-8"), new), encoding="utf-8")
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

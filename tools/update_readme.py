"""Write the README's result section from committed run folders.

    python tools/update_readme.py benchmarks/results/<run> [more runs]

Also writes each run's report and picture. Every figure in the section is read from the folders it names.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from cudadent42.base.errors import LabError, UsageError  # noqa: E402
from cudadent42.model import text  # noqa: E402
from cudadent42.model.records import Verdict  # noqa: E402
from cudadent42.runs.checking import load_checked  # noqa: E402
from cudadent42.runs.run_folder import load_run  # noqa: E402
from cudadent42.stages import report  # noqa: E402 (the tree's own package, installed or not)
from cudadent42.stages.report.view import TIMED, View  # noqa: E402

HOLDING = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")
"""Variables without which PyTorch takes the widest instructions that the processor has, whatever ours are held to."""

BEGIN, END = "<!-- result:begin -->", "<!-- result:end -->"


def section(folders: list[str]) -> str:
    """The Markdown between the markers, for folders given relative to the repository."""
    views = [(folder, _shown(folder)) for folder in folders]
    return "\n".join([BEGIN, *_overview(views), *(line for each in views for line in _result(*each)), END])


def replace_section(readme: str, new: str) -> str:
    """``readme`` with the section exchanged."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UsageError(f"README.md lacks {BEGIN} or {END}; put them around the result section")
    return before + new + after


def _shown(folder: str) -> View:
    """The run, if it may be shown."""
    view = View(load_checked(ROOT / folder))
    refused = view.run.results is None or view.run.results.refused is not None
    if refused or not view.complete or not view.checked or view.failures:
        raise UsageError(f"{folder} is not a finished, verified run; only such a run may be shown")
    environment = view.run.manifest.environment
    if "FLASHMOE_CPU_ISA" in environment and not all(name in environment for name in HOLDING):
        raise UsageError(
            f"{folder} held our kernel to {environment['FLASHMOE_CPU_ISA']} and PyTorch to nothing; "
            f"set {' and '.join(HOLDING)} too, or measure on a machine that has no more"
        )
    return view


def _overview(views: list[tuple[str, View]]) -> list[str]:
    """One line a run: ratios of different machines and of different instruction sets side by side."""
    head = "| machine | instructions | what is timed | over PyTorch | 95 % interval | cases |"
    lines = ["", head, "| --- | --- | --- | ---: | --- | ---: |"]
    for folder, view in views:
        results = view.run.results
        assert results is not None
        interval = text.interval(results.speedup_geomean_ci_low, results.speedup_geomean_ci_high)
        undecided = results.verdict is Verdict.UNDECIDED
        number = "undecided" if undecided else text.ratio(results.speedup_geomean)
        lines.append(
            f"| {view.device} | {_instructions(view)} | {TIMED[view.run.plan.timer]} "
            f"| [{number}]({folder}) | {interval} | {len(view.timed)} |"
        )
    return lines


def _instructions(view: View) -> str:
    if not view.instruction_set:
        build = view.run.build
        targets = dict.fromkeys(kernel.recipe.architecture for kernel in build.kernels) if build else ()
        return ", ".join(targets)
    return f"{view.held_to}, held to it" if view.held_to else view.instruction_set


def _flagged(view: View) -> str:
    """How many of the candidate's blocks were disturbed and by what, as the samples and the log have it."""
    assert view.run.results is not None
    flagged = sum(comparison.flagged_blocks for comparison in view.run.results.cases)
    blocks = sum(comparison.measured_blocks for comparison in view.run.results.cases)
    if not flagged:
        return f"None of {blocks} paired blocks was flagged as disturbed."
    reasons = dict.fromkeys(_disturbances(view.run.path))
    return f"{flagged} of {blocks} paired blocks were flagged as disturbed ({', '.join(reasons)})."


def _disturbances(folder: Path) -> Iterator[str]:
    """Why the driver slowed the GPU down, else the words that the samples were flagged with."""
    reasons = []
    with open(folder / "log.jsonl", encoding="utf-8") as log:
        for line in log:
            reasons.append(json.loads(line).get("conditions", {}).get("throttle_reasons"))
    told = [reason for reason in reasons if reason]
    flags = (flag for sample in load_run(folder).samples for flag in sample.flags.split(",") if flag)
    yield from told or flags


def _result(folder: str, view: View) -> list[str]:
    results = view.run.results
    assert results is not None
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
    parts += [f"Timed: {TIMED[view.run.plan.timer]}.", _flagged(view), view.verification_line]
    if results.verdict is Verdict.FASTER and not results.claim_allowed and results.claim_reason:
        parts.append("Its audit allows no claim yet, and the report says why.")
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

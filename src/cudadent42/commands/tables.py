"""Records as tables and sentences for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from cudadent42.decisions.margin import smallest_called
from cudadent42.decisions.verdicts import REFUSALS
from cudadent42.model.records import BuildReport, Comparison, Results, Verdict, VerifiedCase, VerifyReport
from cudadent42.stages.report.notices import cautions
from cudadent42.stages.report.planning import HEADS, plannings
from cudadent42.stages.report.view import Tone
from flashmoe_science.jit.records import KernelBuild, Recipe, Resources

_NEAR_ONE = 0.1

_STYLES = {
    Verdict.FASTER: "green",
    Verdict.SLOWER: "red",
    Verdict.EQUAL: "",
    Verdict.UNDECIDED: "yellow",
}


def results_table(results: Results, with_control: bool) -> Table:
    """One row per case and dtype, the dtypes apart; below, the other implementations and the control, whose rows are
    named."""
    below = (*results.others, *(results.control if with_control else ()))
    table = _table("case", "dtype", *(["implementation"] if below else []))
    own = "its ms" if below else f"{results.candidate} ms"
    for name in (f"{results.baseline} ms", own, "speed-up", "95 % interval"):
        table.add_column(Text(name), justify="right")
    table.add_column("verdict")
    previous = ""
    for row in results.cases:
        if previous and row.dtype != previous:
            table.add_section()
        previous = row.dtype
        _add_comparison(table, row, named=bool(below))
    group = ""
    for row in below:
        if row.implementation != group:
            table.add_section()
        group = row.implementation
        _add_comparison(table, row, named=True)
    return table


def planning_table(results: Results) -> Table:
    """One row per case and implementation that plans once a step."""
    return plain_table(HEADS[:2], HEADS[2:], [each.cells for each in plannings(results)])


def _add_comparison(table: Table, row: Comparison, *, named: bool) -> None:
    """``named``: the table has a column for the implementation."""
    ratios = (
        ("–", "–") if row.refused else (f"{ratio(row.speedup)}×", f"{ratio(row.ci_low)}–{ratio(row.ci_high)}")
    )
    _add_row(
        table,
        row.name,
        row.dtype,
        *([row.implementation] if named else []),
        latency(row.baseline_latency_ms),
        latency(row.latency_ms),
        *ratios,
        f"no verdict: {row.refused.value}" if row.refused else row.verdict.value,
        style=_STYLES[row.verdict],
    )


def verdict_line(results: Results, processor: str = "") -> str:
    """The run in one sentence. ``processor``: that of a run on CPU."""
    if not results.cases:
        return "no verdict: no case was timed"
    sides = f"{results.verdict.value}: {results.candidate} against {results.baseline}"
    on_processor = f", on {processor}" if processor else ""
    if results.refused is not None:
        return f"{sides}{on_processor}; {REFUSALS[results.refused]}"
    interval = f"{ratio(results.speedup_geomean_ci_low)}–{ratio(results.speedup_geomean_ci_high)}"
    mean = f"in the geometric mean of {_plural(len(results.cases), 'case')}{on_processor}"
    if results.verdict is Verdict.UNDECIDED:
        line = f"{sides}, 95 % interval {interval} {mean}"
    else:
        line = f"{sides}, {ratio(results.speedup_geomean)}× (95 % interval {interval}) {mean}"
    if math.isfinite(results.noise_floor):
        line += f", noise floor {results.noise_floor:.1%}"
    if results.verdict in (Verdict.EQUAL, Verdict.UNDECIDED) and math.isfinite(results.detectable_effect):
        called = smallest_called(results.detectable_effect, results.margin)
        line += f"; in a typical case a difference of {called:.1%} would have been called"
    timed = {row.case_id for row in results.cases}
    # Keys are name/dtype or name/dtype/implementation, and an implementation may be a path.
    left_out = {"/".join(key.split("/")[:2]) for key in results.skipped} - timed
    return line + (f"; {_plural(len(left_out), 'case')} not timed" if left_out else "")


def caution_lines(results: Results) -> list[str]:
    """What a reader of the verdict must know of the machine: noise and disturbances, where there were many."""
    return [
        line
        for notice in cautions(results)
        if notice.tone in (Tone.WARN, Tone.BAD)
        for line in (notice.title, *(notice.lines if notice.tone is Tone.BAD else ()))
    ]


_RESOURCES = ("regs", "spill", "static", "dynamic", "threads", "blocks", "occ.")


def build_tables(report: BuildReport) -> list[tuple[str, Table]]:
    """A title and a table per kernel and target, one row per configuration; a GPU's resources where there are any.

    A column for each parameter that differs between the rows; the others are in the title. Spills and shared
    memory are in bytes, ``blocks`` is blocks per multiprocessor, ``occ.`` occupancy.
    """
    groups: dict[tuple[str, str], list[KernelBuild]] = {}
    for kernel in report.kernels:
        groups.setdefault((kernel.recipe.kernel, kernel.recipe.architecture), []).append(kernel)
    return [_build_table(kernels) for kernels in groups.values()]


def _build_table(kernels: Sequence[KernelBuild]) -> tuple[str, Table]:
    recipe = kernels[0].recipe
    varying = _varying([kernel.recipe for kernel in kernels])
    common = " ".join(f"{k}={v}" for k, v in recipe.configuration.items() if k not in varying)
    table = _table()
    with_resources = any(kernel.resources for kernel in kernels)
    for name in (*varying, *(_RESOURCES if with_resources else ()), "compile", "from"):
        table.add_column(Text(name.replace("_", "\n")), justify="right", no_wrap=True)
    for kernel in kernels:
        cells = [str(kernel.recipe.configuration.get(name, "")) for name in varying]
        cells += _resource_cells(kernel.resources) if with_resources else []
        _add_row(table, *cells, f"{kernel.compile_seconds:.2f} s", "cache" if kernel.cached else "compiler")
    return f"{recipe.kernel} {recipe.architecture.split('+')[0]} {common}".rstrip(), table


def _varying(recipes: Sequence[Recipe]) -> list[str]:
    """Names of the parameters that differ between the recipes, in their order."""
    names = dict.fromkeys(name for recipe in recipes for name in recipe.configuration)
    return [name for name in names if len({recipe.configuration.get(name) for recipe in recipes}) > 1]


def _resource_cells(use: Resources | None) -> list[str]:
    if use is None:
        return ["–"] * len(_RESOURCES)
    return [
        str(use.registers_per_thread),
        str(use.spill_store_bytes + use.spill_load_bytes),
        str(use.static_shared_bytes),
        str(use.dynamic_shared_bytes),
        str(use.threads_per_block),
        str(use.blocks_per_sm),
        f"{use.occupancy:.0%}",
    ]


def build_line(report: BuildReport) -> str:
    compiled = [kernel for kernel in report.kernels if not kernel.cached]
    seconds = sum(kernel.compile_seconds for kernel in compiled)
    line = f"{_plural(len(report.kernels), 'kernel')}: {len(compiled)} compiled in {seconds:.1f} s of compiler time, "
    line += f"{len(report.kernels) - len(compiled)} from the cache"
    return line + (f"; {len(report.failures)} failed" if report.failures else "")


def recipe_lines(report: BuildReport) -> list[str]:
    """What would compile the same bytes again."""
    lines = []
    for kernel in report.kernels:
        recipe = kernel.recipe
        lines += [
            f"{recipe.label} for {recipe.architecture}: {kernel.artifact}",
            f"    {recipe.compiler} {recipe.compiler_version}",
            f"    {' '.join(recipe.flags)}",
            *(f"    {name} sha256:{digest}" for name, digest in recipe.sources.items()),
        ]
    return lines


def cache_table(entries: Sequence[KernelBuild]) -> Table:
    table = _table("kernel", "target")
    for name in ("size", "compiled in", "key"):
        table.add_column(Text(name), justify="right", no_wrap=True)
    for entry in entries:
        _add_row(
            table,
            entry.recipe.label,
            entry.recipe.architecture.split("+")[0],
            f"{entry.artifact_bytes / 1e3:.0f} kB",
            f"{entry.compile_seconds:.2f} s",
            entry.key[:12],
        )
    return table


def verify_table(report: VerifyReport, everything: bool) -> Table:
    """Error of each implementation against its bound; only what failed unless ``everything``."""
    table = _table("input", "implementation")
    for name in ("max error", "RMS error", "worst row"):
        table.add_column(Text(name), justify="right")
    table.add_column("result")
    for case in report.cases:
        if everything or not case.passed:
            _add_row(
                table,
                case.case if case.input == "random" else f"{case.case} ({case.input})",
                case.implementation,
                *_errors(case),
                "passed" if case.passed else f"FAILED: {case.detail}",
                style="" if case.passed else "red",
            )
    return table


def verify_line(report: VerifyReport) -> str:
    failed = sum(not case.passed for case in report.cases)
    checked = _plural(len(report.counted), "check")
    return f"verification passed: {checked}" if not failed else f"verification failed: {failed} of {checked}"


def _errors(case: VerifiedCase) -> Sequence[str]:
    if case.error is None:
        return ("–", "", "")  # it died, or is wrong in kind: there is no size of an error
    norms = ((case.error.max, "max"), (case.error.rms, "rms"), (case.error.worst_row, "worst_row"))
    return [
        f"{error:.1e}" + (f" of {getattr(case.bound, name):.1e}" if case.bound else "")
        for error, name in norms
    ]


def ratio(value: float) -> str:
    """Two decimals; three near 1, where a difference of a percent is looked for."""
    return f"{value:.3f}" if abs(value - 1.0) < _NEAR_ONE else f"{value:.2f}"


def plain_table(left: Sequence[str], right: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Columns of words, then columns of numbers."""
    table = _table(*left)
    for name in right:
        table.add_column(Text(name), justify="right")
    for row in rows:
        _add_row(table, *row)
    return table


def latency(milliseconds: float) -> str:
    """Three significant digits or more: ``0.0123``, ``1.23``, ``123.4``."""
    if not math.isfinite(milliseconds):
        return "–"
    return f"{milliseconds:.{3 if milliseconds >= 1 else 4 if milliseconds >= 0.1 else 5}f}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _add_row(table: Table, *cells: str, style: str = "") -> None:
    """Cells as they are: names of cases, paths and messages of others are not read as markup."""
    table.add_row(*map(Text, cells), style=style)


def _table(*left: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in left:
        table.add_column(Text(name), overflow="fold")
    return table

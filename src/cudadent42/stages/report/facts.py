"""The run's circumstances as rows and sentences, for the page and for Markdown alike."""

from __future__ import annotations

import math

from cudadent42.model import text
from cudadent42.model.records import Plan, Results, Verdict
from cudadent42.stages.report.rivals import rivals
from cudadent42.stages.report.view import TIMED, View
from flashmoe_science.jit.records import KernelBuild

Rows = list[tuple[str, str]]


def run_facts(view: View) -> Rows:
    """When, what and from which source."""
    manifest, plan = view.run.manifest, view.run.plan
    rows = [
        ("started", view.date),
        ("took", text.seconds(view.duration_s) if math.isfinite(view.duration_s) else "not recorded"),
        ("device", text.clean(plan.device)),
        ("suite", f"{text.clean(plan.suite)}, {text.plural(len(plan.cases), 'case')}"),
        ("implementations", ", ".join(map(text.implementation, plan.implementations))),
        ("blocks per case", _blocks(plan)),
        ("timed", TIMED[plan.timer] + f", {plan.cache.value} cache"),
        ("seed", str(plan.seed)),
        ("margin", f"±{text.percent(plan.margin)}"),
        ("cudadent42", text.clean(manifest.version)),
    ]
    if manifest.revision:
        revision = manifest.revision
        state = "with uncommitted changes" if revision.dirty else "clean"
        branch = f" on {revision.branch}" if revision.branch else ""
        rows.append(("source", text.clean(f"{revision.commit[:12]}{branch}, {state}")))
    for name, its in manifest.sources.items():
        rows.append((f"source of {text.implementation(name)}", text.clean(its.label)))
    if manifest.sandbox is not None:
        rows.append(("sandbox", text.clean(manifest.sandbox.summary)))
        rows += [
            ("done without", f"protection of {each.value}") for each in manifest.sandbox.accepted_missing
        ]
    rows += [(name, text.clean(value)) for name, value in sorted(manifest.environment.items())]
    return rows


def _blocks(plan: Plan) -> str:
    line = f"{plan.repeats:,} after {plan.warmup:,} of warm-up"
    if plan.precision is not None:
        line = f"until ±{text.percent(plan.precision)}, at most {line}"
    return line if plan.budget_s is None else f"{line}, within {plan.budget_s:g} s"


def machine_facts(view: View) -> Rows:
    """What preflight found, as it named it."""
    rows = []
    for name, value in view.run.machine.facts.items():
        if value is None or value == "":
            continue
        unit = name.rpartition("_")[2]
        if isinstance(value, bool):
            shown = "yes" if value else "no"
        elif unit == "bytes" and isinstance(value, (int, float)):
            name, shown = name.removesuffix("_bytes"), text.size(value)
        elif isinstance(value, float):
            shown = f"{value:,.4g}" if math.isfinite(value) else text.NOT_AVAILABLE
        else:
            shown = text.clean(str(value))
        rows.append((text.clean(name).replace("_", " "), shown))
    return rows


def kernels(view: View) -> list[dict[str, object]]:
    """One row per kernel, with its recipe."""
    return [_kernel(kernel) for kernel in (view.run.build.kernels if view.run.build else ())]


def _kernel(kernel: KernelBuild) -> dict[str, object]:
    recipe, needs = kernel.recipe, kernel.resources
    row: dict[str, object] = {
        "label": text.clean(recipe.label),
        "target": text.shorten(text.clean(recipe.architecture), 34),
        "compiler": text.shorten(
            text.clean(recipe.compiler_version.splitlines()[0] if recipe.compiler_version else ""), 44
        ),
        "time": text.seconds(kernel.compile_seconds) + (" (cached)" if kernel.cached else ""),
        "size": text.size(kernel.artifact_bytes),
        "recipe": [
            ("target", text.clean(recipe.architecture)),
            ("compiler", text.clean(f"{recipe.compiler}, {recipe.compiler_version}")),
            ("flags", text.clean(" ".join(recipe.flags))),
            ("key", text.clean(kernel.key)),
            *((text.clean(name), text.clean(digest)) for name, digest in recipe.sources.items()),
        ],
        "registers": "",
        "spills": "",
        "shared": "",
        "threads": "",
        "blocks": "",
        "occupancy": "",
    }
    if needs:
        row |= {
            "registers": str(needs.registers_per_thread),
            "spills": text.size(needs.spill_store_bytes + needs.spill_load_bytes),
            "shared": text.size(needs.static_shared_bytes + needs.dynamic_shared_bytes),
            "threads": str(needs.threads_per_block),
            "blocks": str(needs.blocks_per_sm),
            "occupancy": f"{100 * needs.occupancy:.0f} %"
            if math.isfinite(needs.occupancy)
            else text.NOT_AVAILABLE,
        }
    return row


def control_line(view: View) -> str:
    """How the A/A control came out, in a sentence or two; empty without control."""
    results = view.run.results
    if results is None or not results.control:
        return ""
    alarms = sum(c.verdict in (Verdict.FASTER, Verdict.SLOWER) for c in results.control)
    called = "None was" if alarms == 0 else f"{alarms} of {len(results.control)} were"
    line = f"{called} called faster or slower."
    if math.isfinite(results.noise_floor):
        floor = text.percent(results.noise_floor)
        line += f" The noise floor, the 95th percentile of the ratios' distance from 1, is {floor}."
    return line


def rivals_line(results: Results | None, candidate: str) -> str:
    """How the candidate stands against the fastest other implementation of each cell; empty where there is but one."""
    all_rivals = rivals(results) if results else None
    if all_rivals is None:
        return ""
    closest = all_rivals.closest
    return (
        f"Against the fastest other implementation of each case {text.implementation(candidate)} is at "
        f"{text.ratio(all_rivals.geomean)} in the geometric mean of medians, at least {text.ratio(closest.ratio)} "
        f"({text.clean(closest.cell)}, {text.implementation(closest.implementation)})."
    )


def roofline_line(view: View) -> str:
    """The highest rate of each dtype, and its share of the ceiling that was measured."""
    rates = []
    for dtype in view.dtypes:
        rated = [row for row in view.measured if row.case.dtype == dtype and math.isfinite(row.gflops)]
        if not rated:
            continue
        best = max(rated, key=lambda row: row.gflops)
        line = f"{text.clean(dtype)} {text.figures(best.gflops)} GFLOP/s on {best.name}"
        peak = view.peak(dtype)
        if peak:
            line += (
                f" ({text.figures(100 * best.gflops / peak[1])} % of the measured {text.clean(peak[0])} peak)"
            )
        rates.append(line)
    if not rates:
        return ""
    line = f"Highest rates: {', '.join(rates)}."
    return line if any(map(view.peak, view.dtypes)) else f"{line} No ceilings were measured in this run."


def reproduce(view: View) -> str:
    """Commands, one to a line."""
    revision = view.run.manifest.revision
    lines = [text.clean(f"git checkout {revision.commit}")] if revision else []
    return "\n".join([*lines, view.command])


def reproduce_note(view: View) -> str:
    """What the commands alone do not restore."""
    revision = view.run.manifest.revision
    if revision and revision.dirty:
        return "The source had uncommitted changes: apply the diff that manifest.json holds."
    return "On the same machine and versions, as listed above."

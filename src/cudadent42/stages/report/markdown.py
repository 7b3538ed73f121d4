"""``report.md``: the run as a comment on a pull request."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from cudadent42.decisions.words import report_lines
from cudadent42.model import text
from cudadent42.model.records import Comparison, Verdict
from cudadent42.profiles.text import ablations, known, times, unasked
from cudadent42.stages.report import facts, gates, notices, script
from cudadent42.stages.report.cases import CaseRow, shares_of_bound
from cudadent42.stages.report.rivals import Standing, standings
from cudadent42.stages.report.view import Tone, View

_SPECIAL = re.compile(r"([\\`*_\[\]|~$@])")
_SIGNS = {Tone.GOOD: "✅", Tone.BAD: "❌", Tone.WARN: "⚠️", Tone.NEUTRAL: "➖"}


def render(view: View) -> str:
    """The report as GitHub-flavoured Markdown."""
    parts = [
        f"### {_SIGNS[view.tone]} {escape(view.headline)}",
        escape(view.subline) + ".",
        *_notices(view),
        *_tally(view),
        "" if view.profile_alone else _table(view),
        *_gates(view),
        *_script(view),
        *_profile(view),
        escape(facts.rivals_line(view.run.results, view.candidate_name)),
        escape(view.verification_line),
        escape(facts.control_line(view)),
        escape(facts.roofline_line(view)),
        _fold(
            "Machine and versions",
            [f"<code>{escape(view.run.machine.summary)}</code>", _rows(_all_facts(view))],
        ),
        _fold("Kernels", _kernels(view)),
        _fold("All implementations", _others(view)),
        _fold("Checks closest to their bound", _checks(view)),
        _fold("Not measured here", ["\n".join(f"* {escape(line)}" for line in notices.not_measured(view))]),
        _fold("Reproduce", [_commands(facts.reproduce(view)), escape(facts.reproduce_note(view))]),
        f"<sub>cudadent42 {escape(view.run.manifest.version)}, run {escape(view.name)}</sub>",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _notices(view: View) -> Iterable[str]:
    for notice in notices.notices(view):
        lines = [
            f"> {_SIGNS[notice.tone]} **{escape(notice.title)}**",
            *(f"> * {escape(x)}" for x in notice.lines),
        ]
        yield "\n".join(lines)


def _profile(view: View) -> Iterable[str]:
    """The ranked causes, and what to do next."""
    if view.profiled is None:
        return
    diagnosis = view.profiled.diagnosis
    subject = f"{text.clean(diagnosis.case)}, {text.implementation(diagnosis.implementation)}"
    yield f"**Where the time goes: {escape(subject)}.** {escape(diagnosis.summary)}"
    if diagnosis.not_examined:
        yield f"{escape(unasked(diagnosis))}."
    yield from (
        f"{escape(line[0].upper() + line[1:])}." for line in (*times(diagnosis), *ablations(diagnosis))
    )
    if diagnosis.causes:
        head = "| cause | at most | known | evidence | try first |\n| --- | ---: | --- | --- | --- |"
        rows = (
            f"| {escape(one.title)} | {100 * one.gain:.0f} % | {known(one)} "
            f"| {escape(one.evidence)} | {escape(one.experiment)} |"
            for one in diagnosis.causes
        )
        yield "\n".join([head, *rows])
    yield f"Next: {escape(diagnosis.next_step)}"


def _script(view: View) -> Iterable[str]:
    """What the script would gain that the suite was recorded from."""
    part = script.section(view)
    if part is None:
        return
    first, *others = part.lines
    yield f"**{escape(part.title)}.** {escape(first)}"
    yield from map(escape, others)
    if part.stays:
        head = "| stays as it is | reason | calls | share |\n| --- | --- | ---: | ---: |"
        rows = (
            f"| {escape(row.what)} | {escape(row.reason)} | {row.calls} | {row.share} |" for row in part.stays
        )
        yield "\n".join([head, *rows])
    if part.notes:
        yield "\n".join(f"* {escape(note)}" for note in part.notes)


def _gates(view: View) -> Iterable[str]:
    judged = gates.gate_report(view)
    if judged is not None:
        lines = [f"* {escape(' '.join(line.split()))}" for line in report_lines(judged)]
        yield "\n".join([escape(gates.headline(judged)), "", *lines])


def _tally(view: View) -> Iterable[str]:
    if view.verdicts:
        counts = ", ".join(f"{count} {verdict.value}" for verdict, count in view.verdicts.items())
        yield f"Cases: {counts}."


def _table(view: View) -> str:
    head = (
        f"| case | dtype | {escape(view.baseline)} | {escape(view.candidate)} "
        "| speed-up | 95 % interval | verdict |\n"
        "| --- | --- | ---: | ---: | ---: | --- | --- |"
    )
    return "\n".join([head, *(_line(row) for row in view.rows)])


def _line(row: CaseRow) -> str:
    start = f"| {escape(row.name)} | {escape(row.case.dtype)} |"
    comparison = row.comparison
    if comparison is None:
        return f"{start} | | | | not compared: {escape(row.reason)} |"
    flagged = f" ({comparison.flagged_blocks} flagged)" if comparison.flagged_blocks else ""
    latencies = f"{text.latency(comparison.baseline_latency_ms)} | {text.latency(comparison.latency_ms)}"
    if comparison.refused is not None:
        return f"{start} {latencies} | | | no verdict: {comparison.refused.value}{flagged} |"
    ratio = text.ratio(comparison.speedup)
    ratio = ratio if comparison.verdict is Verdict.UNDECIDED else f"**{ratio}**"
    return (
        f"{start} {latencies} | {ratio} | {text.interval(comparison.ci_low, comparison.ci_high)} | "
        f"{comparison.verdict.value}{flagged} |"
    )


def _all_facts(view: View) -> facts.Rows:
    return facts.run_facts(view) + facts.machine_facts(view)


def _kernels(view: View) -> list[str]:
    kernels = facts.kernels(view)
    if not kernels:
        return []
    lines = ["| kernel | target | compiler | compile time | size |", "| --- | --- | --- | ---: | ---: |"]
    lines += [_cells(kernel, "label", "target", "compiler", "time", "size") for kernel in kernels]
    needing = [kernel for kernel in kernels if kernel["registers"]]
    if needing:
        lines += [
            "",
            "| kernel | registers | spills | shared memory | threads | blocks/SM | occupancy |",
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        columns = ("label", "registers", "spills", "shared", "threads", "blocks", "occupancy")
        lines += [_cells(kernel, *columns) for kernel in needing]
    return ["\n".join(lines)]


def _cells(row: Mapping[str, object], *columns: str) -> str:
    return "| " + " | ".join(escape(str(row[column])) for column in columns) + " |"


def _others(view: View) -> list[str]:
    """Speed-ups over the baseline, a row a case and a column an implementation, with their means."""
    results = view.run.results
    if results is None or not view.other_names:
        return []
    columns = standings(results)
    names = [column.implementation for column in columns]
    head = [
        f"| speed-up over {escape(view.baseline)} | "
        + " | ".join(escape(text.implementation(name)) for name in names)
        + " |",
        "| --- |" + " ---: |" * len(names),
    ]
    lines = []
    for row in view.rows:
        timed = [row.comparison if name == view.candidate_name else row.others.get(name) for name in names]
        if any(timed):
            cells = " | ".join(_reached(each) for each in timed)
            lines.append(f"| {escape(row.name)}/{escape(row.case.dtype)} | {cells} |")
    means = " | ".join(_mean(column, len(view.rows)) for column in columns)
    ratios = " | ".join(text.ratio(column.ratio) for column in columns[1:])
    lines.append(f"| **geometric mean** | {means} |")
    lines.append(f"| **{escape(view.candidate)} over it** | | {ratios} |")
    return ["\n".join([*head, *lines])]


def _reached(comparison: Comparison | None) -> str:
    if comparison is None:
        return "not timed"
    interval = text.interval(comparison.ci_low, comparison.ci_high)
    return f"**{text.ratio(comparison.speedup)}** {comparison.verdict.value} ({interval})"


def _mean(standing: Standing, cases: int) -> str:
    mean = f"**{text.ratio(standing.speedup)}**"
    return mean if standing.cells == cases else f"{mean} ({standing.cells} of {cases})"


def _checks(view: View) -> list[str]:
    shared = []
    for entry in view.checked:
        shares = [share for share in shares_of_bound(entry) if not math.isnan(share)]
        if shares:
            shared.append((max(shares), entry))
    if not shared:
        return []
    shared.sort(key=lambda pair: -pair[0])
    lines = ["| case | input | implementation | of the bound |", "| --- | --- | --- | ---: |"]
    lines += [
        f"| {escape(e.case)} | {escape(e.input)} | {escape(text.implementation(e.implementation))} "
        f"| {text.figures(100 * share)} % |"
        for share, e in shared[:10]
    ]
    return ["\n".join(lines)]


def _rows(rows: facts.Rows) -> str:
    return "\n".join(
        ["| | |", "| --- | --- |", *(f"| {escape(name)} | {escape(value)} |" for name, value in rows)]
    )


def _fold(title: str, parts: list[str]) -> str:
    body = "\n\n".join(part for part in parts if part)
    return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>" if body else ""


def escape(words: str) -> str:
    """Text that Markdown shows as it is: no markup, no mention, no table cell."""
    return _SPECIAL.sub(_entity, _entities(text.clean(words)))


def _entities(words: str) -> str:
    return words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _entity(match: re.Match[str]) -> str:
    sign = match.group()
    return {"|": "&#124;", "@": "&#64;"}.get(sign, f"\\{sign}")


def _commands(lines: str) -> str:
    """Lines for a shell as they are typed. In a fence of backticks neither ``<`` nor backticks could be escaped."""
    return f"<pre><code>{_entities(lines)}</code></pre>"

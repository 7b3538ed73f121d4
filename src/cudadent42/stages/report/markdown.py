"""``report.md``: the run as a comment on a pull request."""

from __future__ import annotations

from collections.abc import Iterable

from cudadent42.stages.report import notices
from cudadent42.stages.report.escaping import escape
from cudadent42.stages.report.section import Text
from cudadent42.stages.report.sections import SECTIONS
from cudadent42.stages.report.view import Tone, View

_SIGNS = {Tone.GOOD: "✅", Tone.BAD: "❌", Tone.WARN: "⚠️", Tone.NEUTRAL: "➖"}


def render(view: View) -> str:
    """The report as GitHub-flavoured Markdown."""
    texts = sorted((each for section in SECTIONS for each in section.texts), key=lambda each: each.order)
    parts = [
        f"### {_SIGNS[view.tone]} {escape(view.headline)}",
        escape(view.subline) + "." + (f" {view.what_is_timed}." if view.what_is_timed else ""),
        *_notices(view),
        *_tally(view),
        *(part for each in texts if not each.fold for part in each.parts(view)),
        *(_folded(each, view) for each in texts if each.fold),
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


def _tally(view: View) -> Iterable[str]:
    if view.verdicts:
        counts = ", ".join(f"{count} {verdict.value}" for verdict, count in view.verdicts.items())
        yield f"Cases: {counts}."


def _folded(folded: Text, view: View) -> str:
    body = "\n\n".join(part for part in folded.parts(view) if part)
    return f"<details><summary>{folded.fold}</summary>\n\n{body}\n\n</details>" if body else ""

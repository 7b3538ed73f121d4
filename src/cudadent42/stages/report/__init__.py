"""Reports of a run folder: a page for people, Markdown for a pull request, a picture of the speed-ups."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from cudadent42.base.errors import UsageError
from cudadent42.runs.checking import load_checked
from cudadent42.runs.run_folder import RunFolder, load_skipped

__all__ = ["ReportPaths", "write", "write_run"]


@dataclass(frozen=True)
class ReportPaths:
    """The files written."""

    html: Path
    markdown: Path
    speedup_svg: Path | None
    """None where nothing has a ratio."""


def write(folder: Path, before: Path | None = None) -> ReportPaths:
    """Write ``report.html``, ``report.md`` and ``speedup.svg`` into a run folder, finished or not.

    A profile in the folder is shown; that of the folder ``before``, if one is given, beside it.

    Of a run that ended early the samples that were kept are compared, and the report says that this is a part.

    Raises UsageError where the folder cannot be read as a run or cannot be written to.
    """
    return write_run(_compared(load_checked(folder)), before)


def _compared(run: RunFolder) -> RunFolder:
    """The run with a comparison: where it ended before its own, one of the samples that were kept."""
    if run.results is not None or not run.samples:
        return run
    from cudadent42.decisions.compare import compare

    return replace(run, results=compare(run.plan, run.samples, load_skipped(run.path), {}))


def write_run(run: RunFolder, before: Path | None = None) -> ReportPaths:
    """``write`` for a run that is already read."""
    # matplotlib takes most of a second to import, and only reports need it.
    from cudadent42.stages.report import html, markdown
    from cudadent42.stages.report.figures.speedup import speedup
    from cudadent42.stages.report.profile import load_profiled
    from cudadent42.stages.report.view import View

    view = View(run, load_profiled(run.path, before))
    paths = ReportPaths(
        html=run.path / "report.html",
        markdown=run.path / "report.md",
        speedup_svg=run.path / "speedup.svg" if view.measured else None,
    )
    _replace(paths.html, html.render(view))
    _replace(paths.markdown, markdown.render(view))
    if paths.speedup_svg:
        _replace(paths.speedup_svg, speedup(view, None, wide=True))
    return paths


def _replace(path: Path, content: str) -> None:
    """Write the file so that a reader sees the old one or the new one, never half of one."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        # Case names may hold lone surrogates, which UTF-8 cannot.
        partial.write_text(content, encoding="utf-8", errors="replace", newline="\n")
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):  # a folder that is read-only
            partial.unlink(missing_ok=True)
        raise UsageError(
            f"cannot write {path}: {error.strerror or error}; free some space or check its owner"
        ) from error

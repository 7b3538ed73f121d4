"""``history --output FILE.html``: a case's speed-up over its runs, as one file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from cudadent42.model import text
from cudadent42.model.history import Track
from cudadent42.stages.report import pages, svg
from cudadent42.stages.report.figures.history import MOST_PANELS, history
from cudadent42.version import __version__


def page(tracks: Sequence[Track], name: str) -> str:
    """The picture of the first tracks, and tables of all. ``tracks`` is not empty."""
    sheet = svg.Sheet()
    picture = history(tracks[:MOST_PANELS], name, sheet)
    runs = sum(len(track.points) for track in tracks)
    days = sorted(point.started[:10] for track in tracks for point in track.points)
    drawn = min(len(tracks), MOST_PANELS)
    return (
        pages.environment()
        .get_template("history.html.j2")
        .render(
            name=text.clean(name),
            span=text.clean(days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"),
            subline=f"{text.plural(runs, 'comparison')} in {text.plural(len(tracks), 'track')}; "
            "only what can be compared shares a track",
            picture=Markup(picture),
            left_out=f"The {drawn} longest of {len(tracks)} tracks are drawn." if drawn < len(tracks) else "",
            tracks=[{"title": text.clean(track.title), "rows": _rows(track)} for track in tracks],
            contents=[],
            css=pages.style(sheet),
            version=__version__,
        )
    )


def _rows(track: Track) -> list[dict[str, str]]:
    return [
        {
            "started": text.clean(point.started[:19].replace("T", " ")),
            "revision": text.clean(point.revision),
            "machine": text.clean(f"now {point.machine}" if number in track.changes else point.machine),
            "speedup": text.ratio(point.speedup),
            "interval": text.interval(point.ci_low, point.ci_high),
            "verdict": point.verdict,
            "path": text.clean(point.path),
        }
        for number, point in enumerate(track.points)
    ]

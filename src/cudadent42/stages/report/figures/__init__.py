"""The pictures of a report, each a function from a ``View`` to SVG text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from markupsafe import Markup


def drawn(draw: Callable[..., str], view: Any, sheet: Any) -> dict[str, Markup]:
    """A picture of ``view`` in its two widths, ``wide`` and ``narrow``. The figures escape what they write."""
    return {
        "wide": Markup(draw(view, sheet, wide=True)),
        "narrow": Markup(draw(view, sheet, wide=False)),
    }

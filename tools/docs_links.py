"""MkDocs hook: what a page links to outside of the documentation.

A folder becomes its README or its report; a file that the site does not hold becomes plain text. Links that lead
nowhere in the repository are left as they are, so that the strict build fails on them.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Called by MkDocs with the text of each page."""
    folder = posixpath.dirname(page.file.src_uri)

    def lead(match: re.Match[str]) -> str:
        words, target, anchor = match[1], match[2], match[3] or ""
        if ":" in target:
            return match[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        if (ROOT / path).is_dir():
            for name in ("README.md", "report.html"):
                if files.get_file_from_path(f"{path}/{name}") is not None:
                    return f"[{words}]({target.rstrip('/')}/{name}{anchor})"
            return words
        if (ROOT / path).is_file() and files.get_file_from_path(path) is None:
            return words
        return match[0]

    parts = _FENCE.split(markdown)
    return "".join(part if part.startswith("```") else _LINK.sub(lead, part) for part in parts)

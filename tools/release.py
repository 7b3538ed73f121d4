#!/usr/bin/env python3
"""What the release workflow asks of this repository; needs nothing but Python.

    tools/release.py check v1.2.0     # the tag is that of the version, which the changelog has with a date
    tools/release.py notes v1.2.0     # the changelog's section, for the release's page

Exit code 2 where something does not fit, with what to do.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEADING = re.compile(r"^## \[(?P<version>[^\]]+)\](?: - (?P<date>.*))?$", re.MULTILINE)
DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
COPIES = {
    "src/cudadent42/version.py": re.compile(r'^__version__ = "(.+)"$', re.MULTILINE),
    "CITATION.cff": re.compile(r"^version: (.+)$", re.MULTILINE),
}
"""Files that say the version once more, for readers that have no ``pyproject.toml``."""


class ReleaseError(Exception):
    """The repository is not ready for the release."""


def version(root: Path) -> str:
    """That of ``pyproject.toml``, with which its copies agree."""
    declared = re.search(r'^version = "(.+)"$', (root / "pyproject.toml").read_text(), re.MULTILINE)
    if declared is None:
        raise ReleaseError("pyproject.toml has no version; give it one")
    for file, pattern in COPIES.items():
        copy = pattern.search((root / file).read_text())
        if copy is None or copy[1] != declared[1]:
            said = "nothing" if copy is None else copy[1]
            raise ReleaseError(f"pyproject.toml says {declared[1]} and {file} {said}; make them agree")
    return declared[1]


def section(root: Path, wanted: str) -> tuple[str, str]:
    """Date and text of a version's section of the changelog."""
    text = (root / "CHANGELOG.md").read_text()
    headings = list(HEADING.finditer(text))
    for index, heading in enumerate(headings):
        if heading["version"] != wanted:
            continue
        end = headings[index + 1].start() if index + 1 < len(headings) else len(text)
        body = text[heading.end() : end].strip()
        date = (heading["date"] or "").strip()
        if DATE.fullmatch(date) is None:
            raise ReleaseError(f"CHANGELOG.md gives {wanted} no date; expected '## [{wanted}] - YYYY-MM-DD'")
        if not body:
            raise ReleaseError(
                f"CHANGELOG.md says nothing under {wanted}; move what is under Unreleased there"
            )
        return date, body
    raise ReleaseError(
        f"CHANGELOG.md has no section {wanted}; rename Unreleased to '[{wanted}] - YYYY-MM-DD'"
    )


def check(root: Path, tag: str) -> str:
    """The changelog's section of a tag. Raises ReleaseError unless the tag is that of the version."""
    expected = f"v{version(root)}"
    if tag != expected:
        raise ReleaseError(
            f"the tag is {tag!r}, and the version asks for {expected!r}; tag the commit of that version"
        )
    return section(root, expected.removeprefix("v"))[1]


def main(arguments: list[str], root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("check", "notes"))
    parser.add_argument("tag", help="as git has it, e.g. v1.2.0")
    options = parser.parse_args(arguments)
    try:
        body = check(root, options.tag)
    except ReleaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(body if options.action == "notes" else f"{options.tag} is ready")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

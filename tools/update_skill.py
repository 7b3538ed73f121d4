#!/usr/bin/env python3
"""Writes skills/cudadent42/SKILL.md, which coding agents load on demand, from AGENTS.md, which they find here.

    python tools/update_skill.py

The sections that are of use outside of this repository are taken over word by word; tests/test_skill.py compares.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SKILL = ROOT / "skills" / "cudadent42" / "SKILL.md"
SECTIONS = ("Commands", "As a server of tools", "Exit codes", "Rules")
"""Of AGENTS.md, in this order."""

DESCRIPTION = (
    "Measure, verify and race GPU and CPU kernels with CUDAdent42 so that a speed-up can be defended. Use when a "
    "kernel for attention or a mixture of experts is to be made faster, or when two versions are to be compared. Use "
    "it, too, when somebody asks whether a kernel is faster or right, or before any number of a kernel's speed is "
    "quoted."
)


def sections(text: str) -> dict[str, str]:
    """The sections of a page by their titles, without these."""
    parts = re.split(r"^## (.+)\n", text, flags=re.MULTILINE)
    return {title: body.strip() for title, body in zip(parts[1::2], parts[2::2], strict=True)}


def skill(agents: str) -> str:
    """The skill, from the text of AGENTS.md. Raises KeyError where that lacks a section."""
    parts = sections(agents)
    taken = "\n\n".join(f"## {title}\n\n{parts[title]}" for title in SECTIONS)
    return (
        f"---\nname: {SKILL.parent.name}\ndescription: {DESCRIPTION}\n---\n\n"
        "# Kernels that are measured\n\n"
        "<!-- Written by tools/update_skill.py from AGENTS.md. -->\n\n"
        f"{taken}\n"
    )


if __name__ == "__main__":
    SKILL.parent.mkdir(parents=True, exist_ok=True)
    SKILL.write_text(skill((ROOT / "AGENTS.md").read_text(encoding="utf-8")), encoding="utf-8")
    print(SKILL.relative_to(ROOT))

#!/usr/bin/env python3
"""Writes src/cudadent42/agents/tools.json, the tools as the server tells a client of them, from their records.

    python tools/update_mcp_tools.py

The server answers from it before it has imported the SDK; tests/cudadent42/agents/test_front.py compares.
"""

from __future__ import annotations

import json
from pathlib import Path

from cudadent42.agents.front import LISTING
from cudadent42.agents.server import listed_tools

PATH = Path(__file__).resolve().parents[1] / "src/cudadent42/agents" / LISTING


def listing() -> str:
    tools = [tool.model_dump(by_alias=True, mode="json", exclude_none=True) for tool in listed_tools()]
    lines = (json.dumps(tool, ensure_ascii=False, separators=(",", ":")) for tool in tools)  # a tool a line
    return "[\n" + ",\n".join(lines) + "\n]\n"


if __name__ == "__main__":
    PATH.write_text(listing(), encoding="utf-8")
    print(PATH.name)

"""The server's command alone: its clients wait for its first answer, and the other commands' modules take as long."""

from __future__ import annotations

from cudadent42.commands.mcp import mcp
from cudadent42.commands.program import make_app, run_program

NAME = "mcp"


def main() -> int:
    """Run a command line that begins with ``NAME``; the exit code."""
    app = make_app()
    app.command(NAME)(mcp)
    return run_program(app)

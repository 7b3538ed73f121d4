"""The commands that README, tutorial and AGENTS.md show: each is one that the command line takes, options included."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

import made_command_line

ROOT = Path(__file__).parent.parent
PAGES = (
    "README.md",
    "AGENTS.md",
    "docs/tutorial.md",
    "docs/running.md",
    "docs/sessions.md",
    "docs/tuning.md",
)
USAGE_ERROR = typer.BadParameter.__mro__[1]
"""Of the click that this typer comes with."""
DECISIONS = "## From a number to a decision"
NAMED = re.compile(r"\s*(?:[A-Z_0-9]+=\S+ )*(?:\.venv/bin/)?(cudadent42|\./run\.sh)( .*)?$")


def shown(page: str) -> list[str]:
    """Lines of the blocks of shell, and what stands between backticks in the table of decisions."""
    text = (ROOT / page).read_text(encoding="utf-8")
    table = text.partition(DECISIONS)[2].partition("\n## ")[0]
    commands = re.findall(r"`((?:cudadent42|run|remote) [^`\n]+)`", table)
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r";(?= )|&&|(?<= ) #.*", line):
                if part and (named := NAMED.match(part)):
                    start = "cudadent42 run" if named[1] == "./run.sh" else "cudadent42"
                    commands.append(start + (named[2] or ""))
    return commands


def parse(command: str) -> None:
    """Raises what the command line raises, without running anything."""
    words = shlex.split(re.sub(r"<[^>]*>| > .*| \|.*|[\[\]…]", "", command), comments=True)
    arguments = words[words[0] == "cudadent42" :]
    part = made_command_line.group()
    context = part.make_context("cudadent42", [], resilient_parsing=True)
    while arguments and not arguments[0].startswith("-") and hasattr(part, "resolve_command"):
        group, names = part, part.list_commands(context)
        name, part, arguments = part.resolve_command(context, arguments)
        if part is None:
            assert "tune" in context.command_path, (
                f"no command {name}; expected one of {names} of {group.name}"
            )
            return  # `tune space.toml`: its arguments come first
        context = part.make_context(
            name, list(arguments), parent=context, resilient_parsing=hasattr(part, "resolve_command")
        )


@pytest.mark.parametrize("page", PAGES)
def test_shown_commands_are_taken(page: str) -> None:
    commands = shown(page)
    assert commands
    refused = []
    for command in commands:
        try:
            parse(command)
        except typer.Exit:
            continue
        except (USAGE_ERROR, AssertionError) as error:
            refused.append(f"{command}: {error!r}")
    assert not refused


@pytest.mark.parametrize(
    "command", ["cudadent42 cost advise", "cudadent42 run --suit small", "cudadent42 comprae"]
)
def test_what_is_not_taken_is_seen(command: str) -> None:
    with pytest.raises((USAGE_ERROR, AssertionError)):
        parse(command)

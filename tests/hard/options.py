"""Random command lines: any command, any options, values that nobody means well with."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import hostile

_NEVER = frozenset(("--fix",))
"""It installs packages."""
_MEASURES = frozenset(
    ("run", "bench", "verify", "compare", "bisect", "build", "profile", "doctor", "preflight")
)
"""Given options that are right they measure for minutes, so mostly one of them is wrong."""


@cache
def _commands() -> tuple[tuple[tuple[str, ...], tuple[Any, ...]], ...]:
    """Every command's words and parameters."""
    import typer

    from cudadent42.commands.cli import app

    all_commands = []
    waiting: list[tuple[tuple[str, ...], Any]] = [((), typer.main.get_command(app))]
    while waiting:
        words, command = waiting.pop()
        for name, sub in sorted(getattr(command, "commands", {}).items()):
            waiting.append(((*words, name), sub))
        all_commands.append((words, tuple(command.params)))
    return tuple(all_commands)


def line(chance: random.Random) -> list[str]:
    """The arguments of one command."""
    words, parameters = chance.choice(_commands())
    arguments = list(words)
    if chance.random() < 0.05:
        arguments.insert(chance.randrange(len(arguments) + 1), hostile.text(chance))
    for parameter in parameters:
        if parameter.param_type_name == "argument":
            if chance.random() < 0.8:
                arguments.append(hostile.text(chance))
        elif chance.random() < 0.25:
            option = chance.choice([*parameter.opts, *parameter.secondary_opts])
            if option in _NEVER or option in ("-h", "--help"):
                continue
            arguments.append(option)
            if not getattr(parameter, "is_flag", False) or chance.random() < 0.05:
                arguments.append(hostile.text(chance))
    if chance.random() < 0.2:
        arguments.append(chance.choice(("--json", "--debugg", "--", "-v", hostile.text(chance))))
    if words and words[0] in _MEASURES and chance.random() < 0.95:
        arguments += ["--device", "a\x1b[2Jdevice"]
    return arguments

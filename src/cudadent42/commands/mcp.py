"""``mcp``: the lab as a server for agents."""

from __future__ import annotations

from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from cudadent42.base.errors import MachineNotReadyError, UsageError
from cudadent42.base.paths import real_path


def mcp(
    project: Annotated[
        Path,
        typer.Option(
            "--project",
            metavar="FOLDER",
            help="Let the agent work in this folder. It can name no file outside.",
        ),
    ] = Path(),
    max_minutes: Annotated[
        float, typer.Option("--max-minutes", metavar="N", help="Let one start take at most so many minutes.")
    ] = 60.0,
    max_cost: Annotated[
        float,
        typer.Option("--max-cost", metavar="USD", help="Let all starts together cost at most this."),
    ] = 5.0,
    ask_above: Annotated[
        float,
        typer.Option("--ask-above", metavar="USD", help="You are asked before a start that may cost more."),
    ] = 1.0,
) -> None:
    """Serve the lab to a coding agent, by the Model Context Protocol.

    It speaks on standard input and output. What the agent starts is limited in minutes and money, at most to
    what you allow here.
    """
    if find_spec("mcp") is None:
        from flashmoe_science.jit.requirements import install_command

        raise MachineNotReadyError(f"the server needs the package mcp: {install_command('mcp')}")
    for option, value in (
        ("--max-minutes", max_minutes),
        ("--max-cost", max_cost),
        ("--ask-above", ask_above),
    ):
        if not 0.0 <= value <= 1e6:
            raise UsageError(f"{option} {value:g}: expected a number from 0 to 1000000")
    root = real_path(project)
    if not root.is_dir():
        raise UsageError(f"--project {project}: expected a folder")
    from cudadent42.agents.front import open_connection

    opening = open_connection(0, 1, _import_early)
    if opening.over:
        return
    _import_server()
    from cudadent42.agents.server import serve
    from cudadent42.decisions.allowance import Limits

    serve(root, Limits(max_minutes, max_cost, ask_above), opening)


def _import_early() -> None:
    with suppress(ImportError):  # which is told when it is needed
        _import_server()


def _import_server() -> None:
    """The SDK has hundreds of pydantic models of messages. A server uses few, so each is built when it is first used:
    that is a third of the time of its import."""
    import pydantic

    pydantic.BaseModel.model_config["defer_build"] = True
    import cudadent42.agents.server  # noqa: F401

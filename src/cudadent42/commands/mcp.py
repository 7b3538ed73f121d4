"""``mcp``: the lab as a server for agents."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from cudadent42.base.errors import MachineNotReadyError, UsageError


def mcp(
    project: Annotated[
        Path,
        typer.Option(
            "--project",
            metavar="FOLDER",
            help="The folder that the agent works in. It can name no file outside.",
        ),
    ] = Path(),
    max_minutes: Annotated[
        float, typer.Option("--max-minutes", metavar="N", help="The most minutes of one start.")
    ] = 60.0,
    max_cost: Annotated[
        float,
        typer.Option("--max-cost", metavar="USD", help="The most that all starts together may cost."),
    ] = 5.0,
    ask_above: Annotated[
        float,
        typer.Option("--ask-above", metavar="USD", help="You are asked before a start that may cost more."),
    ] = 1.0,
) -> None:
    """Serve the lab to a coding agent, by the Model Context Protocol.

    On standard input and output. Every start has limits of minutes and money; yours are the highest.
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
    root = project.resolve()
    if not root.is_dir():
        raise UsageError(f"--project {project}: expected a folder")
    from cudadent42.decisions.allowance import Limits

    _defer_models()
    from cudadent42.agents.server import serve

    serve(root, Limits(max_minutes, max_cost, ask_above))


def _defer_models() -> None:
    """The SDK has hundreds of pydantic models of messages. A server uses few, so each is built when it is first used:
    that is a third of the time of its start."""
    import pydantic

    pydantic.BaseModel.model_config["defer_build"] = True

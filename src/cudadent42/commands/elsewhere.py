"""What every run elsewhere has in common: what was asked for, what is checked of it here, and how it ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from cudadent42.base.errors import ExitCode
from cudadent42.commands import trace
from cudadent42.commands.common import say

if TYPE_CHECKING:
    from cudadent42.base.errors import LabError
    from cudadent42.plan import RunOptions
    from cudadent42.remote.core.run import Returned


@dataclass(frozen=True, kw_only=True)
class Asked:
    """``run --on``, as it was asked for."""

    on: str
    """A remote's name, or ``sky://FILE``."""
    run: RunOptions
    """Its output is here, and its gate is judged here."""
    max_cost: float | None = None
    """US dollars; None for no limit."""
    yes: bool = False
    """Agree to what it costs, if that is more."""
    verbose: bool = False
    as_json: bool = False


def check(asked: Asked) -> tuple[str, ...]:
    """Check what needs no machine; the arguments of ``cudadent42 run`` there. Raises LabError."""
    from cudadent42.remote.core.arguments import forwarded
    from cudadent42.remote.core.checks import check_plan
    from cudadent42.remote.core.tree import project_root
    from cudadent42.runs.run_folder import check_output

    check_plan(asked.run.choices, asked.run.device)
    arguments = forwarded(asked.run, project_root(), Path.cwd(), verbose=asked.verbose, as_json=asked.as_json)
    if asked.run.output is not None:
        check_output(asked.run.output)
    return arguments


def folder_of(asked: Asked) -> Path:
    """Where the run goes; made where it was not told where."""
    from cudadent42.runs.run_folder import create_default_folder
    from cudadent42.runs.source import revision

    return asked.run.output or create_default_folder(asked.run.choices.suite, revision())


def watched(output: str, action: Callable[[], Returned]) -> Returned:
    """``action``; where it ends early, what to do about the run to the folder ``output``, if it was started."""
    from cudadent42.remote.core.record import readable
    from cudadent42.remote.core.ssh import ConnectionLostError

    try:
        return action()
    except (KeyboardInterrupt, ConnectionLostError):
        for record in readable()[0]:
            if record.output == output and not record.fetched:
                say(
                    f"{record.job} goes on running there; bring it back with: cudadent42 remote attach {record.job}"
                )
                say(f"or end it with: cudadent42 remote stop {record.job}")
        raise


def conclude(asked: Asked, returned: Returned, trouble: LabError | None) -> NoReturn:
    """Hold what came back against the gates, print it, and end with its exit code."""
    if asked.run.gate is not None and returned.exit_code == ExitCode.PASS:
        from cudadent42.stages import gates

        judged = gates.judge(asked.run.gate, returned.folder)
        for line in gates.report_lines(judged):
            say(line)
        returned = replace(returned, exit_code=judged.exit_code)
    finish(returned, asked.as_json, trouble)


def finish(returned: Returned, as_json: bool = False, trouble: LabError | None = None) -> NoReturn:
    """What the run printed there, with its folder's name here; and its exit code.

    A machine that could not be ended costs money, so ``trouble`` makes a run that passed end as an error too.
    """
    from cudadent42.base.shown import plain

    # There it is written relative to the working tree, which is the same in every run.
    trace.current().answered |= bool(returned.output.strip())
    print(plain(returned.output).replace(f"../jobs/{returned.record.job}/run", str(returned.folder)), end="")
    if returned.exit_code and not as_json:
        say(f"the run ended with exit code {returned.exit_code}; its log is {returned.folder / 'remote.log'}")
    if trouble is not None:
        say(f"error: {trouble}")
        raise typer.Exit(returned.exit_code or trouble.exit_code)
    raise typer.Exit(returned.exit_code)

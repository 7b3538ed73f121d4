"""``run --on``: how it is asked for, and how it ends, as ``remote attach`` does."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn

import typer

from cudadent42.commands import trace
from cudadent42.commands.common import say
from cudadent42.commands.machines import consent_of

if TYPE_CHECKING:
    from cudadent42.commands.options import Elsewhere, Shown
    from cudadent42.plan import RunOptions
    from cudadent42.remote.core.run import Ended


def run_there(on: str, elsewhere: Elsewhere, run: RunOptions, shown: Shown) -> NoReturn:
    from cudadent42.remote.core.terminal import showing
    from cudadent42.remote.flows import pipeline

    options = pipeline.RemoteOptions(
        on=on, run=run, max_cost=elsewhere.max_cost, verbose=shown.verbose, as_json=shown.as_json
    )
    ended = pipeline.run(options, consent_of(elsewhere.yes, shown.as_json), say, showing(sys.stderr))
    finish(ended, as_json=shown.as_json)


def finish(ended: Ended, *, as_json: bool = False) -> NoReturn:
    """Print what the run printed there, with its folder's name here; end with its exit code.

    A machine that could not be ended costs money, so that makes a run that passed end as an error too.
    """
    from cudadent42.base.shown import plain

    returned, trouble = ended.returned, ended.trouble
    # There it is written relative to the working tree, which is the same in every run.
    trace.current().answered |= bool(returned.output.strip())
    print(plain(returned.output).replace(f"../jobs/{returned.record.job}/run", str(returned.folder)), end="")
    if returned.exit_code and not as_json:
        say(f"the run ended with exit code {returned.exit_code}; its log is {returned.folder / 'remote.log'}")
    if trouble is not None:
        say(f"error: {trouble}")
        raise typer.Exit(returned.exit_code or trouble.exit_code)
    raise typer.Exit(returned.exit_code)

"""The command line in the process of a test.

It is made from the signatures of all commands, which takes longer than most of them do, so it is made once. Warm
interpreters do the same.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import typer
from typer import testing

from cudadent42.commands.cli import app


@functools.cache
def group() -> Any:
    """The group of all commands."""
    return typer.main.get_command(app)


def invoke(*words: str, **options: Any) -> testing.Result:
    """What ``cudadent42`` does with these words. Options are those of `typer.testing.CliRunner.invoke`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(testing, "_get_command", lambda _: group())
        return testing.CliRunner().invoke(app, list(words), **options)

"""Calls of the user's own ``gcloud``: no shell, no prompt, no standard input. All names are checked before."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from cudadent42.base.interrupts import put_off
from cudadent42.base.reading import parse_json
from cudadent42.base.shown import plain
from cudadent42.remote.providers.gce.failures import CloudError, Failure, recognise

TIMEOUT_S = 900.0
"""Of any call. Creating an instance with GPUs takes minutes, stopping one up to two."""
READ_TIMEOUT_S = 120.0
"""Of a call that only asks."""
MOST_SAID = 4000
"""Characters that are kept of a message; a whole one with its details has about 1,500."""


class CutOffError(KeyboardInterrupt):
    """An interrupt that ended a call before its outcome was known: what it asked for may still come to be."""


def ask(doing: str, *arguments: str) -> Any:
    """What a call that changes nothing prints, as JSON. Raises CloudError."""
    return _document(doing, run(doing, (*arguments, "--format=json"), READ_TIMEOUT_S))


def change(doing: str, *arguments: str) -> None:
    """A call that changes something, waited for even through an interrupt.

    Raises CloudError, KeyboardInterrupt; CutOffError at a second interrupt.
    """
    run(doing, (*arguments, "--format=json"), TIMEOUT_S)


def run(doing: str, arguments: Sequence[str], timeout_s: float, cwd: Path | None = None) -> str:
    """Standard output of ``gcloud ARGUMENTS``; ``doing`` begins the message of an error.

    The call is a session of its own: an interrupt here does not cut it off halfway, with an instance that was asked for
    and nobody knowing whether it exists. It is waited for, and the interrupt is raised after it.
    """
    tool = shutil.which("gcloud")
    if tool is None:
        raise CloudError(Failure.NO_TOOL, "", doing)
    process = None
    try:
        with put_off():  # else it could be at work with nobody to wait for it
            process = subprocess.Popen(
                [tool, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                errors="replace",
                env=os.environ | {"CLOUDSDK_CORE_DISABLE_PROMPTS": "1"},
                start_new_session=True,
                cwd=cwd,
            )
        output, errors = _said(process, doing, timeout_s)
    except KeyboardInterrupt as interrupt:
        if process is not None and not _is_waited_for(process, doing, timeout_s):
            raise CutOffError from interrupt
        raise
    if process.returncode != 0:
        said = plain(errors.strip() or output.strip())[:MOST_SAID]
        raise CloudError(recognise(said), said, doing)
    return output


def _said(process: subprocess.Popen[str], doing: str, timeout_s: float) -> tuple[str, str]:
    try:
        return process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        _end(process)
        raise CloudError(Failure.TIMED_OUT, f"within {timeout_s:.0f} s", doing) from error


def _is_waited_for(process: subprocess.Popen[str], doing: str, timeout_s: float) -> bool:
    """Wait for a call that was interrupted. A second interrupt ends the wait, and the call; False then."""
    try:
        with suppress(OSError):  # the terminal may be what was closed
            print(
                f"{doing}: interrupted; waiting for gcloud, so that its outcome is known",
                file=sys.stderr,
                flush=True,
            )
        process.communicate(timeout=timeout_s)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        _end(process)
        return False
    return True


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def _document(doing: str, output: str) -> Any:
    try:
        return parse_json(output)
    except ValueError as error:
        raise CloudError(Failure.UNKNOWN, f"expected JSON, found {output[:200]!r}", doing) from error

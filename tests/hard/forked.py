"""The command line in a process of its own, begun by a fork: thousands of them in minutes."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import time
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 20.0
"""Of one command; it is then told to end, as by a user, and ends with 130."""

_GRACE_S = 40.0
EXIT_CODES = frozenset((0, 1, 2, 3, 4, 5, 6, 7, 8, 130))
"""Documented ones but for 70, which is a defect."""

_MOST_LETTERS = 2000
_PREFIX_LETTERS = 40
"""``error: `` and the like."""


@dataclass(frozen=True)
class Ended:
    arguments: tuple[str, ...]
    code: int
    """Minus a signal's number, where one ended it."""
    out: str
    err: str
    seconds: float


def preload() -> None:
    """What the commands import, so that their processes need not."""
    import sqlalchemy  # noqa: F401

    import cudadent42.commands.cli
    import cudadent42.ledger.store
    import cudadent42.session.report
    import cudadent42.stages.gates
    import cudadent42.stages.report  # noqa: F401


def run(arguments: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Ended:
    """``cudadent42 ARGUMENTS`` in ``folder``. What it prints goes into files beside the folder."""
    out, err = (folder.parent / f"{folder.name}.{name}" for name in ("out", "err"))
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _command(arguments, folder, environment, out, err)
    code = _wait(child)
    ended = Ended(
        tuple(arguments),
        code,
        out.read_bytes().decode("utf-8", errors="replace"),
        err.read_bytes().decode("utf-8", errors="replace"),
        time.monotonic() - began,
    )
    out.unlink()
    err.unlink()
    return ended


def _command(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str], out: Path, err: Path
) -> None:
    code = 99
    try:
        os.setsid()
        os.chdir(folder)
        os.environ.update(environment)
        for number, name in ((0, os.devnull), (1, str(out)), (2, str(err))):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), number)
        sys.stdin, sys.stdout, sys.stderr = (
            io.TextIOWrapper(
                os.fdopen(number, mode, closefd=False), encoding="utf-8", line_buffering=number == 2
            )
            for number, mode in ((0, "rb"), (1, "wb"), (2, "wb"))
        )
        from cudadent42.commands.cli import main

        sys.argv = ["cudadent42", *arguments]
        code = main()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException as error:  # noqa: BLE001 - what gets past the program is what is looked for
        import traceback

        os.write(2, "".join(traceback.format_exception(error)).encode())
    finally:
        os._exit(code)


def _wait(child: int) -> int:
    began = time.monotonic()
    sent = 0
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        waited = time.monotonic() - began
        if waited > LIMIT_S and sent == 0:
            os.kill(child, signal.SIGTERM)
            sent = 1
        elif waited > LIMIT_S + _GRACE_S:
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.002 if waited < 0.5 else 0.05)


def faults(ended: Ended) -> list[str]:
    """What is wrong with how a command ended."""
    messages = []
    said = ended.out + ended.err
    if ended.code not in EXIT_CODES:
        messages.append(f"crash: exit code {ended.code}")
    if "Traceback (most recent call last)" in said:
        messages.append("traceback")
    if any(letter not in "\n\t" and unicodedata.category(letter) in ("Cc", "Cf") for letter in said):
        messages.append("control character")
    if any(len(line) > _MOST_LETTERS + _PREFIX_LETTERS for line in ended.err.splitlines()):
        messages.append("long message")
    if "--json" in ended.arguments and ended.code != 0:
        options = (
            ended.arguments[: ended.arguments.index("--")] if "--" in ended.arguments else ended.arguments
        )
        try:
            if "--json" in options:
                json.loads(ended.out)
        except ValueError:
            messages.append("no document")
    return messages

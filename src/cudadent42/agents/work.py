"""One task in a process of its own: ``python -m cudadent42.agents.work NEWS_FD PARENT``, the task on standard input.

It works in the project's folder. This process imports torch and starts workers, and the server does neither.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any, TextIO

from cudadent42.agents import tasks
from cudadent42.agents.tasks import News, Preflight, Race, Task, Verification
from cudadent42.base.errors import EXPECTED, ExitCode, in_words
from cudadent42.base.observer import Observer
from cudadent42.base.serialise import dumps, encode
from cudadent42.worker.processes import tie_to_parent

_COMMAND = ("cudadent42", "mcp")
"""In the manifest of runs, where the command line stands otherwise."""


class _Teller:
    """An observer that passes everything on as news."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def tell(self, news: News) -> None:
        self._file.write(dumps(news, indent=None) + "\n")
        self._file.flush()

    def stage(self, name: str) -> None:
        self.tell(News(stage=name, fraction=0.0))

    def advance(self, fraction: float, what: str) -> None:
        self.tell(News(fraction=fraction))

    def note(self, text: str) -> None:
        self.tell(News(note=text))

    def detail(self, text: str) -> None:
        return


def carry_out(task: Task, teller: _Teller) -> tuple[object, ExitCode]:
    """The record that answers the task, and how a command would have ended."""
    if isinstance(task, Preflight):
        return _preflight(task)
    if isinstance(task, Verification):
        return _verify(task, teller)
    if isinstance(task, Race):
        return _race(task, teller)
    from cudadent42.flows.doctor import examine

    diagnosis = examine(
        task.folder,
        case=task.case,
        implementation=task.implementation,
        measure=task.measure,
        observer=teller,
    )
    return diagnosis, ExitCode.PASS


def _preflight(task: Preflight) -> tuple[object, ExitCode]:
    from cudadent42.model.device_names import parse_device
    from cudadent42.preflight.runner import gather, inspect

    report = inspect(gather(parse_device(task.device), Path("runs")))
    return report, ExitCode.PASS if report.ready else ExitCode.NOT_READY


def _verify(task: Verification, observer: Observer) -> tuple[object, ExitCode]:
    from cudadent42.flows import pipeline
    from cudadent42.plan import RunOptions

    options = RunOptions(
        choices=task.choices,
        device=task.device,
        untrusted=task.untrusted,
        plug_ins_below=Path.cwd(),
        command=(*_COMMAND, "verify"),
    )
    report = pipeline.verify_only(options, observer)
    return report, ExitCode.PASS if report.passed else ExitCode.VERIFICATION_FAILED


def _race(task: Race, teller: _Teller) -> tuple[object, ExitCode]:
    from cudadent42.flows import pipeline, race
    from cudadent42.plan import RunOptions
    from cudadent42.runs.run_folder import RunWriter

    def opened(folder: RunWriter) -> None:
        teller.tell(News(folder=str(folder.path)))

    command = (*_COMMAND, "race_start")
    options = RunOptions(
        choices=task.choices,
        device=task.device,
        sealed=task.sealed,
        untrusted=task.untrusted,
        plug_ins_below=Path.cwd(),
        command=command,
    )
    if task.against:
        race_options = race.RaceOptions(run=options, entry=task.entry)
        outcome = race.race(task.against, race.WORKING_TREE, race_options, teller, opened)
    else:
        outcome = pipeline.run(options, teller, opened)
    return str(outcome.folder), outcome.exit_code


def main(arguments: list[str]) -> int:
    news_fd, parent = map(int, arguments)
    tie_to_parent(parent)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.set_inheritable(news_fd, False)
    with os.fdopen(news_fd, "w", encoding="utf-8") as file:
        teller = _Teller(file)
        last = _last(tasks.from_line(sys.stdin.readline()), teller)
        teller.tell(last)
    return last.exit_code or 0


def _last(task: Task, teller: _Teller) -> News:
    try:
        answer, code = carry_out(task, teller)
    except KeyboardInterrupt:
        return News(error="it was stopped; what was measured is kept", exit_code=ExitCode.INTERRUPTED)
    except EXPECTED as error:
        words, code = in_words(error)
        return News(error=words, exit_code=code)
    encoded: Any = encode(answer)
    return News(answer=encoded, exit_code=code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

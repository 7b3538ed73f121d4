"""The processes that a server started: their limits, how far they are, and their end. It ends no others."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import os
import re
import signal
import tempfile
import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import IO

from cudadent42.agents import tasks
from cudadent42.agents.outward import quoted
from cudadent42.agents.tasks import News, Task
from cudadent42.base.errors import ExitCode, UsageError
from cudadent42.base.folders import make_private, state_folder
from cudadent42.base.interpreter import module_command
from cudadent42.base.serialise import loads
from cudadent42.decisions.allowance import Allowance
from cudadent42.worker.processes import MARK, end_all

_MODULE = "cudadent42.agents.work"
_GRACE_S = 20.0
"""For a process that was interrupted to write what it measured."""
_MOST_BYTES = 64 << 20
"""Of one line of news."""
_LOG_LETTERS = 600
"""Of what a process printed last, where it ended without a word."""
_LOG_BYTES = 1 << 16
"""That are looked at for them."""

STAGES = ("preflight", "build", "verify", "bench", "compare", "audit", "report")
"""Of a race, in order; each counts the same in its progress."""

NOTES = 20
"""That are kept, the last ones."""


class State(str, Enum):
    RUNNING = "running"
    FINISHED = "finished"
    """It has an answer."""
    FAILED = "failed"
    """It has none, for the reason in ``error``."""
    STOPPED = "stopped"
    """It was ended before it was done: asked for, its minutes were over, or the server ended."""


@dataclass
class Job:
    """One process, and what is heard of it."""

    name: str
    allowance: Allowance
    usd_per_hour: float
    began_s: float = field(default_factory=time.monotonic)
    ended_s: float | None = None
    state: State = State.RUNNING
    stage: str = ""
    progress: float = 0.0
    """From 0 to 1; never less than before."""
    notes: list[str] = field(default_factory=list)
    folder: str = ""
    news: News | None = None
    """The last."""
    error: str = ""
    unreadable: str = ""
    """What was wrong with its news."""
    stop_reason: str = ""
    """Why it is being stopped, or was."""
    process: asyncio.subprocess.Process | None = None
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set at every change; who waits takes the one that there is."""

    @property
    def minutes(self) -> float:
        return ((self.ended_s or time.monotonic()) - self.began_s) / 60.0

    @property
    def usd(self) -> float:
        """That it cost until now."""
        return self.minutes / 60.0 * self.usd_per_hour

    @property
    def runs(self) -> bool:
        return self.state is State.RUNNING

    def hear(self, news: News) -> None:
        if news.stage is not None:
            self.stage = news.stage
        if news.fraction is not None and self.stage in STAGES:
            progress = (STAGES.index(self.stage) + news.fraction) / len(STAGES)
            self.progress = max(self.progress, min(progress, 1.0))
        if news.note is not None:
            self.notes = [*self.notes, news.note][-NOTES:]
        self.folder = news.folder or self.folder
        if news.is_last:
            self.news = news
        self.wake()

    def wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def until_changed(self) -> None:
        if self.runs:
            await self.changed.wait()

    async def until_done(self) -> None:
        while self.runs:
            await self.changed.wait()


class Desk:
    """All jobs of a server. An asynchronous context manager: when left, those that still run are stopped."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._numbers = itertools.count(1)
        self._watching: set[asyncio.Task[None]] = set()
        self._reserved_usd: list[float] = []
        self.jobs: dict[str, Job] = {}

    async def __aenter__(self) -> Desk:
        return self

    async def __aexit__(self, *_: object) -> None:
        for job in self.jobs.values():
            self.stop(job, "the server ended")
        if self._watching:
            await asyncio.wait(self._watching)

    @property
    def committed_usd(self) -> float:
        """What ended jobs cost, and what may cost those that run or are about to begin."""
        jobs_usd = sum(job.allowance.usd if job.runs else job.usd for job in self.jobs.values())
        return jobs_usd + sum(self._reserved_usd)

    @contextlib.contextmanager
    def reserved(self, usd: float) -> Iterator[None]:
        """Money for a job that is about to begin, committed meanwhile."""
        self._reserved_usd.append(usd)
        try:
            yield
        finally:
            self._reserved_usd.remove(usd)

    async def start(
        self, what: str, task: Task, device: str, allowance: Allowance, usd_per_hour: float
    ) -> Job:
        """Begin. Raises UsageError where the device is at work already."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(_held(device))
            job = Job(f"{what}-{next(self._numbers)}", allowance, usd_per_hour)
            log = stack.enter_context(tempfile.TemporaryFile())
            read, write = os.pipe()
            stack.callback(os.close, read)
            try:
                job.process = await asyncio.create_subprocess_exec(
                    *module_command(_MODULE),
                    *(str(write), str(os.getpid())),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    cwd=self._root,
                    env={**os.environ, MARK: job.mark},
                    pass_fds=(write,),
                    start_new_session=True,
                )
            finally:
                os.close(write)
            self.jobs[job.name] = job
            watching = asyncio.create_task(self._watch(job, task, os.dup(read), log, stack.pop_all()))
        self._watching.add(watching)
        watching.add_done_callback(self._watching.discard)
        return job

    def stop(self, job: Job, reason: str) -> None:
        """Ask it to end; it keeps what it measured. Does nothing where it has ended."""
        if job.process is not None and job.process.returncode is None and not job.stop_reason:
            job.stop_reason = reason
            with contextlib.suppress(ProcessLookupError):
                os.kill(job.process.pid, signal.SIGINT)
            asyncio.get_running_loop().call_later(_GRACE_S, _end, job)
            job.wake()

    async def _watch(
        self, job: Job, task: Task, read: int, log: IO[bytes], resources: contextlib.ExitStack
    ) -> None:
        """From the first word to the end of the process and all that it started."""
        assert job.process is not None
        assert job.process.stdin is not None
        limit = asyncio.get_running_loop().call_later(
            job.allowance.minutes * 60.0, self.stop, job, f"its {job.allowance.minutes:g} minutes are over"
        )
        with resources:
            try:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    job.process.stdin.write(tasks.to_line(task).encode())
                    await job.process.stdin.drain()
                async with contextlib.aclosing(_lines(read)) as lines:
                    async for line in lines:
                        job.hear(_news(line))
                await job.process.wait()
            except ValueError as error:
                job.unreadable, job.news = str(error), None
            finally:
                limit.cancel()
                _end(job)
                job.ended_s = time.monotonic()
                job.error = _why_no_answer(job, log)
                job.state = _state(job)
                job.progress = 1.0 if job.state is State.FINISHED else job.progress
                job.wake()
            await job.process.wait()


def _news(line: str) -> News:
    """Raises ValueError where it is none."""
    news = loads(News, line)
    if news.exit_code is not None:
        ExitCode(news.exit_code)
    return news


def _state(job: Job) -> State:
    if job.news is not None and job.news.error is None:
        return State.FINISHED
    return State.STOPPED if job.stop_reason and not job.unreadable else State.FAILED


def _why_no_answer(job: Job, log: IO[bytes]) -> str:
    if job.news is not None and job.news.error is None:
        return ""
    if job.unreadable:
        return f"its process wrote what is no news, and was ended; {quoted(job.unreadable)}"
    if job.stop_reason:
        return f"stopped: {job.stop_reason}"
    if job.news is not None:
        return job.news.error or ""
    log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_BYTES))
    said = " ".join(log.read(_LOG_BYTES).decode(errors="replace").split())[-_LOG_LETTERS:]
    assert job.process is not None
    printed = f"it printed last, {quoted(said)}" if said else "it printed nothing"
    return f"its process ended with {job.process.returncode} and no answer; {printed}"


def exit_code(job: Job) -> ExitCode:
    """How a command would have ended."""
    if job.news is not None and job.news.exit_code is not None:
        return ExitCode(job.news.exit_code)
    return ExitCode.INTERRUPTED if job.stop_reason else ExitCode.INTERNAL_ERROR


def _end(job: Job) -> None:
    """Kill what is left of it."""
    if job.process is not None and job.ended_s is None:
        end_all(job.process.pid, job.mark, runs=job.process.returncode is None)


async def _lines(read: int) -> AsyncGenerator[str, None]:
    """Of a pipe, to its end."""
    reader = asyncio.StreamReader(limit=_MOST_BYTES)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read, "rb")
    )
    try:
        while line := await reader.readline():
            yield line.decode()
    finally:
        transport.close()


_ONE_GPU = re.compile(r"cuda:(\d+)")


@contextlib.contextmanager
def _held(device: str) -> Iterator[None]:
    """The device, for one process of this user at a time, whichever server started it.

    GPUs that are named by number are independent of each other. All else needs the whole machine.
    """
    folder = make_private(state_folder())
    gpu = _ONE_GPU.fullmatch(device)
    wanted = [("machine", fcntl.LOCK_SH if gpu else fcntl.LOCK_EX)]
    if gpu:
        wanted.append((f"cuda-{gpu[1]}", fcntl.LOCK_EX))
    with contextlib.ExitStack() as stack:
        for name, kind in wanted:
            file = stack.enter_context((folder / f"agents-{name}.lock").open("a"))
            try:
                fcntl.flock(file, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(
                    f"{device} is at work for an agent already; wait for that to end (race_status), or stop it"
                ) from None
        yield

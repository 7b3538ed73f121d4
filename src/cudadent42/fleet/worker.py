"""A worker of a shared folder: it says who it is and does tasks until it is to end or nobody hands out any."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import random
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from cudadent42.base.errors import UsageError
from cudadent42.base.observer import Observer
from cudadent42.base.processor import cpu_name
from cudadent42.fleet.desk import HEARTBEAT_S
from cudadent42.fleet.perform import Performer, Racer
from cudadent42.fleet.queue import Queue
from cudadent42.fleet.task import PATIENCE_S, Returned, Task, Worker, plain_name
from cudadent42.model.records import MachineReport
from cudadent42.preflight.runner import chosen_device, gather, inspect
from cudadent42.preflight.text import troubles
from cudadent42.worker.parent import Worker as Process

_IDLE_S = (0.02, 0.5)

HUNG_EXIT = 75
"""Of a worker whose task took longer than its limit, or whose folder is gone."""


@dataclass(frozen=True)
class Identity:
    """What a worker is, and the machine under it."""

    worker: Worker
    machine: MachineReport


def identify(device: str, name: str, *, part: str = "", ignore_preflight: bool = False) -> Identity:
    """Look at this machine. ``part``: which of a CPU's invented devices this is."""
    context = gather(device, Path())
    device = chosen_device(context)
    machine = inspect(context)
    facts = machine.facts
    cuda = device != "cpu"
    label = device.replace(":", "-") + (f"-{part}" if part else "")
    gpu = context.gpu.gpus[context.gpu_index] if cuda and context.gpu_index < len(context.gpu.gpus) else None
    unit = gpu.uuid if gpu is not None and gpu.uuid else f"{platform.node()}/{label}"
    ready = machine.ready or ignore_preflight
    worker = Worker(
        name=plain_name(name or f"{platform.node()}-{label}-{os.getpid()}"),
        host=platform.node(),
        device=device,
        kind=str(facts.get("gpu_name") or "unknown GPU") if cuda else cpu_name(),
        unit=unit,
        tree=tree_digest(),
        driver=str(facts.get("driver_version") or "") if cuda else "",
        ready=ready,
        trouble="" if ready else "; ".join(troubles(machine)) or "preflight failed",
    )
    return Identity(worker, machine)


def process_age_s() -> float:
    """Since this process began; 0 where the system does not say."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(") ")[2].split()
        began_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return round(max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began_s), 3)
    except (OSError, AttributeError):  # not Linux
        return 0.0


def tree_digest() -> str:
    """SHA-256 of the sources of both packages, as they are imported here."""
    import cudadent42
    import flashmoe_science

    digest = hashlib.sha256()
    for package in (cudadent42, flashmoe_science):
        root = Path(package.__path__[0])
        for path in sorted(root.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(str(path.relative_to(root)).encode() + b"\0")
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


@contextmanager
def device_of_ones_own(unit: str) -> Iterator[None]:
    """Two workers of one device on this host wait for each other: one may be left over from a former coordinator.

    Raises UsageError where the folder of locks is another user's, who could let this worker wait for ever.
    """
    folder = Path(tempfile.gettempdir()) / f"cudadent42-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise UsageError(
            f"{folder} is not a folder that only you can write to; remove it, or set TMPDIR to a folder of your own"
        )
    with (folder / f"{hashlib.sha256(unit.encode()).hexdigest()[:16]}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def work(
    root: Path,
    queue: Queue,
    identity: Identity,
    observer: Observer,
    *,
    parent: int = 0,
    perform: Callable[[Task], Returned] | None = None,
    ahead: Process | None = None,
) -> int:
    """Do tasks until this worker is to end; how many.

    Args:
        parent: the process without which nobody would want them.
        ahead: what is to race, where it was started before the machine was looked at.
    """
    worker = identity.worker
    done = 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(device_of_ones_own(worker.unit))
        if perform is None:
            log = root / f"{worker.name}.log"
            racer = stack.enter_context(Racer(identity.machine, log, observer, ahead))
            perform = Performer(worker.name, worker.device, racer, identity.machine, root, observer).perform
        queue.enter(replace(worker, up_s=process_age_s()))
        stack.callback(queue.leave, worker.name)
        pulse = stack.enter_context(_Pulse(queue, worker))
        deserted = _Deserted(queue, parent)
        idle = pauses()
        while not queue.is_over(worker.name) and not deserted():
            task = queue.claim(worker.name) if queue.is_admitted(worker.name) else None
            if task is None:
                time.sleep(next(idle))
                continue
            idle = pauses()
            with pulse.limited(task.limit_s):
                returned = perform(task)
            queue.give_back(returned)
            done += 1
    return done


def pauses() -> Iterator[float]:
    """Between looks for a task, in seconds: brief after a task, since the next is on its way mostly, and longer from
    one to the next, as many workers may look into a folder of a network."""
    longest_s = _IDLE_S[0]
    while True:
        yield random.uniform(0.5, 1.0) * longest_s
        longest_s = min(2 * longest_s, _IDLE_S[1])


class _Deserted:
    """Whether nobody hands out tasks any more."""

    def __init__(self, queue: Queue, parent: int) -> None:
        self._queue = queue
        self._parent = parent
        self._seen = queue.coordinator_seen()
        self._since_s = time.monotonic()

    def __call__(self) -> bool:
        if self._parent and os.getppid() != self._parent:
            return True
        seen = self._queue.coordinator_seen()
        if seen != self._seen:
            self._seen, self._since_s = seen, time.monotonic()
        return time.monotonic() - self._since_s > PATIENCE_S


class _Pulse:
    """Signs of life from a thread. A context manager. Past a task's limit it ends the process, whatever hangs in it."""

    def __init__(self, queue: Queue, worker: Worker) -> None:
        self._queue = queue
        self._worker = worker
        self._until_s = float("inf")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> _Pulse:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @contextmanager
    def limited(self, limit_s: float) -> Iterator[None]:
        self._until_s = time.monotonic() + limit_s
        try:
            yield
        finally:
            self._until_s = float("inf")

    def _beat(self) -> None:
        while not self._over.wait(HEARTBEAT_S):
            if time.monotonic() > self._until_s:
                os._exit(HUNG_EXIT)
            try:
                self._queue.show(self._worker)
            except UsageError:  # the folder is gone, or its disk is full: nobody sees this worker any more
                os._exit(HUNG_EXIT)

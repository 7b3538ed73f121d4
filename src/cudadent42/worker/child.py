"""The worker's side of the process boundary:
``python -m cudadent42.worker.child EVENT_FD NOTE_FD PARENT [SOCKET_FD MODULE ARGUMENT]``, the last three of a branch.

Requests come as JSON lines on standard input, events go out on a pipe of their own, so that a candidate may
print what it likes. After each event the worker waits for an acknowledgement: the parent's handling
(decoding, drawing a progress bar) is then over before the next timed window opens, and takes no processor
time from it. The line is random: it seeds inputs that
nobody knew before. What runs now is noted in a file that outlives a crash (``Doing``).
"""

from __future__ import annotations

import importlib
import os
import queue
import secrets
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cudadent42.base.errors import LabError
from cudadent42.base.interpreter import add_folder
from cudadent42.base.seeds import derived_seed
from cudadent42.base.serialise import dumps, loads
from cudadent42.model.events import Event, PeaksMeasured, StageDone, StageFailed, to_line
from cudadent42.model.implementations import import_our_functions, is_ours
from cudadent42.model.records import Plan, Scope, VerifyReport
from cudadent42.timing.processor_time import Kin
from cudadent42.worker.branch import Trunk, branch_off
from cudadent42.worker.keeper import go_below_keeper
from cudadent42.worker.processes import end_with_parent

if TYPE_CHECKING:
    from cudadent42.integrity.watch import Watch

NOTE_BYTES = 4096

DEVICE_LOST_EXIT = 75
"""This process's GPU context is unusable (EX_TEMPFAIL: a new process may succeed)."""

ORPHANED_EXIT = 76


@dataclass(frozen=True)
class Request:
    stage: str
    """``build``, ``verify``, ``bench`` or ``peaks``."""
    plan: Plan
    start: int = 0
    """First unit (verify) or visit (bench)."""
    dropped: dict[str, str] = field(default_factory=dict)
    """What cost a worker when it was timed, ``Case.id/implementation``, or the whole case, with the reason."""
    measured: dict[str, int] = field(default_factory=dict)
    """Blocks of a case that are measured already, by ``Case.id``."""
    barred: dict[str, str] = field(default_factory=dict)
    """Implementations that are left out, with the reason."""
    verified: VerifyReport | None = None
    """For ``bench``."""
    scope: Scope = Scope.ALL
    """Of ``verify``."""
    started_s: float = 0.0
    """By ``time.monotonic``, which all processes of a machine share."""


class _Channel:
    def __init__(self, event_fd: int, note_fd: int) -> None:
        self._event_fd = event_fd
        self._note_fd = note_fd
        self._nonce = secrets.token_hex()
        self._asked = 0
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in sys.stdin:
            self._lines.put(line.rstrip("\n"))
        os._exit(ORPHANED_EXIT)  # the parent is gone, and the main thread may be deep inside a kernel

    def fresh_seed(self) -> int:
        """Of 63 bits, which this process could not know before its parent answered the last event."""
        self._asked += 1
        return derived_seed(0, self._nonce, self._asked)

    def next_line(self) -> str:
        return self._lines.get()

    def emit(self, event: Event) -> None:
        data = (to_line(event) + "\n").encode()
        while data:
            data = data[os.write(self._event_fd, data) :]
        self._nonce = self._lines.get()

    def note(self, doing: object) -> None:
        os.pwrite(self._note_fd, dumps(doing, indent=None).encode().ljust(NOTE_BYTES), 0)


def serve(channel: _Channel, kin: Kin) -> None:
    """Answers requests until the parent closes standard input."""
    with suppress(ImportError, OSError):  # the first request says so
        importlib.import_module("torch")  # while there is no request yet
    watch: Watch | None = None
    measured_s: float | None = None
    while True:
        request = loads(Request, channel.next_line())
        try:
            if watch is None:
                watch = _watch(request.plan, kin)
                add_folder()
            timed = _run(request, channel, watch, measured_s)
        except LabError as error:
            channel.emit(StageFailed(str(error), int(error.exit_code)))
        else:
            if timed:
                measured_s = time.monotonic()
            channel.emit(StageDone(request.stage))


def _watch(plan: Plan, kin: Kin) -> Watch:
    """Of this process, which has loaded nothing of a candidate yet, and all that measures."""
    from cudadent42.operations import definition

    definition(plan.operation).implementations()
    definition(plan.operation).numerics()
    kernels = any(map(is_ours, plan.implementations))
    if kernels:
        import_our_functions()
    importlib.import_module("cudadent42.stages.bench.measurement")
    importlib.import_module("cudadent42.stages.verify")
    from cudadent42.integrity.watch import Watch

    # On a GPU the lab itself calls the driver by way of the kernels' package.
    return Watch(kin, kernels=kernels or plan.device != "cpu" or bool(plan.versions))


def _run(request: Request, channel: _Channel, watch: Watch, measured_s: float | None) -> bool:
    """Whether anything was timed. `measured_s`: when this process last measured, by ``time.monotonic``."""
    from cudadent42.model.device import DeviceLostError
    from cudadent42.stages.bench.measurement import measure
    from cudadent42.stages.verify import verify
    from cudadent42.timing.flush import cache_bytes
    from cudadent42.timing.limits import cuda_limits
    from cudadent42.timing.peaks import measure_cuda_peaks

    try:
        if request.stage == "build":
            from cudadent42.versions.build import build_versions

            build_versions(request.plan, emit=channel.emit, mark=channel.note, barred=request.barred)
        elif request.stage == "verify":
            verify(
                request.plan,
                emit=channel.emit,
                start=request.start,
                barred=request.barred,
                mark=channel.note,
                watch=watch,
                scope=request.scope,
            )
        elif request.stage == "peaks":
            peaks = measure_cuda_peaks(request.plan.device)
            channel.emit(PeaksMeasured(peaks | cuda_limits(peaks, cache_bytes(request.plan.device))))
        else:
            report = measure(
                request.plan,
                request.verified or VerifyReport(()),
                emit=channel.emit,
                start=request.start,
                dropped=request.dropped,
                measured=request.measured,
                barred=request.barred,
                mark=channel.note,
                started_s=request.started_s,
                watch=watch,
                fresh_seed=channel.fresh_seed,
                last_measured_s=measured_s,
            )
            return bool(report.samples)
    except DeviceLostError as error:
        print(f"GPU context lost: {error}", file=sys.stderr, flush=True)
        os._exit(DEVICE_LOST_EXIT)  # an orderly exit would touch the broken context
    return False


if __name__ == "__main__":
    if len(sys.argv) > 4:
        branch_off(Trunk(*sys.argv[5:]), int(sys.argv[4]))  # ahead of any thread
    end_with_parent(int(sys.argv[3]), signal.SIGTERM)
    own_keeper = go_below_keeper()
    serve(_Channel(int(sys.argv[1]), int(sys.argv[2])), Kin(own_keeper))

"""The process that is profiled: ``python -m cudadent42.stages.profile.target REQUEST``, REQUEST a JSON file.

It prepares the inputs of one case and warms up. Then it does one of these: launches once between the marks that a
profiler heeds; measures by itself what can be known without counters; leaves out parts of the kernel; or repeats the
call under ``perf stat``.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from cudadent42.base.serialise import dumps, loads
from cudadent42.model.records import Plan
from cudadent42.profiles.records import Ablation, Launch
from cudadent42.stages.profile import perf

if TYPE_CHECKING:
    from collections.abc import Callable

    from cudadent42.model.cases import Case
    from cudadent42.model.implementations import Call
    from cudadent42.operations.interface import Inputs
    from cudadent42.timing.timers import Reading, Timer

WARM_UPS = 3
READINGS = 11
"""Of the latency, of which the median counts."""
FEWEST_READINGS = 5
"""Of which it may be the median, where others use the processors of a CPU."""
_TRACED_CALLS = 11
"""Of which the median of each kernel's time counts."""


class Task(str, Enum):
    LAUNCH = "launch"
    """One call between cudaProfilerStart and cudaProfilerStop."""
    MEASURE = "measure"
    """Times, the driver's trace, ceilings."""
    ABLATE = "ablate"
    """The kernel without parts of its work."""
    REPEAT = "repeat"
    """The call again and again for a second, counted by ``perf``."""


@dataclass(frozen=True)
class Request:
    task: Task
    plan: Plan
    case: str
    """``Case.id``, of the plan."""
    implementation: str
    output: Path
    """Where the answer goes."""
    control: Path | None = None
    """Folder with the pipes by which ``perf`` is told when to count."""


@dataclass(frozen=True)
class Answer:
    latency_ms: float
    calls: int = 0
    """For ``REPEAT``: how often it was called while counting was on."""
    device_name: str = ""
    architecture: str = ""
    multiprocessors: int = 0
    peaks: dict[str, float] | None = None
    launches: tuple[Launch, ...] = ()
    ablations: tuple[Ablation, ...] = ()
    notes: tuple[str, ...] = ()
    disturbed: str = ""
    """Why the latency is not known although the call runs."""


def serve(request: Request) -> Answer:
    """Do what is asked, in this process."""
    from cudadent42.model.device import synchronize, use_device
    from cudadent42.model.events import no_mark
    from cudadent42.operations import numerics
    from cudadent42.registry import load_all

    plan = request.plan
    use_device(plan.device)
    case = next(case for case in plan.cases if case.id == request.case)
    alone = replace(plan, implementations=(request.implementation,), baseline=request.implementation)
    usable, reasons = load_all(alone, {}, 0, no_mark)
    if request.implementation in reasons:
        raise SystemExit(reasons[request.implementation])
    implementation = usable[request.implementation]
    (inputs,) = numerics(case).input_sets(case, plan.seed, 1, plan.device)
    with implementation.context():
        call = implementation.prepare(case, inputs)
        for _ in range(WARM_UPS):
            call()
        synchronize(plan.device)
        if request.task is Task.LAUNCH:
            return _launch(call)
        if request.task is Task.REPEAT:
            return _repeat(call, request)
        if request.task is Task.ABLATE:
            return _ablate(case, inputs, plan)
        return _measure(call, request)


def _launch(call: Call) -> Answer:
    import torch

    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
    return Answer(latency_ms=math.nan)


def _repeat(call: Call, request: Request) -> Answer:
    calls = 0
    _tell_perf(request.control, "enable")
    start = time.perf_counter()
    while (elapsed := time.perf_counter() - start) < perf.REPEAT_S or calls == 0:
        call()
        calls += 1
    _tell_perf(request.control, "disable")
    return Answer(latency_ms=elapsed / calls * 1e3, calls=calls)


def _ablate(case: Case, inputs: Inputs, plan: Plan) -> Answer:
    from cudadent42.stages.profile.ablation import ablate

    ablations, why_not = ablate(case, inputs, _timer(plan), plan.seed)
    return Answer(latency_ms=math.nan, ablations=ablations, notes=(why_not,) if why_not else ())


def _tell_perf(control: Path | None, word: str) -> None:
    """Send ``perf`` a command and wait until it has been heard."""
    if control is None:
        return
    with (control / "control").open("w") as pipe:
        pipe.write(word + "\n")
    with (control / "ack").open() as pipe:
        pipe.readline()


def _timer(plan: Plan) -> Timer:
    """One for all times of calls, the one that runs use where nothing else is asked for."""
    from cudadent42.model.records import TimerKind
    from cudadent42.timing.choice import timer_for

    return timer_for(plan, TimerKind.CALL)


def _measure(call: Call, request: Request) -> Answer:
    import torch

    device = request.plan.device
    read = _timer(request.plan).calibrate([call])
    if not device.startswith("cuda"):
        return _measured_on_cpu(read)
    latency = statistics.median(read().latency_ms for _ in range(READINGS))
    from cudadent42.timing.peaks import measure_cuda_peaks
    from flashmoe_science.errors import DeviceError
    from flashmoe_science.jit.limits import device_architecture

    properties = torch.cuda.get_device_properties(device)
    notes: list[str] = []
    try:
        architecture = device_architecture(properties.major, properties.minor)
    except DeviceError:
        architecture = f"sm_{properties.major}{properties.minor}"
    launches = _trace(call)
    if not launches:
        notes.append("the driver's trace shows no kernel, so the launch's shape is not known")
    return Answer(
        latency_ms=latency,
        device_name=properties.name,
        architecture=architecture,
        multiprocessors=properties.multi_processor_count,
        peaks=measure_cuda_peaks(device),
        launches=launches,
        notes=tuple(notes),
    )


def _measured_on_cpu(read: Callable[[], Reading]) -> Answer:
    """Of readings that had the processors; what they do not show is no property of the kernel."""
    from cudadent42.timing.quiet import quiet_readings

    quiet = quiet_readings(read, READINGS)
    if len(quiet.readings) < FEWEST_READINGS:
        return Answer(latency_ms=math.nan, peaks=_cpu_peaks(), disturbed=quiet.reason())
    latency = statistics.median(reading.latency_ms for reading in quiet.readings)
    return Answer(latency_ms=latency, peaks=_cpu_peaks())


def _cpu_peaks() -> dict[str, float]:
    from cudadent42.timing.cpu_peaks import measure_cpu_peaks
    from flashmoe_science.errors import BuildError, DeviceError

    try:
        return measure_cpu_peaks()
    except (BuildError, DeviceError):
        return {}


def _trace(call: Call) -> tuple[Launch, ...]:
    """The kernels of one call with their times and shapes, by the driver's activity trace; it needs no counters."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(_TRACED_CALLS):
            call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        profiler.export_chrome_trace(path)
        events = json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"]
    return one_call(events, _TRACED_CALLS)


def one_call(events: list[dict[str, object]], calls: int) -> tuple[Launch, ...]:
    """The launches of one of several equal calls, from the events of a trace: shapes are the last call's, times the
    medians over all of them."""
    kernels = sorted(
        (event for event in events if event.get("cat") == "kernel"), key=lambda event: float(str(event["ts"]))
    )
    per_call = len(kernels) // calls
    last = [_launched(event) for event in kernels[len(kernels) - per_call :]]
    first = len(kernels) - per_call * calls
    return tuple(
        replace(
            launch,
            duration_s=statistics.median(_duration_s(event) for event in kernels[first + i :: per_call]),
        )
        for i, launch in enumerate(last)
    )


def _duration_s(event: dict[str, object]) -> float:
    return float(str(event["dur"])) * 1e-6


def _launched(event: dict[str, object]) -> Launch:
    arguments = event["args"]
    assert isinstance(arguments, dict)
    grid, block = arguments.get("grid", (0, 0, 0)), arguments.get("block", (0, 0, 0))
    return Launch(
        kernel=str(event["name"]),
        duration_s=_duration_s(event),
        grid_blocks=grid[0] * grid[1] * grid[2],
        block_threads=block[0] * block[1] * block[2],
        registers=int(arguments.get("registers per thread", 0)),
        shared_bytes=int(arguments.get("shared memory", 0)),
    )


def main(path: Path) -> None:
    request = loads(Request, path.read_text(encoding="utf-8"))
    answer = serve(request)
    request.output.write_text(dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

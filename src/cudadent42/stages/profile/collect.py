"""Taking a profile: the target process with and without the profiler, put together."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cudadent42.base.errors import LabError, MachineNotReadyError
from cudadent42.base.observer import Observer
from cudadent42.base.serialise import dumps, loads
from cudadent42.model.cases import Case
from cudadent42.model.implementations import OURS, is_kernel_file
from cudadent42.model.records import BuildReport, CacheState, Plan
from cudadent42.preflight import ncu_install
from cudadent42.profiles.metrics import Counters, read_counters
from cudadent42.profiles.quantities import with_quantities
from cudadent42.profiles.records import SCHEMA_VERSION, Profile, Source
from cudadent42.runs.source import revision
from cudadent42.stages.profile import child, ncu, perf
from cudadent42.stages.profile.builds import profiled_build, with_build
from cudadent42.stages.profile.target import Answer, Request, Task

TIMEOUT_S = 300.0
"""For a target by itself."""

PROFILER_TIMEOUT_S = 300.0
"""For a target under a profiler, which runs the kernel some twenty times, or a hundred."""

REPORT = "profile.ncu-rep"
NCU_LOG = "ncu.log"


@dataclass(frozen=True)
class Wish:
    """What to profile, and how far to go."""

    plan: Plan
    case: Case
    """Of the plan."""
    implementation: str
    full: bool = False
    """All of Nsight Compute's sections, not only what the rules read."""
    counters: bool = True
    kernel: str = ""
    """Regular expression of the kernels to look at; all of the call's where empty."""
    ablate: bool | None = None
    """Also time the kernel without parts of its work; None: on a GPU, where there are no counters. (On a CPU each part
    takes a compiler some 10 s at first use.)"""
    variables: Mapping[str, str | None] = field(default_factory=dict)
    """Environment variables that the target has in place of this process's; None for one that it has not."""


def collect(wish: Wish, folder: Path, built: BuildReport | None, observer: Observer) -> Profile:
    """Profile one call. Nsight Compute's report and log stay in ``folder``.

    What cannot be had is said in the profile's notes. Raises LabError where not even the call runs.
    """
    observer.advance(0.1, "times and ceilings")
    answer = _ask(Task.MEASURE, wish)
    profile = _base(wish, answer)
    if wish.plan.device.startswith("cuda"):
        observer.advance(0.5, "counters")
        profile = _with_counters(profile, wish, folder)
        if wish.kernel and profile.source is Source.MODEL and len(profile.launches) > 1:
            profile = _noted(profile, "without counters the longest kernel is judged, whatever --kernel says")
        if wish.ablate or (wish.ablate is None and profile.source is Source.MODEL):
            observer.advance(0.8, "the kernel without parts of its work")
            profile = _with_ablations(profile, wish)
        return with_quantities(_with_build(profile, wish, built))
    observer.advance(0.5, "instructions and cache misses")
    profile = _with_perf(profile, wish)
    if wish.ablate:
        observer.advance(0.8, "the kernel without parts of its work")
        profile = _with_ablations(profile, wish)
    return with_quantities(profile)


def _base(wish: Wish, answer: Answer) -> Profile:
    case = wish.case
    main = max(answer.launches, key=lambda launch: launch.duration_s, default=None)
    source = revision()
    return Profile(
        schema_version=SCHEMA_VERSION,
        case=case.id,
        implementation=wish.implementation,
        device=wish.plan.device,
        device_name=answer.device_name,
        architecture=answer.architecture,
        kernel=main.kernel if main is not None else "",
        source=Source.MODEL,
        flops=float(case.flops),
        bytes_min=float(case.bytes_min),
        dtype=case.dtype,
        latency_ms=answer.latency_ms,
        metrics={"multiprocessors": float(answer.multiprocessors)} if answer.multiprocessors else {},
        peaks=answer.peaks or {},
        launches=answer.launches,
        notes=answer.notes,
        missing={"roof_share": answer.disturbed} if answer.disturbed else {},
        revision=source.short if source is not None else "",
    )


# ---------------------------------------------------------------- the target process


def target_command(request: Path) -> list[str]:
    return [sys.executable, "-m", "cudadent42.stages.profile.target", str(request)]


def target_environment(variables: Mapping[str, str | None]) -> dict[str, str]:
    """This process's with the variables of a wish, and with the package that is running found first."""
    root = str(Path(__file__).resolve().parents[3])
    paths = [root, os.environ.get("PYTHONPATH", "")]
    wanted: dict[str, str | None] = {**os.environ, **variables}
    wanted["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return {name: value for name, value in wanted.items() if value is not None}


def _ask(task: Task, wish: Wish) -> Answer:
    """What a target says by itself."""
    with tempfile.TemporaryDirectory(prefix="cudadent42-profile-") as name:
        folder = Path(name)
        request = _write_request(task, wish, folder)
        try:
            environment = target_environment(wish.variables)
            done = child.run(target_command(request), timeout_s=TIMEOUT_S, environment=environment)
        except subprocess.TimeoutExpired as error:
            raise LabError(
                f"{wish.implementation} on {wish.case.id} was still running after {TIMEOUT_S:.0f} s; "
                "take a smaller case"
            ) from error
        return _read_answer(folder, wish, done)


def _write_request(task: Task, wish: Wish, folder: Path, control: Path | None = None) -> Path:
    request = Request(
        task,
        wish.plan,
        wish.case.id,
        wish.implementation,
        folder / "answer.json",
        control=control,
    )
    path = folder / "request.json"
    path.write_text(dumps(request), encoding="utf-8")
    return path


def _read_answer(folder: Path, wish: Wish, done: subprocess.CompletedProcess[bytes]) -> Answer:
    path = folder / "answer.json"
    if done.returncode != 0 or not path.is_file():
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        why = lines[-1].strip()[:300] if lines else f"exit code {done.returncode}"
        raise MachineNotReadyError(f"{wish.implementation} does not run on {wish.case.id}: {why}")
    return loads(Answer, path.read_text(encoding="utf-8"))


# ---------------------------------------------------------------- counters of the GPU


def _with_counters(profile: Profile, wish: Wish, folder: Path) -> Profile:
    """The profile with counters, or with a note that says why there are none."""
    if not wish.counters:
        return _noted(profile, "the counters were not asked for")
    path = ncu_install.find()
    if path is None:
        return _noted(
            profile,
            "Nsight Compute (ncu) is not installed, so there are no counters; "
            "it comes with the CUDA toolkit, or alone: sudo apt-get install cuda-nsight-compute-13-0",
        )
    tool = ncu_install.tool(path)
    if tool.version and tool.version[:2] < ncu_install.MIN_VERSION:
        profile = _noted(profile, f"Nsight Compute {tool.version_text} is old; some metrics may be missing")
    report, log = folder / REPORT, folder / NCU_LOG
    with tempfile.TemporaryDirectory(prefix="cudadent42-profile-") as name:
        request = _write_request(Task.LAUNCH, wish, Path(name))
        arguments = ncu.command(
            path,
            report,
            target_command(request),
            full=wish.full,
            cold=wish.plan.cache is CacheState.COLD,
            kernel=wish.kernel,
        )
        try:
            ncu.run(
                arguments,
                report,
                timeout_s=PROFILER_TIMEOUT_S,
                log=log,
                kernel=wish.kernel,
                environment=target_environment(wish.variables),
            )
            launches = [read_counters(one.kernel, one.metrics) for one in ncu.read(path, report)]
        except LabError as error:
            return _noted(profile, f"no counters: {error}")
    if not launches:
        return _noted(profile, "no counters: the report holds no kernel")
    main = max(launches, key=lambda one: one.values.get("time_s", 0.0))
    if not any(name.endswith("_share") for name in main.values):
        reason = next(iter(main.missing.values()))
        return _noted(
            profile,
            f"no counters: Nsight Compute {tool.version_text} gave no number for any unit of this GPU ({reason}); "
            "try the version that came with the driver's CUDA",
        )
    if len(launches) > 1:
        profile = _noted(profile, _of_several(launches, main, wish.kernel))
    return replace(
        profile,
        source=Source.COUNTERS,
        kernel=main.kernel,
        metrics={**profile.metrics, **main.values},
        missing=main.missing,
        report=report.name,
        tool=f"Nsight Compute {tool.version_text}",
    )


def _of_several(launches: Sequence[Counters], main: Counters, pattern: str) -> str:
    """Which part of the counted kernels the judged one is, and what was not counted."""
    share = main.values.get("time_s", math.nan) / sum(one.values.get("time_s", 0.0) for one in launches)
    takes = "takes an unknown share" if math.isnan(share) else f"takes {share:.0%}"
    which = f" whose names fit {pattern!r}" if pattern else ""
    if len(launches) >= ncu.MAX_LAUNCHES:
        return (
            f"of the call's kernels{which} only the first {len(launches)} were counted; this one {takes} of their "
            "time, and a later one may take longer: choose it by --kernel"
        )
    return f"the call launches {len(launches)} kernels{which}; this one {takes} of their time"


def _noted(profile: Profile, note: str) -> Profile:
    return replace(profile, notes=(*profile.notes, note))


def _with_ablations(profile: Profile, wish: Wish) -> Profile:
    if wish.implementation != OURS:
        note = f"parts can be left out of the kernel that {OURS} takes, not of {wish.implementation}: profile {OURS}"
        return _noted(profile, note) if wish.ablate else profile
    answer = _ask(Task.ABLATE, wish)
    return replace(profile, ablations=answer.ablations, notes=(*profile.notes, *answer.notes))


def _with_build(profile: Profile, wish: Wish, built: BuildReport | None) -> Profile:
    """The resource table and instructions of the profiled kernel, if this project compiled it."""
    from flashmoe_science.cuda.device import Device
    from flashmoe_science.errors import DeviceError
    from flashmoe_science.jit.nvrtc import nvrtc_version

    ours = wish.implementation == OURS
    if built is None or not (ours or is_kernel_file(wish.implementation)):
        return profile
    multiprocessors = int(profile.metrics.get("multiprocessors", 0))
    try:
        device = Device(0, profile.architecture, multiprocessors, 0, nvrtc_version())
    except DeviceError as error:
        return _noted(profile, f"the compiled kernel is not looked into: {error}")
    build, why_not = profiled_build(built.kernels, profile, wish.case, device if ours else None)
    if build is None:
        return _noted(profile, f"the compiled kernel is not looked into: {why_not}")
    return with_build(profile, build)


# ---------------------------------------------------------------- counters of a CPU


def _with_perf(profile: Profile, wish: Wish) -> Profile:
    reason = "the counters were not asked for" if not wish.counters else perf.unavailable()
    if reason is not None:
        return _noted(profile, f"instructions and cache misses are not counted: {reason}")
    with tempfile.TemporaryDirectory(prefix="cudadent42-profile-") as name:
        folder = Path(name)
        request = _write_request(Task.REPEAT, wish, folder, control=folder)
        environment = target_environment(wish.variables)
        counted = perf.count(target_command(request), folder, environment, TIMEOUT_S)
        answer = folder / "answer.json"
        calls = loads(Answer, answer.read_text(encoding="utf-8")).calls if answer.is_file() else 0
    missing = {f"cpu_{name}": reason for name, reason in counted.missing.items()}
    for reason in dict.fromkeys(counted.missing.values()):
        profile = _noted(profile, f"instructions and cache misses are not all counted: {reason}")
    metrics = perf.metrics(counted, calls, profile.bytes_min)
    return replace(profile, metrics={**profile.metrics, **metrics}, missing={**profile.missing, **missing})

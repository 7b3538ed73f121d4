"""From a space and the options of the command line to what a tuning is about."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from cudadent42.base.errors import MachineNotReadyError, UsageError
from cudadent42.base.files import read_record
from cudadent42.base.observer import Observer
from cudadent42.base.paths import real_path
from cudadent42.base.processor import cpu_name
from cudadent42.base.toml import did_you_mean
from cudadent42.decisions.racing import Rules
from cudadent42.flows import pipeline
from cudadent42.flows.pipeline import Prepared
from cudadent42.model.implementations import OURS, split_variant
from cudadent42.model.records import MachineReport, Plan, TimerKind
from cudadent42.native import specification
from cudadent42.native.tuned import sources_digest, table_name
from cudadent42.operations import definition
from cudadent42.plan import Choices, RunOptions, make_plan
from cudadent42.preflight.runner import chosen_device, gather, inspect
from cudadent42.preflight.text import troubles
from cudadent42.registry import registry
from cudadent42.tune import space as spaces
from cudadent42.tune.arms import implementations, materialise, variant
from cudadent42.tune.journal import FILES, SCHEMA_VERSION, Device, Setup, read_setup
from cudadent42.tune.prune import CompiledArm, Target, compile_arm
from cudadent42.tune.space import DEFAULT, Arm, Space, range_fields
from cudadent42.tune.strategy import Strategy, begins_with, choose
from cudadent42.tune.wanted import Wanted
from cudadent42.version import __version__
from flashmoe_science.jit.requirements import install_command

ROOT = Path("tunings")


@dataclass(frozen=True, kw_only=True)
class Request:
    """All that is asked of a tuning."""

    space: Path
    choices: Choices
    device: str = "auto"
    folder: Path | None = None
    """None for one under ``tunings/``."""
    margin: float | None = None
    rungs: tuple[int, ...] = ()
    """Empty: as `Rules`."""
    ignore_preflight: bool = False
    wanted: Wanted = Wanted.AUTO
    """Whether every configuration is raced."""
    budget_s: float | None = None
    """That decides on it too."""


@dataclass(frozen=True)
class Opened:
    """A tuning that can go on."""

    folder: Path
    setup: Setup
    machine: MachineReport


def _space(request: Request, observer: Observer) -> Space:
    space = spaces.load(real_path(request.space))
    for sentence in spaces.unnamed(space):
        observer.note(sentence)
    return space


def folder_of(request: Request, space: Space) -> Path:
    return request.folder or ROOT / f"{space.name}-{Path(request.choices.suite).stem}"


def open_tuning(request: Request, observer: Observer) -> Opened:
    """What the request is about on this machine, which is looked at first. Raises LabError.

    A tuning that is there already keeps its timer: what suits a machine that is busy now is no reason not to go on.
    """
    space = _space(request, observer)
    folder = folder_of(request, space)
    options = RunOptions(
        choices=replace(request.choices, implementations=(_default(space),)),
        device=request.device,
        ignore_preflight=request.ignore_preflight,
    )
    prepared = pipeline.prepare(options, observer)
    begun = read_record(Setup, folder / FILES.setup, SCHEMA_VERSION) if folder.is_dir() else None
    if begun is not None and request.choices.timer is None:
        prepared = replace(prepared, plan=replace(prepared.plan, timer=begun.plan.timer))
    else:
        prepared = pipeline.with_timer(prepared, options, observer)
    if space.of_library and prepared.plan.timer is TimerKind.CALL:
        observer.note("a variant's call takes a little longer on the host; --timer graph times the GPU alone")
    if begun is not None and request.wanted is Wanted.AUTO:  # another budget is no reason not to go on either
        strategy = Strategy(begun.search, "as it was begun")
    else:
        strategy = choose(space, len(prepared.plan.cases), request.wanted, request.budget_s)
    if strategy.search is not None:
        observer.note(f"a search proposes configurations, {strategy.why}")
    elif strategy.instead:
        observer.note(
            f"every configuration is raced, {strategy.why}; {install_command('search')} installs it"
        )
    setup = _setup(request, space, folder, prepared, strategy)
    return Opened(folder, setup, prepared.machine)


def reopen(folder: Path, observer: Observer, *, ignore_preflight: bool = False) -> Opened:
    """A tuning that was begun, as it was asked for then. Raises UsageError where its space or kernel changed since, or
    this machine has another device."""
    setup = read_setup(folder)
    space = spaces.load(Path(setup.space))
    if (space.digest, _kernel(space, setup.plan)[1]) != (setup.space_digest, setup.kernel_digest):
        raise UsageError(
            f"{folder}: the space or the kernel changed since it was begun, and what was measured is of the former; "
            "begin another with --output-dir"
        )
    observer.stage("preflight")
    machine = inspect(gather(setup.plan.device, folder))
    for line in troubles(machine):
        observer.note(line)
    if not machine.ready and not ignore_preflight:
        raise MachineNotReadyError(
            "this machine is not ready, for the reasons above; --ignore-preflight goes on regardless"
        )
    here = _device(setup.plan.device, machine)
    if here != setup.device:
        raise UsageError(
            f"{folder} is of {_named(setup.device)}, and this machine has {_named(here)}; go on there, or begin "
            "another with --output-dir"
        )
    return Opened(folder, setup, machine)


def _setup(request: Request, space: Space, folder: Path, prepared: Prepared, strategy: Strategy) -> Setup:
    plan = _of_default(prepared.plan, _default(space))
    if request.margin is not None:
        plan = replace(plan, margin=request.margin)
    _check_regions(space, plan)
    arms = begins_with(space, strategy)
    kernel, digest = _kernel(space, plan)
    rules = Rules(margin=plan.margin)
    if request.rungs:
        rules = replace(rules, rungs=request.rungs)
    return Setup(
        schema_version=SCHEMA_VERSION,
        version=__version__,
        space=str(space.path),
        space_digest=space.digest,
        kernel=kernel,
        kernel_digest=digest,
        arms=implementations(space, arms, real_path(folder)),
        settings={arm.name: dict(arm.settings) for arm in arms if arm.name != DEFAULT},
        regions=space.regions,
        plan=plan,
        rules=rules,
        target=_target(plan.device),
        device=_device(plan.device, prepared.machine),
        search=strategy.search,
    )


def _device(device: str, machine: MachineReport) -> Device:
    """What this machine has for ``cpu`` or ``cuda:N``."""
    if device == "cpu":
        return Device(cpu_name())
    facts = machine.facts
    return Device(str(facts.get("gpu_name") or "unknown GPU"), int(facts.get("gpu_multiprocessors") or 0))


def _named(device: Device) -> str:
    parts = f" with {device.multiprocessors} multiprocessors" if device.multiprocessors else ""
    return f"{device.name}{parts}"


def _default(space: Space) -> str:
    """The implementation of the default."""
    return variant(space, Arm(DEFAULT, {})) if space.of_library else space.kernel


def _of_default(plan: Plan, default: str) -> Plan:
    return replace(plan, baseline=default, implementations=(default,), precision=None, budget_s=None)


def _check_regions(space: Space, plan: Plan) -> None:
    ranges = range_fields(plan.operation)
    for name in space.regions:
        if name not in ranges:
            raise UsageError(
                f"{space.path}: regions has {name!r}; expected some of {', '.join(ranges)}{did_you_mean(name, ranges)}"
            )


def _kernel(space: Space, plan: Plan) -> tuple[str, str]:
    """As tables name it, and the digest of its sources."""
    if not space.of_library:
        kernel = specification.load(Path(space.kernel))
        return table_name(kernel), sources_digest(kernel)
    named = split_variant(space.kernel)[1]
    tuned = definition(plan.operation).tuned()
    if tuned is None:
        raise UsageError(f"{space.path}: the library's kernels of {plan.operation} cannot be tuned")
    names = tuned.names()
    full = f"{plan.operation}.{named}"
    if full not in names:
        raise UsageError(
            f"{space.path}: {space.kernel} is no kernel of {plan.operation} that can be tuned; expected one of "
            f"{', '.join(f'{OURS}[{kind.value}]' for kind in names.values())}"
        )
    return full, tuned.digest(full)


def _target(device: str) -> Target:
    if device == "cpu":
        return Target("cpu")
    from cudadent42.model.device import require_cuda
    from flashmoe_science.cuda.device import device_of

    require_cuda(device)
    return Target("cuda", device_of(int(device.partition(":")[2] or 0)).architecture)


# ---------------------------------------------------------------- without a tuning, and without the machine


@dataclass(frozen=True)
class Outlook:
    """What a tuning would do."""

    arms: int
    """That are raced, the default among them; of a search, the default alone."""
    cases: tuple[str, ...]
    compiled: tuple[CompiledArm, ...]
    most: int
    """That a search proposes; 0 where every configuration is raced."""
    why: str


def preview(request: Request, gpu: str, folder: Path, observer: Observer) -> Outlook:
    """Compile every arm, for a GPU that need not be here where ``gpu`` names one. Nothing is run or kept but arms in
    ``folder``."""
    space = _space(request, observer)
    device = "cuda:0" if gpu else chosen_device(gather(request.device, folder))
    choices = replace(request.choices, implementations=(_default(space),))
    plan = _of_default(make_plan(choices, device, registry), _default(space))
    _check_regions(space, plan)
    strategy = choose(space, len(plan.cases), request.wanted, request.budget_s)
    arms = begins_with(space, strategy)
    names = materialise(space, arms, real_path(folder))
    target = named_gpu(gpu) if gpu else _target(device)
    observer.stage("compile")
    compiled = []
    pool = ThreadPoolExecutor(max_workers=os.cpu_count())
    try:
        results = pool.map(lambda arm: compile_arm(space, arm, names[arm.name], plan.cases, target), arms)
        for number, result in enumerate(results, 1):
            compiled.append(result)
            observer.advance(number / len(arms), result.arm)
    finally:
        pool.shutdown(cancel_futures=True)
    cases = tuple(case.id for case in plan.cases)
    most = strategy.search.round * strategy.search.rounds if strategy.search is not None else 0
    return Outlook(len(arms), cases, tuple(compiled), most, strategy.why)


def named_gpu(name: str) -> Target:
    """A GPU that need not be here. Raises UsageError for a name that is not in the library's list."""
    from flashmoe_science.cuda.device import GPUS

    by_name = {each.upper(): each for each in GPUS}
    if name.upper() not in by_name:
        raise UsageError(f"--gpu {name!r}: expected one of {', '.join(GPUS)}")
    full = by_name[name.upper()]
    return Target("cuda", GPUS[full].architecture, full)

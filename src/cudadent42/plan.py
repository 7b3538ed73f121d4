"""From a suite and the options of the command line to a plan: exactly what a run will do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from cudadent42.base.errors import UsageError
from cudadent42.base.paths import real_path
from cudadent42.base.toml import did_you_mean
from cudadent42.decisions.gates import GateFile
from cudadent42.decisions.margin import default_margin
from cudadent42.model.cases import Case
from cudadent42.model.implementations import (
    OUR_PACKAGE,
    Implementation,
    is_kernel_file,
    is_ours,
    is_plug_in,
    named,
    plug_in_file,
)
from cudadent42.model.records import CacheState, Plan, TimerKind, Version
from cudadent42.model.sandbox import Protection
from cudadent42.native import specification
from cudadent42.suites.loader import MAX_REPEATS, MAX_WARMUP, Suite, load_suite, parse_dtype

T = TypeVar("T")


@dataclass(frozen=True)
class Choices:
    """What the command line asks for; None and empty mean what the suite says."""

    suite: str = "default"
    dtypes: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    """``Case.name`` (in every dtype) or ``Case.id``."""
    implementations: tuple[str, ...] = ()
    """The baseline is added where it is left out."""
    repeats: int | None = None
    warmup: int | None = None
    seed: int = 0
    timer: TimerKind | None = None
    cache: CacheState | None = None
    precision: float | None = None
    budget_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """All that is asked of a run, here or on another machine. Made once, from the command line, and handed on whole."""

    choices: Choices = Choices()
    device: str = "auto"
    """``auto``, ``cpu``, ``cuda`` or ``cuda:N``."""
    ignore_preflight: bool = False
    versions: Mapping[str, Version] = field(default_factory=dict)
    """Raced in the place of the suite's implementations, the first as the baseline."""
    gate: GateFile | None = None
    """What the run is held against when it is over."""
    output: Path | None = None
    """Folder of the run; None for one under ``runs/``."""
    save_samples: bool = True
    with_report: bool = True
    sealed: bool = False
    """Audit everything, whatever the result (docs/defences.md)."""
    untrusted: bool = False
    """Confine candidates to a sandbox (docs/defences.md)."""
    accepted_missing: tuple[Protection, ...] = ()
    """What the sandbox may do without."""
    audits: bool = True
    """Audit what is called faster. Without, there is no claim."""
    plug_ins_below: Path | None = None
    """The folder that files of plug-ins have to lie in, links followed, a suite's too; None for any."""
    command: tuple[str, ...] = ()
    """The command line that asked for it, for the manifest."""


PRECISION_GROWTH = 16
"""How many times the suite's blocks may be taken for a precision: it quarters the interval."""

MAX_PRECISION = 0.5
MIN_PRECISION = 1e-4
MAX_BUDGET_S = 86_400.0


def make_plan(choices: Choices, device: str, registry: Callable[[str], Mapping[str, Implementation]]) -> Plan:
    """The plan for ``device``; ``registry`` has an operation's implementations by name.

    Raises UsageError, naming the option, where a choice does not exist.
    """
    suite = load_suite(choices.suite)
    described = f"the suite {suite.name}"
    if device == "cpu" and suite.cpu_suite is not None:
        described = f"the suite {suite.cpu_suite}, which on CPU takes the place of {suite.name},"
        suite = load_suite(suite.cpu_suite)
    dtypes = _unique(parse_dtype(text, "--dtype") for text in choices.dtypes) or suite.dtypes
    cases = tuple(
        make_case(shape, dtype.value)
        for dtype in dtypes
        for shape in suite.shapes
        if suite.own_dtypes.get(shape.name, dtype.value) == dtype.value
    )
    if not cases:
        raise UsageError(
            f"--dtype: no case of {described} is in {', '.join(dtype.value for dtype in dtypes)}"
        )
    return Plan(
        suite=suite.name,
        device=device,
        cases=_select(cases, choices.cases, described),
        baseline=suite.baseline,
        implementations=_implementations(suite, choices.implementations, registry(suite.operation)),
        repeats=_in_range("--repeats", choices.repeats, 1, MAX_REPEATS, _blocks(suite, choices)),
        warmup=_in_range("--warmup", choices.warmup, 0, MAX_WARMUP, suite.warmup),
        seed=_in_range("--seed", choices.seed, 0, 2**32 - 1, 0),
        margin=default_margin(device) if suite.margin is None else suite.margin,
        timer=choices.timer or suite.timer,
        cache=choices.cache or suite.cache,
        precision=_between("--precision", choices.precision, MIN_PRECISION, MAX_PRECISION),
        budget_s=_between("--budget", choices.budget_s, 1.0, MAX_BUDGET_S),
        script=suite.script,
    )


def for_versions(plan: Plan, versions: Mapping[str, Version]) -> Plan:
    """The plan with these in the place of its implementations, the first as the baseline."""
    names = tuple(versions)
    return replace(plan, baseline=names[0], implementations=names, versions=dict(versions))


def calls_our_kernels(plan: Plan) -> bool:
    """Whether this project's kernels are among the implementations, or a plug-in's file speaks of them. By that nothing
    is decided but what is imported early."""
    files = [plug_in_file(name) for name in plan.implementations if is_plug_in(name)]
    return any(map(is_ours, plan.implementations)) or any(
        OUR_PACKAGE.encode() in file.read_bytes() for file in files
    )


def check_below(implementations: Iterable[str], root: Path) -> None:
    """Raises UsageError where a plug-in's file, or the source that it compiles, is not below ``root``."""
    for name in filter(is_plug_in, implementations):
        file = plug_in_file(name)
        files = [file, specification.load(file).source] if is_kernel_file(name) else [file]
        for each in files:
            if not real_path(each).is_relative_to(real_path(root)):
                raise UsageError(
                    f"{each}, of the implementation {name!r}, is outside of the project {root}; name files below it"
                )


def make_case(shape: Case, dtype: str) -> Case:
    """A suite's case in a dtype."""
    return replace(shape, dtype=dtype)


def _select(cases: Sequence[Case], wanted: Sequence[str], suite: str) -> tuple[Case, ...]:
    for name in wanted:
        if not any(name in (case.name, case.id) for case in cases):
            names = list(dict.fromkeys(case.name for case in cases))
            near = did_you_mean(name, names + [case.id for case in cases])
            raise UsageError(f"--case: unknown case {name!r}; {suite} has {', '.join(names)}{near}")
    if not wanted:
        return tuple(cases)
    return tuple(case for case in cases if case.name in wanted or case.id in wanted)


def _implementations(
    suite: Suite, wanted: Sequence[str], available: Mapping[str, Implementation]
) -> tuple[str, ...]:
    names = _unique((suite.baseline, *(wanted or suite.implementations)))
    for name in names:
        if is_kernel_file(name):
            specification.load(plug_in_file(name))
        elif is_plug_in(name):
            plug_in_file(name)
        elif named(name, available) is None:
            raise UsageError(
                f"--implementation: unknown implementation {name!r}; "
                f"expected one of {', '.join(sorted(available))}{did_you_mean(name, available)}"
            )
    if len(names) < 2:
        raise UsageError(f"--implementation: nothing to compare with {suite.baseline!r}; name one more")
    return names


def _blocks(suite: Suite, choices: Choices) -> int:
    """The suite's; with a precision to reach, room for more."""
    return suite.repeats if choices.precision is None else PRECISION_GROWTH * suite.repeats


def _unique(items: Iterable[T]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(items))


def _between(option: str, value: float | None, low: float, high: float) -> float | None:
    if value is not None and not low <= value <= high:
        raise UsageError(f"{option} {value:g}: expected a number from {low:g} to {high:g}")
    return value


def _in_range(option: str, value: int | None, low: int, high: int, default: int) -> int:
    if value is None:
        return default
    if not low <= value <= high:
        raise UsageError(f"{option} {value}: expected a whole number from {low} to {high}")
    return value

"""``cudadent42 profile``: preflight, build and profile of one case, in a run folder of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from cudadent42.base.errors import UsageError
from cudadent42.base.observer import Observer
from cudadent42.flows import pipeline
from cudadent42.model.records import Plan
from cudadent42.plan import RunOptions
from cudadent42.profiles import store
from cudadent42.profiles.diagnosis import diagnose
from cudadent42.profiles.records import Diagnosis
from cudadent42.runs.run_folder import RunWriter, create_default_folder
from cudadent42.runs.source import revision
from cudadent42.stages import report
from cudadent42.stages.build import build_for
from cudadent42.stages.profile.collect import Wish, collect


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """All that is asked of a profile."""

    run: RunOptions
    """Its case is the one to profile."""
    implementation: str
    full: bool = False
    """All of Nsight Compute's sections."""
    counters: bool = True
    ablate: bool | None = None
    """None: on a GPU without counters."""
    kernel: str = ""
    """Of a call with several kernels, those with a name that matches this regular expression."""


@dataclass(frozen=True)
class Outcome:
    folder: Path
    diagnosis: Diagnosis


def run(options: ProfileOptions, observer: Observer) -> Outcome:
    """Profile and diagnose. Raises LabError where the case cannot be run at all."""
    if options.run.untrusted:
        raise UsageError("a profiler cannot work in a sandbox, so nothing untrusted is profiled")
    prepared = pipeline.prepare(options.run, observer)
    plan = _of_one(prepared.plan, options.implementation)
    source = revision()
    path = options.run.output or create_default_folder(f"profile-{plan.cases[0].name}", source)
    with RunWriter(path, plan, prepared.machine, source, options.run.command, save_samples=False) as folder:
        observer.stage("build")
        built = build_for(plan, lambda done, total, what: observer.advance(done / total, what))
        for failure in built.failures:
            observer.note(f"{failure.kernel} for {failure.architecture}: {failure.message}")
        folder.set_build(built)
        pipeline.require(built)
        observer.stage("profile")
        wish = Wish(
            plan,
            plan.cases[0],
            options.implementation,
            full=options.full,
            counters=options.counters,
            kernel=options.kernel,
            ablate=options.ablate,
        )
        profile = collect(wish, path, built, observer)
        diagnosis = diagnose(profile)
        folder.log(
            "profiled", bound=diagnosis.bound, causes=tuple(finding.rule for finding in diagnosis.causes)
        )
        store.write(path, profile, diagnosis)
    report.write(path)
    return Outcome(path, diagnosis)


def _of_one(plan: Plan, implementation: str) -> Plan:
    """The plan with one case and nobody to compare with. Raises UsageError where the name fits several cases."""
    dtypes = list(dict.fromkeys(case.dtype for case in plan.cases))
    if len({case.name for case in plan.cases}) > 1:
        raise UsageError("profile takes one case; give one NAME or NAME/DTYPE")
    preferred = next(dtype for dtype in ("bf16", *dtypes) if dtype in dtypes)
    case = next(case for case in plan.cases if case.dtype == preferred)
    return replace(
        plan, cases=(case,), baseline=implementation, implementations=(implementation,), control=False
    )

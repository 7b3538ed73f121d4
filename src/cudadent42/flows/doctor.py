"""One command from a run to the next experiment: profile what is slowest, or judge by what the folder has."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from cudadent42.base.errors import LabError, UsageError
from cudadent42.base.observer import Observer, Quiet
from cudadent42.model.cases import Case
from cudadent42.model.implementations import OURS, is_ours, split_variant
from cudadent42.model.records import BuildReport, Comparison
from cudadent42.preflight import onednn
from cudadent42.profiles import store
from cudadent42.profiles.diagnosis import diagnose
from cudadent42.profiles.quantities import with_quantities
from cudadent42.profiles.records import PROFILE, SCHEMA_VERSION, Diagnosis, Profile, Source
from cudadent42.runs.checking import load_checked
from cudadent42.runs.instructions import compiled_for
from cudadent42.runs.run_folder import RunFolder
from cudadent42.runs.source import Revision, revision
from cudadent42.stages.profile.builds import device_of_run, profiled_build, with_build
from cudadent42.stages.profile.collect import Wish, collect
from cudadent42.version import __version__
from flashmoe_science.jit.records import Recipe


def examine(
    folder: Path,
    *,
    case: str = "",
    implementation: str = "",
    measure: bool = True,
    full: bool = False,
    counters: bool = True,
    observer: Observer | None = None,
) -> Diagnosis:
    """Diagnose a run, and write ``profile.json`` and ``diagnosis.json`` into its folder.

    The subject is the case and implementation that were asked for, else the run's slowest case and its candidate.
    Where this is the machine of the run and ``measure`` is set, the subject is measured anew, unless the run confined
    its candidates. Elsewhere a profile that the folder keeps is judged again, if it is of the subject or nothing was
    asked for; without such a profile the verdict rests on the run's other files, and says so.

    A profile with counters is never replaced by one without: for the same subject the kept one is judged, with a
    note that says so; for another nothing is written and the call is refused.

    Args:
        case: ``Case.name`` or ``Case.id`` of the plan; the slowest where empty.
        implementation: one of the plan's; the run's candidate where empty.

    Raises:
        UsageError: the folder is no run, the case or implementation is none of its plan, or the folder keeps
            another subject's profile with counters and there are none of this one.
    """
    run = load_checked(folder)
    subject, name = _case(run, case), _implementation(run, implementation)
    kept = store.load_profile(folder)
    same = kept is not None and (kept.case, kept.implementation) == (subject.id, name)
    wish = Wish(run.plan, subject, name, full=full, counters=counters, variables=_variables(run))
    measured, reason = _measured(run, wish, observer or Quiet()) if measure else (None, _NOT_ASKED)
    if measured is None and kept is not None and (same or not (case or implementation)):
        profile, note = kept, f"the folder's profile, judged again: {reason}"
    else:
        latest = measured if measured is not None else from_folder(run, subject, name, reason)
        profile, note = _beside_the_run(latest, run, subject, name) if latest is measured else latest, ""
        if kept is not None and kept.source is Source.COUNTERS and latest.source is not Source.COUNTERS:
            if not same:
                raise UsageError(
                    f"{folder} keeps a profile with counters of {kept.case}, {kept.implementation}, and none could be "
                    f"made of {subject.id}, {name} ({'; '.join(latest.notes)}); profile that case in a folder of "
                    f"its own with `cudadent42 profile`, or move {PROFILE} away"
                )
            profile, note = kept, f"the kept profile with counters is judged: {'; '.join(latest.notes)}"
    sets = _instruction_sets(run, subject, name, here=measured is not None)
    otherwise = _otherwise(wish.variables) if measured is not None and profile is not kept else ""
    added = tuple(one for one in (note, otherwise, sets) if one and one not in profile.notes)
    diagnosis = diagnose(replace(profile, notes=(*profile.notes, *added)))
    store.write(folder, profile, diagnosis)
    return diagnosis


_NOT_ASKED = "measuring was not asked for"

_OF_A_PROCESSOR = (
    *("FLASHMOE_CPU_ISA", "ATEN_CPU_CAPABILITY", *onednn.LIMITS, "MKL_ENABLE_INSTRUCTIONS"),
    *("MKL_NUM_THREADS", "OMP_NUM_THREADS"),
)
"""Variables that say with which instructions, and on how many threads, a run on a CPU was made."""

_PLAIN = re.compile(r"[A-Za-z0-9_]{1,40}")
"""What their values look like; a folder is somebody's word, and what does not is left out."""


def _variables(run: RunFolder) -> dict[str, str | None]:
    """With which a run on a CPU is measured again: its own, not those of this shell."""
    if run.plan.device != "cpu":
        return {}
    values = {name: run.manifest.environment.get(name, "") for name in _OF_A_PROCESSOR}
    return {name: value if _PLAIN.fullmatch(value) else None for name, value in values.items()}


def _otherwise(variables: Mapping[str, str | None]) -> str:
    """Where this process's variables are other ones; empty where they are the run's."""
    others = {name: value for name, value in variables.items() if os.environ.get(name) != value}
    if not others:
        return ""
    words = (f"{name}={value}" if value is not None else f"no {name}" for name, value in others.items())
    return f"measured with {', '.join(words)}, as the run was"


def _measured(run: RunFolder, wish: Wish, observer: Observer) -> tuple[Profile | None, str]:
    """A new profile, or why there is none."""
    reason = _why_not_here(run)
    if reason is not None:
        return None, reason
    try:
        return collect(wish, run.path, run.build, observer), ""
    except LabError as error:
        return None, str(error)


def _beside_the_run(profile: Profile, run: RunFolder, case: Case, implementation: str) -> Profile:
    """With the run's own time of the case and the source that it was made with, and a word where that is another."""
    latency_ms = _latency_ms(run, case, implementation)
    profile = replace(profile, run_latency_ms=latency_ms if math.isfinite(latency_ms) else None)
    version = run.plan.versions.get(implementation)
    if version is not None:  # of a race: it was loaded from the very sources that the run raced
        raced = version.commit[:8] or version.revision
        return replace(profile, revision=raced, run_revision=raced)
    made_with = run.manifest.revision
    note = _other_source(made_with, revision())
    return replace(
        profile,
        run_revision=made_with.short if made_with is not None else "",
        notes=(note, *profile.notes) if note else profile.notes,
    )


def _other_source(run: Revision | None, here: Revision | None) -> str:
    """A warning where what was measured now need not be what the run measured; empty where it is."""
    now = here.short if here is not None else f"version {__version__}, of which the revision is not known"
    if run is None:
        return f"careful: the run does not say which source it was made with; measured now was {now}"
    if here is not None and run.commit == here.commit:
        if run.diff == here.diff:
            return ""
        return f"careful: the run and what was measured now are {run.commit[:8]} with different changes to it"
    return (
        f"careful: the run was made with {run.short}, measured now was {now}: this is the profile of another source "
        "than the run's"
    )


def _why_not_here(run: RunFolder) -> str | None:
    """Why this process cannot profile what the run measured; None where it can."""
    from cudadent42.preflight.host import cpu_model
    from cudadent42.preflight.runner import gather

    if run.manifest.sandbox is not None:
        return "the run's candidates were confined to a sandbox, and a profiler cannot work in one"
    if run.plan.device == "cpu":
        there, here = str(run.machine.facts.get("cpu_model") or ""), cpu_model()
    else:
        there = str(run.machine.facts.get("gpu_name") or "")
        gpus = gather(run.plan.device, run.path).gpu.gpus
        index = int(run.plan.device.partition(":")[2] or 0)
        here = gpus[index].name if index < len(gpus) else "no GPU"
    if not there:
        return "the run does not say which machine it was made on"
    if there != here:
        return f"the run was made on {there}, this machine has {here}"
    return None


def _instruction_sets(run: RunFolder, case: Case, implementation: str, *, here: bool) -> str:
    """Which instructions the subject of a run on CPU took, and PyTorch; empty where it is not said.

    With ``here``, on the machine of the run, oneDNN is asked for its own word.
    """
    if run.plan.device != "cpu" or run.build is None:
        return ""
    ours = dict.fromkeys(
        _compiled_for(each.architecture) for each in _recipes(run.build, case, implementation)
    )
    if not any(ours):
        return ""
    note = f"instruction sets: our kernels were compiled for {', '.join(ours)}"
    if any("amx" in each for each in ours) and not _fits_matrix_unit(case):
        note = f"{note}, and took this case without the matrix unit"
    theirs = run.machine.facts.get("torch_cpu_capability")
    if not theirs:
        return note
    held = {
        "MKL": _limits(run, ("MKL_ENABLE_INSTRUCTIONS",)),
        "oneDNN": _limits(run, onednn.LIMITS),
    }
    libraries = "MKL's and oneDNN's, which choose for themselves"
    if any(held.values()):
        libraries = ", and ".join(
            f"{name}'s, " + (f"held by {limits}" if limits else "which chooses for itself")
            for name, limits in held.items()
        )
    note = f"{note}; PyTorch's took {theirs}, but for {libraries}"
    said = onednn.instructions(run.manifest.environment) if here else None
    return f"{note}. oneDNN names {said} here" if said else note


def _recipes(build: BuildReport, case: Case, implementation: str) -> list[Recipe]:
    """Those that the subject takes; all where that is not known."""
    every = [each.recipe for each in build.kernels if each.recipe.backend == "host"]
    if not every or not is_ours(implementation):
        return every
    # What calls take is built first.
    taken = split_variant(implementation)[1] or compiled_for(every[0].architecture)
    bits = getattr(case, "weight_bits", 0)
    mine = [each for each in every if compiled_for(each.architecture) == taken]
    return [each for each in mine if each.configuration.get("WEIGHT_BITS", 0) == bits] or mine or every


def _fits_matrix_unit(case: Case) -> bool:
    """As `flashmoe_science.explain` has it."""
    from flashmoe_science.explanation.functions.attention import AMX_STEP

    sizes = getattr(case, "head_dim", 0), getattr(case, "value_dim", 0)
    scales = getattr(case, "fp8_scales", None)
    return case.dtype == "bf16" and not scales and not any(size % AMX_STEP for size in sizes)


def _compiled_for(architecture: str) -> str:
    """The set of "x86_64:avx2+avx2+fma+f16c". VNNI, which is part of none, is named besides."""
    return compiled_for(architecture) + " with avx512_vnni" * ("+avx512_vnni" in architecture)


def _limits(run: RunFolder, names: tuple[str, ...]) -> str:
    """Those of the variables that the run had, with their values."""
    environment = run.manifest.environment
    return ", ".join(f"{name}={environment[name]}" for name in names if name in environment)


def _case(run: RunFolder, wanted: str) -> Case:
    """The case that was asked for, else the slowest against the baseline, else the one with most operations."""
    cases = run.plan.cases
    if wanted:
        chosen = next((case for case in cases if wanted in (case.id, case.name)), None)
        if chosen is None:
            raise UsageError(f"the run has no case {wanted!r}; it has {', '.join(case.id for case in cases)}")
        return chosen
    if not cases:
        raise UsageError(f"{run.path} is a run without cases; there is nothing to profile")
    compared = {one.case_id: one.speedup for one in run.results.cases} if run.results else {}
    timed = [case for case in cases if case.id in compared]
    return min(timed, key=lambda one: compared[one.id]) if timed else max(cases, key=lambda one: one.flops)


def _implementation(run: RunFolder, wanted: str) -> str:
    names = run.plan.implementations
    if wanted:
        if wanted not in names:
            raise UsageError(f"the run has no implementation {wanted!r}; it has {', '.join(names)}")
        return wanted
    if run.results is not None:
        return run.results.candidate
    return next((name for name in names if name != run.plan.baseline), run.plan.baseline)


# ---------------------------------------------------------------- from what the folder has


def from_folder(run: RunFolder, case: Case, implementation: str, reason: str) -> Profile:
    """What a run's own files say of one case: its time, the ceilings, the compiled kernels."""
    results = run.results
    facts = run.machine.facts
    capability = str(facts.get("gpu_compute_capability") or "").replace(".", "")
    profile = Profile(
        schema_version=SCHEMA_VERSION,
        case=case.id,
        implementation=implementation,
        device=run.plan.device,
        device_name=str(facts.get("gpu_name") or facts.get("cpu_model") or ""),
        architecture=f"sm_{capability}" if capability else "",
        kernel="",
        source=Source.MODEL,
        flops=float(case.flops),
        bytes_min=float(case.bytes_min),
        dtype=case.dtype,
        latency_ms=_latency_ms(run, case, implementation),
        metrics={},
        peaks=dict(results.peaks) if results is not None else {},
        notes=(f"judged from the folder alone: {reason}",),
        revision=run.manifest.revision.short if run.manifest.revision is not None else "",
    )
    if run.plan.device == "cpu" or implementation != OURS or run.build is None:
        return with_quantities(profile)
    build, why_not = profiled_build(run.build.kernels, profile, case, device_of_run(facts))
    if build is None:
        note = f"the compiled kernel is not looked into: {why_not}"
        return with_quantities(replace(profile, notes=(*profile.notes, note)))
    return with_quantities(with_build(replace(profile, kernel=build.recipe.kernel), build))


def _latency_ms(run: RunFolder, case: Case, implementation: str) -> float:
    """Median, by the results; NaN where this was not timed."""
    results = run.results
    compared: tuple[Comparison, ...] = (*results.cases, *results.others) if results is not None else ()
    for one in compared:
        if one.case_id == case.id:
            if one.implementation == implementation:
                return one.latency_ms
            if one.baseline == implementation:
                return one.baseline_latency_ms
    return math.nan

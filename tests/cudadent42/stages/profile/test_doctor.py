"""From a run folder to a diagnosis, with and without a profile in it."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from cudadent42.base.errors import LabError, UsageError
from cudadent42.base.serialise import encode
from cudadent42.flows import doctor
from cudadent42.flows.doctor import examine
from cudadent42.model.records import Version
from cudadent42.model.sandbox import SandboxReport
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.profiles import Profile, diagnose, store, text
from cudadent42.profiles.records import DIAGNOSIS, PROFILE, Diagnosis, Source
from cudadent42.runs.run_folder import load_run
from cudadent42.runs.source import Revision
from cudadent42.stages.build import build_for
from cudadent42.stages.profile import child
from cudadent42.stages.profile.collect import Wish
from flashmoe_science.jit import host

RESULTS = Path(__file__).resolve().parents[4] / "benchmarks/results"


def test_a_run_is_judged_by_its_folder_where_its_machine_is_not_here(run: Path) -> None:
    diagnosis = examine(run, measure=False)
    assert diagnosis.source is Source.MODEL
    assert diagnosis.implementation == "cudadent42"
    assert "measuring was not asked for" in diagnosis.notes[0]
    profile = store.load_profile(run)
    assert profile is not None
    assert profile.latency_ms > 0
    assert profile.architecture == "sm_90"


def test_a_diagnosis_of_a_cpu_s_run_names_its_instruction_sets(tmp_path: Path) -> None:
    folder = shutil.copytree(RESULTS / "2026-11-20-cpu-default", tmp_path / "run")
    assert (
        "instruction sets: our kernels were compiled for avx512_bf16" in examine(folder, measure=False).notes
    )
    machine = json.loads((folder / "manifest.json").read_text())
    machine["machine"]["facts"]["torch_cpu_capability"] = "AVX2"
    (folder / "manifest.json").write_text(json.dumps(machine))
    note = (
        "instruction sets: our kernels were compiled for avx512_bf16; PyTorch's took AVX2, but for MKL's and oneDNN's, "
        "which choose for themselves"
    )
    assert note in examine(folder, measure=False).notes
    machine["environment"]["DNNL_MAX_CPU_ISA"] = "AVX2"  # the older name, which oneDNN still reads
    (folder / "manifest.json").write_text(json.dumps(machine))
    begin = "instruction sets: our kernels were compiled for avx512_bf16; PyTorch's took AVX2, but for "
    held = "MKL's, which chooses for itself, and oneDNN's, held by DNNL_MAX_CPU_ISA=AVX2"
    assert begin + held in examine(folder, measure=False).notes
    machine["environment"]["MKL_ENABLE_INSTRUCTIONS"] = "AVX2"
    (folder / "manifest.json").write_text(json.dumps(machine))
    held = "MKL's, held by MKL_ENABLE_INSTRUCTIONS=AVX2, and oneDNN's, held by DNNL_MAX_CPU_ISA=AVX2"
    assert begin + held in examine(folder, measure=False).notes


def test_a_diagnosis_names_the_kernel_of_its_subject() -> None:
    """As it was built: for weights of 4 bits with products of bytes, where the processor has them."""
    run = load_run(RESULTS / "2026-11-23-cpu-moe-int4")
    names = ("cudadent42_16bit", "cudadent42", "cudadent42[portable]")
    plan = dataclasses.replace(run.plan, implementations=names)
    built = build_for(plan, lambda *told: None)
    assert [each.recipe.configuration.get("WEIGHT_BITS", 0) for each in built.kernels] == [0, 4, 0, 4]
    run = dataclasses.replace(run, manifest=dataclasses.replace(run.manifest, plan=plan, build=built))
    taken = host.choose_instruction_set()
    with_bytes = "".join(f" with {each}" for each in host.integer_dot_products(taken))
    for name, words in (("cudadent42", f"{taken.value}{with_bytes}"), ("cudadent42[portable]", "portable")):
        note = doctor._instruction_sets(run, plan.cases[0], name, here=False)
        assert note.partition("; ")[0] == f"instruction sets: our kernels were compiled for {words}"


@pytest.mark.parametrize(
    ("dtype", "head_dim", "left"), [("bf16", 64, False), ("fp16", 64, True), ("bf16", 72, True)]
)
def test_a_diagnosis_says_where_the_matrix_unit_was_left(dtype: str, head_dim: int, left: bool) -> None:
    run = load_run(RESULTS / "2026-11-23-cpu-amx-2")
    case = AttentionCase("c", dtype, 1, 8, 8, 512, 512, head_dim)
    note = doctor._instruction_sets(run, case, "cudadent42", here=False)
    assert ("compiled for amx, and took this case without the matrix unit" in note) is left


def test_a_cpu_s_run_is_measured_with_its_own_instructions_and_threads(
    tmp_path: Path, profile_of: Callable[..., Profile], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with those of this shell: a run that was held to AVX2 has other times and ceilings than AVX-512 gives."""
    seen: list[dict[str, str]] = []

    def target(arguments: object, *, environment: Mapping[str, str], **_: object) -> object:
        seen.append(dict(environment))
        raise LabError("enough was seen")

    folder = shutil.copytree(RESULTS / "2026-11-23-cpu-avx2", tmp_path / "run")
    monkeypatch.setattr(doctor, "_why_not_here", lambda run: None)
    monkeypatch.setattr(doctor.onednn, "instructions", lambda environment: "AVX2")
    monkeypatch.setattr(child, "run", target)
    monkeypatch.setenv("FLASHMOE_CPU_ISA", "avx512")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert "judged from the folder alone: enough was seen" in examine(folder).notes
    (environment,) = seen
    assert environment["FLASHMOE_CPU_ISA"] == "avx2"
    assert environment["ATEN_CPU_CAPABILITY"] == "avx2"
    assert environment["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert "OMP_NUM_THREADS" not in environment  # the run had PyTorch's own number

    _measures(monkeypatch, profile_of("spilled"))
    assert any(
        note.startswith("measured with FLASHMOE_CPU_ISA=avx2, ")
        and note.endswith("no OMP_NUM_THREADS, as the run was")
        for note in examine(folder).notes
    )


def test_a_folder_s_other_variables_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder may be a stranger's: neither a library to load nor a word that is no instruction set."""
    wishes: list[Wish] = []

    def collect(wish: Wish, *_: object) -> Profile:
        wishes.append(wish)
        raise LabError("enough was seen")

    folder = shutil.copytree(RESULTS / "2026-11-23-cpu-avx2", tmp_path / "run")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["environment"] |= {
        "LD_PRELOAD": "/evil.so",
        "ATEN_CPU_CAPABILITY": "avx2\\0",
        "OMP_NUM_THREADS": "2",
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    monkeypatch.setattr(doctor, "_why_not_here", lambda run: None)
    monkeypatch.setattr(doctor, "collect", collect)
    examine(folder)
    (wish,) = wishes
    assert "LD_PRELOAD" not in wish.variables
    assert wish.variables["ATEN_CPU_CAPABILITY"] is None
    assert wish.variables["OMP_NUM_THREADS"] == "2"


def test_the_slowest_case_is_taken_unless_one_is_named(run: Path) -> None:
    results = json.loads((run / "results.json").read_text())
    slowest = min(results["cases"], key=lambda one: one["speedup"])
    assert examine(run, measure=False).case == f"{slowest['name']}/{slowest['dtype']}"
    named = examine(run, case="d64-full-4096", measure=False)
    assert named.case == "d64-full-4096/bf16"


def test_a_profile_that_is_there_is_judged_again(run: Path, profile_of: Callable[..., Profile]) -> None:
    profile = profile_of("unswizzled")
    store.write(run, profile, diagnose(profile))
    (run / DIAGNOSIS).unlink()
    assert examine(run, measure=False).causes[0].rule == "bank-conflicts"
    assert store.load_diagnosis(run) is not None


def _of(profile: Profile, diagnosis: Diagnosis) -> Profile:
    """The profile as if it were of the diagnosis' subject."""
    return dataclasses.replace(profile, case=diagnosis.case, implementation=diagnosis.implementation)


def _measures(monkeypatch: pytest.MonkeyPatch, recorded: Profile) -> None:
    """As on the machine of the run: measuring any case gives these numbers."""

    def collect(wish: Wish, *_: object) -> Profile:
        return dataclasses.replace(recorded, case=wish.case.id, implementation=wish.implementation)

    monkeypatch.setattr(doctor, "_why_not_here", lambda run: None)
    monkeypatch.setattr(doctor, "collect", collect)


def test_a_run_that_confined_its_candidates_is_not_measured(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "collect", lambda *_: pytest.fail("the candidate was run"))
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["sandbox"] = encode(SandboxReport(()))
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert "were confined to a sandbox" in examine(run).notes[0]


@pytest.mark.parametrize(("device", "fact"), [("cpu", "cpu_model"), ("cuda:0", "gpu_name")])
def test_a_run_that_names_no_machine_is_another_machine_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, fact: str
) -> None:
    name = "2026-11-20-cpu-default" if device == "cpu" else "2026-11-20-h200-hopper"
    folder = shutil.copytree(RESULTS / name, tmp_path / "run")
    monkeypatch.setattr(doctor, "collect", lambda *_: pytest.fail("the candidate was run"))
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["machine"]["facts"][fact]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert "does not say which machine" in examine(folder).notes[0]


def test_on_the_machine_of_the_run_it_measures_anew(
    run: Path, profile_of: Callable[..., Profile], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = examine(run, measure=False)
    store.write(run, _of(profile_of("unswizzled"), first), first)
    _measures(monkeypatch, profile_of("spilled"))
    assert examine(run).causes[0].rule == "spills"
    other = examine(run, case="d64-full-4096")
    assert (other.case, other.source) == ("d64-full-4096/bf16", Source.COUNTERS)
    assert examine(run).case == first.case != other.case


def test_counters_of_the_subject_outlive_a_measurement_without(
    run: Path, profile_of: Callable[..., Profile], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = examine(run, measure=False)
    kept = _of(profile_of("unswizzled"), first)
    store.write(run, kept, diagnose(kept))
    without = dataclasses.replace(profile_of("unswizzled", counters=False), notes=("ncu is not installed",))
    _measures(monkeypatch, without)
    for _ in range(2):
        diagnosis = examine(run)
        assert diagnosis.causes[0].rule == "bank-conflicts"
        assert diagnosis.notes == ("the kept profile with counters is judged: ncu is not installed",)
        assert store.load_profile(run) == kept


def test_counters_of_another_subject_are_not_overwritten(
    run: Path, profile_of: Callable[..., Profile]
) -> None:
    kept = _of(profile_of("unswizzled"), examine(run, measure=False))
    store.write(run, kept, diagnose(kept))
    with pytest.raises(UsageError, match=f"keeps a profile with counters of {kept.case}, cudadent42,.*own"):
        examine(run, case="d64-full-4096", measure=False)
    assert store.load_profile(run) == kept


@pytest.mark.parametrize(
    ("options", "message"),
    [({"case": "nope"}, "no case 'nope'"), ({"implementation": "nope"}, "no implementation 'nope'")],
)
def test_what_is_not_in_the_run_is_refused(run: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        examine(run, measure=False, **options)  # type: ignore[arg-type]


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="run folder"):
        examine(tmp_path)


def test_a_newer_profile_is_refused(run: Path, profile_of: Callable[..., Profile]) -> None:
    profile = dataclasses.replace(profile_of("decode"), schema_version=99)
    store.write(run, profile, diagnose(profile))
    with pytest.raises(UsageError, match="newer cudadent42"):
        store.load_profile(run)


@pytest.mark.parametrize("content", ["{", "[]", '{"schema_version": 1}', '{"case": "x"}'])
def test_a_broken_profile_is_refused(run: Path, content: str) -> None:
    (run / PROFILE).write_text(content)
    with pytest.raises(UsageError, match=PROFILE):
        store.load_profile(run)


# ---------------------------------------------------------------- words


def test_the_lines_name_the_first_experiment(profile_of: Callable[..., Profile]) -> None:
    diagnosis = diagnose(profile_of("unswizzled"))
    lines = list(text.lines(diagnosis))
    assert lines[-1] == f"next: {diagnosis.causes[0].experiment}"
    assert any(line.startswith("1. Shared-memory bank conflicts (measured): at most 82%") for line in lines)
    assert any("values outside" in line for line in lines)


def test_verbose_lines_show_every_threshold(profile_of: Callable[..., Profile]) -> None:
    diagnosis = diagnose(profile_of("hopper-full"))
    lines = "\n".join(text.lines(diagnosis, verbose=True))
    assert all(threshold.name in lines for threshold in diagnosis.thresholds)
    assert "specialised warps" in lines


def test_gains_in_words(profile_of: Callable[..., Profile]) -> None:
    finding = diagnose(profile_of("unswizzled")).causes[0]
    assert text.gain(dataclasses.replace(finding, gain=0.5)) == "at most 50% of the time, 2.00x"
    assert text.gain(dataclasses.replace(finding, gain=1.0)) == "at most 100% of the time"


# ---------------------------------------------------------------- the source of the run, and today's


def _revision(commit: str, diff: str = "") -> Revision:
    return Revision(commit * 40, "main", bool(diff), diff, ())


@pytest.mark.parametrize(
    ("run_made_with", "here", "said"),
    [
        (_revision("a"), _revision("a"), ""),
        (_revision("a", "+x"), _revision("a", "+x"), ""),
        (_revision("a"), _revision("b"), "made with aaaaaaaa, measured now was bbbbbbbb"),
        (_revision("a"), _revision("a", "+x"), "aaaaaaaa with different changes"),
        (None, _revision("b"), "does not say which source"),
        (_revision("a"), None, "of which the revision is not known"),
    ],
)
def test_another_source_than_the_run_s_is_said_and_both_are_kept(
    run: Path,
    profile_of: Callable[..., Profile],
    monkeypatch: pytest.MonkeyPatch,
    run_made_with: Revision | None,
    here: Revision | None,
    said: str,
) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["revision"] = None if run_made_with is None else dataclasses.asdict(run_made_with)
    (run / "manifest.json").write_text(json.dumps(manifest))
    monkeypatch.setattr(doctor, "revision", lambda: here)
    _measures(monkeypatch, profile_of("decode"))
    diagnosis = examine(run)
    assert [note for note in diagnosis.notes if note.startswith("careful")] == (
        [diagnosis.notes[0]] if said else []
    )
    assert said in "".join(diagnosis.notes)
    kept = store.load_profile(run)
    assert kept is not None
    assert kept.run_revision == (run_made_with.short if run_made_with is not None else "")
    timed = json.loads((run / "results.json").read_text())["cases"]
    assert kept.run_latency_ms in [
        one["latency_ms"] for one in timed if f"{one['name']}/{one['dtype']}" == kept.case
    ]


def test_a_raced_version_is_its_own_source(
    run: Path, profile_of: Callable[..., Profile], monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["plan"]["versions"] = {"cudadent42": dataclasses.asdict(Version("v1", "c" * 40, "d" * 64))}
    (run / "manifest.json").write_text(json.dumps(manifest))
    _measures(monkeypatch, profile_of("decode"))
    assert not any("careful" in note for note in examine(run).notes)
    kept = store.load_profile(run)
    assert kept is not None
    assert (kept.revision, kept.run_revision) == ("cccccccc", "cccccccc")


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*/*/profile.json")), ids=lambda path: path.parent.name)
def test_committed_profiles_are_whole_folders(path: Path) -> None:
    kept = store.load_profile(path.parent)
    diagnosis = store.load_diagnosis(path.parent)
    assert kept is not None
    assert diagnosis is not None
    assert load_run(path.parent).manifest.plan.cases[0].id == kept.case
    assert [one.rule for one in diagnose(kept).causes] == [one.rule for one in diagnosis.causes]


# ---------------------------------------------------------------- which of the compiled kernels


def test_the_compiled_kernel_is_found_among_many(run: Path) -> None:
    """The folder has 168 builds of three kernels."""
    for case, head_dim, causal in (("d128-causal-4096", 128, 1), ("d64-full-4096", 64, 0)):
        examine(run, case=case, measure=False)
        kept = store.load_profile(run)
        assert kept is not None
        assert kept.kernel == "attention_hopper"
        assert kept.resources is not None
        manifest = json.loads((run / "manifest.json").read_text())
        (build,) = (
            one
            for one in manifest["build"]["kernels"]
            if one["recipe"]["kernel"] == "attention_hopper"
            and one["resources"] == json.loads(json.dumps(dataclasses.asdict(kept.resources)))
            and one["recipe"]["configuration"]["HEAD_DIM"] == head_dim
            and one["recipe"]["configuration"]["ELEMENT_BF16"] == 1
            and one["recipe"]["configuration"]["CAUSAL"] == causal
        )
        assert build


def test_a_kernel_that_cannot_be_told_is_not_guessed(run: Path) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["machine"]["facts"]["gpu_multiprocessors"] = None
    (run / "manifest.json").write_text(json.dumps(manifest))
    diagnosis = examine(run, measure=False)
    kept = store.load_profile(run)
    assert kept is not None
    assert kept.resources is None
    assert any(
        "the compiled kernel is not looked into: 168 of the compiled kernels fit" in one
        for one in diagnosis.notes
    )


def test_files_are_strict_json(run: Path, profile_of: Callable[..., Profile]) -> None:
    profile = dataclasses.replace(profile_of("decode"), latency_ms=math.nan)
    store.write(run, profile, diagnose(profile))
    document = json.loads((run / PROFILE).read_text(), parse_constant=lambda word: pytest.fail(word))
    assert isinstance(document["metrics"], dict)
    assert all(isinstance(value, (int, float)) for value in document["metrics"].values())

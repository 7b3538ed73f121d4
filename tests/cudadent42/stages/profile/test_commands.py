"""``profile`` and ``doctor`` as commands, with a stand-in for Nsight Compute that replays what was recorded on an H200,
and fails in every way that it is known to.

There is no GPU here, so the process that would be profiled is a stand-in as well: it answers with the times, ceilings
and launch of the same recording. All else is the real thing.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

import made_command_line
from cudadent42.base.serialise import dumps, loads
from cudadent42.flows import doctor
from cudadent42.preflight import ncu_install
from cudadent42.profiles import diagnose, store
from cudadent42.profiles.metrics import read_counters
from cudadent42.profiles.records import Launch, Profile, Source
from cudadent42.stages.profile import collect
from cudadent42.stages.profile.ncu import MAX_LAUNCHES, read_csv
from cudadent42.stages.profile.target import Answer
from cudadent42.stages.report import html, sections
from flashmoe_science.jit import nvrtc

RESULTS = Path(__file__).resolve().parents[4] / "benchmarks/results"
CALIBRATION = RESULTS / "2026-11-21-h200-profiles"
CASE = "d128-causal-4096/bf16"

NCU = r"""#!{python} -S
import os, sys  # and nothing that takes longer: thirty tests call it three times each

here = os.path.dirname(__file__)
def text(name):
    with open(os.path.join(here, name)) as file:
        return file.read()

mode = text("mode")
arguments = sys.argv[1:]
if arguments == ["--version"]:
    print("NVIDIA (R) Nsight Compute Command Line Profiler\nVersion " + text("version"))
elif "--import" in arguments:
    if mode == "unreadable":
        sys.exit("==ERROR== The file is not a valid report")
    if mode == "empty":
        print("==WARNING== No kernels")
    else:
        print(text(arguments[arguments.index("--import") + 1]), end="")
else:
    with open(os.path.join(here, "arguments"), "w") as file:
        file.write("\n".join(arguments))
    at = arguments.index("--export") + 2
    report, target = arguments[at - 1], arguments[at:]
    if mode == "denied":
        print("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance "
              "Counters on the target device 0.")
        sys.exit(1)
    if mode == "mismatch":
        print("==ERROR== Cuda driver is not compatible with Nsight Compute.")
        sys.exit(1)
    if mode == "crash":
        os.kill(os.getpid(), 11)
    if mode == "hang":
        import time
        time.sleep(60)
    if os.spawnv(os.P_WAIT, target[0], target):
        sys.exit("==ERROR== The application returned an error code (1).")
    if mode == "none":
        print("==WARNING== No kernels were profiled.")
    else:
        with open(report, "w") as file:
            file.write(text("export.csv"))
        print("==PROF== Report: " + report)
"""

TARGET = r"""
import json, os, sys

here = os.path.dirname(__file__)
with open(sys.argv[1]) as file:
    request = json.load(file)
if os.path.exists(os.path.join(here, "broken")):
    raise SystemExit("RuntimeError: CUDA error: an illegal memory access was encountered")
with open(os.path.join(here, "answer.json")) as answer, open(request["output"], "w") as output:
    output.write(answer.read())
"""


def recorded_csv(
    change: Callable[[dict[str, str], dict[str, str]], None] | None = None, name: str = "hopper-causal"
) -> str:
    """The export of one recorded subject, after ``change`` to its row (and the row of units)."""
    subjects = [one["name"] for one in json.loads((CALIBRATION / "profiles.json").read_text())["subjects"]]
    text = gzip.decompress((CALIBRATION / "profiles.csv.gz").read_bytes()).decode()
    units, *rows = csv.DictReader(io.StringIO(text))
    row = rows[subjects.index(name)]
    if change is not None:
        change(row, units)
    out = io.StringIO()
    writer = csv.DictWriter(out, list(row), quoting=csv.QUOTE_ALL)
    writer.writeheader()
    writer.writerows([units, row])
    return out.getvalue()


class Bench:
    """The stand-ins, and the commands run with them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.output = folder / "output"

    def ncu(self, mode: str, version: str = "2025.3.1.0", export: str | None = None) -> None:
        (self.folder / "mode").write_text(mode)
        (self.folder / "version").write_text(version)
        (self.folder / "export.csv").write_text(recorded_csv() if export is None else export)
        path = self.folder / "ncu"
        path.write_text(NCU.replace("{python}", sys.executable))
        path.chmod(0o755)

    def run(self, *arguments: str) -> Result:
        return made_command_line.invoke(*arguments)

    def profile(self, *options: str) -> Result:
        return self.run(
            *(
                "profile",
                CASE,
                "--suite",
                "hopper",
                "--device",
                "cuda",
                "--ignore-preflight",
                "-i",
                "pytorch",
            ),
            *("--output-dir", str(self.output), *options),
        )

    def profiled(self, folder: Path | None = None) -> Profile:
        kept = store.load_profile(folder or self.output)
        assert kept is not None
        return kept

    @property
    def asked(self) -> list[str]:
        """What the stand-in for ncu was called with."""
        return (self.folder / "arguments").read_text().split("\n")


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: dict[str, Any]) -> Bench:
    (tmp_path / "target.py").write_text(TARGET)
    launch = Launch("attention_hopper", 1.42e-3, 132, 384, 168, 230608)
    answer = Answer(
        latency_ms=1.45,
        device_name="NVIDIA H200",
        architecture="sm_90",
        multiprocessors=132,
        peaks=recorded["peaks"],
        launches=(launch,),
    )
    (tmp_path / "answer.json").write_text(dumps(answer))
    monkeypatch.setattr(
        collect,
        "target_command",
        lambda request: [sys.executable, "-S", str(tmp_path / "target.py"), str(request)],
    )
    monkeypatch.setattr(collect, "TIMEOUT_S", 20.0)
    monkeypatch.setattr(nvrtc, "nvrtc_version", lambda: (13, 0))  # of the machine that was recorded
    monkeypatch.setattr(ncu_install, "PLACES", ())
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("COLUMNS", "200")
    return Bench(tmp_path)


def test_the_export_as_csv_leads_to_the_same_verdicts(
    recorded: dict[str, Any], profile_of: Callable[..., Profile]
) -> None:
    """It has two decimals where NVIDIA's interface has all."""
    launches = read_csv(gzip.decompress((CALIBRATION / "profiles.csv.gz").read_bytes()).decode())
    for launch, subject in zip(launches, recorded["subjects"], strict=True):
        for name, (value, _) in subject["metrics"].items():
            assert launch.metrics[name].value == pytest.approx(value, rel=1e-4, abs=6e-3), (
                subject["name"],
                name,
            )
        exact = profile_of(subject["name"])
        by_csv = replace(exact, metrics=read_counters(launch.kernel, launch.metrics).values)
        assert [one.rule for one in diagnose(by_csv).causes] == [one.rule for one in diagnose(exact).causes]


# ---------------------------------------------------------------- profile


def test_a_profile_with_counters(bench: Bench) -> None:
    bench.ncu("ok")
    done = bench.profile()
    assert done.exit_code == 0, done.output
    kept = bench.profiled()
    assert kept.source is Source.COUNTERS
    assert kept.tool == "Nsight Compute 2025.3.1"
    assert (bench.output / kept.report).is_file()
    assert "It runs against matrix products" in done.output
    assert "not asked" not in done.output
    assert {"report.html", "manifest.json", "diagnosis.json", "ncu.log"} <= {
        p.name for p in bench.output.iterdir()
    }
    assert "none" in bench.asked[bench.asked.index("--clock-control") + 1]
    assert "--set" not in bench.asked


def test_the_full_set_and_one_kernel_on_request(bench: Bench) -> None:
    bench.ncu("ok")
    assert bench.profile("--full", "--kernel", "attention_.*").exit_code == 0
    assert bench.asked[bench.asked.index("--set") + 1] == "full"
    assert "regex:attention_.*" in bench.asked


@pytest.mark.parametrize(
    ("kernels", "said"),
    [
        (3, "the call launches 3 kernels; this one takes 33% of their time"),
        (MAX_LAUNCHES, f"of the call's kernels only the first {MAX_LAUNCHES} were counted"),
    ],
)
def test_no_more_kernels_are_spoken_of_than_were_counted(bench: Bench, kernels: int, said: str) -> None:
    names, units, row = recorded_csv().splitlines()
    bench.ncu("ok", export="\n".join([names, units, *([row] * kernels)]) + "\n")
    assert said in " ".join(bench.profile().output.split())


def test_json_is_one_document(bench: Bench) -> None:
    bench.ncu("ok")
    document = json.loads(bench.profile("--json").stdout)
    assert document["diagnosis"]["case"] == CASE
    assert {one["clock"] for one in document["diagnosis"]["times"]} == {"counted", "traced", "called"}


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("denied", "ERR_NVGPUCTRPERM"),
        ("mismatch", "driver is not compatible with Nsight Compute"),
        ("crash", "ended by signal 11"),
        ("hang", "still running after"),
        ("none", "launched no kernel"),
        ("unreadable", "cannot read profile.ncu-rep back"),
        ("empty", "no table of kernels"),
    ],
)
def test_without_counters_the_reason_and_a_model_are_given(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, mode: str, said: str
) -> None:
    if mode == "hang":
        monkeypatch.setattr(collect, "PROFILER_TIMEOUT_S", 1.0)
    bench.ncu(mode)
    done = bench.profile()
    assert done.exit_code == 0, done.output
    assert "note: no counters: " in done.output
    assert said in done.output
    assert "without counters" in done.output
    assert "Nothing found" not in done.output
    kept = bench.profiled()
    assert kept.source is Source.MODEL
    assert "bank_conflicts" not in kept.metrics


def test_the_remedy_comes_with_a_denial(bench: Bench) -> None:
    bench.ncu("denied")
    assert ncu_install.remedy() in bench.profile().output


def test_a_pattern_that_fits_no_kernel_is_named(bench: Bench) -> None:
    bench.ncu("none")
    assert "no kernel of the call has a name like 'nope.*'" in bench.profile("--kernel", "nope.*").output


def test_without_ncu_it_is_said_how_to_get_it(bench: Bench) -> None:
    done = bench.profile()
    assert done.exit_code == 0
    assert "not installed" in done.output
    assert "cuda-nsight-compute" in done.output


def test_an_old_ncu_is_said_to_be_old(bench: Bench) -> None:
    bench.ncu("ok", version="2022.4.1.0")
    done = bench.profile()
    assert "Nsight Compute 2022.4.1 is old" in done.output
    assert bench.profiled().tool == "Nsight Compute 2022.4.1"


def test_metrics_that_are_nan_are_not_zero(bench: Bench) -> None:
    def change(row: dict[str, str], units: dict[str, str]) -> None:
        row["sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"] = "nan"
        row["l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"] = ""

    bench.ncu("ok", export=recorded_csv(change))
    done = bench.profile()
    kept = bench.profiled()
    assert "tensor_share" not in kept.metrics
    assert kept.missing["tensor_share"].endswith("is not a number")
    assert "rules were not asked:" in done.output
    assert "not known, so not shown to be in order: shared-memory bank conflicts" in done.output
    assert "What it runs against is not known" in done.output
    assert "matrix products" in done.output
    assert "Nothing" not in done.output


def test_a_report_of_nothing_but_nan_is_no_profile_with_counters(bench: Bench) -> None:
    """As a version of Nsight Compute gives that does not know the GPU."""

    def change(row: dict[str, str], units: dict[str, str]) -> None:
        row.update({name: "nan" for name in row if "__" in name and not name.startswith("launch__")})

    bench.ncu("ok", export=recorded_csv(change))
    done = bench.profile()
    assert "gave no number for any unit of this GPU" in done.output
    assert bench.profiled().source is Source.MODEL


def test_metrics_that_the_report_lacks_are_named(bench: Bench) -> None:
    def change(row: dict[str, str], units: dict[str, str]) -> None:
        for name in [
            name for name in row if "stalled" in name or "dram__" in name or "dram_throughput" in name
        ]:
            del row[name], units[name]

    bench.ncu("ok", export=recorded_csv(change))
    done = bench.profile()
    assert bench.profiled().missing["dram_share"].startswith("the report has no dram__throughput")
    assert "the report has no" in done.output
    assert "Nothing" not in done.output


def test_what_cannot_be_done_as_asked_is_said(bench: Bench) -> None:
    answer = loads(Answer, (bench.folder / "answer.json").read_text())
    two = replace(answer, launches=answer.launches * 2)
    (bench.folder / "answer.json").write_text(dumps(two))
    done = bench.profile("--no-counters", "--kernel", "merge", "--ablate")
    assert "the longest kernel is judged, whatever --kernel says" in done.output
    assert "not of pytorch:" in " ".join(done.output.split())


def test_a_call_that_does_not_run_ends_the_command(bench: Bench) -> None:
    bench.ncu("ok")
    (bench.folder / "broken").touch()
    done = bench.profile()
    assert done.exit_code != 0
    assert "illegal memory access" in str(done.exception) + done.output


# ---------------------------------------------------------------- doctor


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run made on an H200, on the machine of which we pretend to be."""
    monkeypatch.setattr(doctor, "_why_not_here", lambda run: None)
    return shutil.copytree(RESULTS / "2026-11-20-h200-hopper", tmp_path / "run")


@pytest.fixture
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page of a run of 168 kernels takes four seconds to draw; that it is written, one test below shows."""
    monkeypatch.setattr("cudadent42.stages.report.write", lambda folder, before=None: None)


@pytest.mark.usefixtures("no_page")
def test_doctor_measures_and_says_what_to_do(bench: Bench, run: Path) -> None:
    bench.ncu("ok")
    done = bench.run("doctor", str(run), "--case", CASE)
    assert done.exit_code == 0, done.output
    assert "next: " in done.output
    assert "careful: the run was made with" in done.output
    assert "called in the run" in done.output
    kept = bench.profiled(run)
    assert kept.source is Source.COUNTERS
    assert kept.run_latency_ms is not None
    assert kept.resources is not None  # of 168 builds, the one that was launched
    assert kept.resources.registers_per_thread == 168


@pytest.mark.usefixtures("no_page")
@pytest.mark.parametrize("mode", ["denied", "crash"])
def test_doctor_goes_on_without_counters(bench: Bench, run: Path, mode: str) -> None:
    bench.ncu(mode)
    done = bench.run("doctor", str(run), "--case", CASE)
    assert done.exit_code == 0, done.output
    assert "note: no counters: " in done.output
    assert bench.profiled(run).source is Source.MODEL


@pytest.mark.usefixtures("no_page")
def test_doctor_without_counters_when_asked(bench: Bench, run: Path) -> None:
    bench.ncu("ok")
    done = bench.run("doctor", str(run), "--case", CASE, "--no-counters")
    assert "the counters were not asked for" in done.output
    assert not (bench.folder / "arguments").exists()


@pytest.mark.usefixtures("no_page")
def test_doctor_where_the_call_does_not_run_judges_the_folder(bench: Bench, run: Path) -> None:
    bench.ncu("ok")
    (bench.folder / "broken").touch()
    done = bench.run("doctor", str(run), "--case", CASE)
    assert done.exit_code == 0, done.output
    assert "judged from the folder alone" in done.output
    assert "illegal memory access" in done.output


def test_before_and_after_are_set_side_by_side(
    bench: Bench, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    its_section = tuple(section for section in sections.SECTIONS if section.name == "profile")
    monkeypatch.setattr(html, "SECTIONS", its_section)
    before = shutil.copytree(run, tmp_path / "before")
    bench.ncu("ok", export=recorded_csv(name="portable"))
    assert bench.run("doctor", str(before), "--case", CASE).exit_code == 0
    bench.ncu("ok")
    done = bench.run("doctor", str(run), "--case", CASE, "--before", str(before))
    assert done.exit_code == 0, done.output
    assert "tensor cores busy: 64% -> 91%" in done.output
    assert not math.isnan(bench.profiled(run).metrics["tensor_share"])
    assert "Against the earlier profile" in (run / "report.html").read_text()

from __future__ import annotations

import csv
import json
import math
import os
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cudadent42.base.errors import UsageError
from cudadent42.base.files import write_json
from cudadent42.model.records import (
    BuildReport,
    Check,
    Comparison,
    MachineReport,
    Plan,
    Results,
    Sample,
    Status,
    Verdict,
    VerifiedCase,
    VerifyReport,
)
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.runs import run_folder
from cudadent42.runs.source import Revision, revision
from cudadent42.version import __version__

CASE = AttentionCase("tiny", "fp16", 2, 4, 2, 32, 48, 64, causal=True)
PLAN = Plan("unit", "cpu", (CASE,), "pytorch", ("pytorch", "cudadent42"), repeats=2, warmup=0, seed=7)
MACHINE = MachineReport((Check("python", Status.OK, "3.11"),), "torch=none", {"cores": 2, "load": 0.5})
REVISION = Revision("0123456789abcdef", "main", True, "diff", ("new.txt",))


def sample(block: int = 0, latency_ms: float = 0.5, flags: str = "") -> Sample:
    return Sample(CASE.id, "pytorch", block, 1, latency_ms, 8, math.nan, 1.25, flags)


def writer(folder: Path) -> run_folder.RunWriter:
    return run_folder.RunWriter(folder, PLAN, MACHINE, REVISION, ["cudadent42", "run"])


def results() -> Results:
    row = Comparison("tiny", "fp16", "cudadent42", "pytorch", 2.0, 1.9, 2.1, Verdict.FASTER, 1.0, 2.0, 2)
    return Results("pytorch", "cudadent42", 2.0, 1.9, 2.1, Verdict.FASTER, 0.01, math.nan, (row,))


def test_round_trip(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    verify = VerifyReport((VerifiedCase(CASE.id, "cudadent42", "random", None, None, None, True),))
    with writer(folder) as run:
        run.set_build(BuildReport(()))
        run.write_verify(verify)
        run.append_sample(sample(0))
        run.append_sample(sample(1, flags="throttled,preempted"))
        run.write_results(results())
        run.log("stage", name="bench")

    read = run_folder.load_run(folder)
    assert read.manifest.status is run_folder.RunStatus.FINISHED
    assert read.plan == PLAN
    assert read.machine == MACHINE
    assert read.manifest.revision == REVISION
    assert read.build == BuildReport(())
    assert read.verify == verify
    assert read.results is not None
    assert read.results.cases == results().cases
    assert [s.block for s in read.samples] == [0, 1]
    assert read.samples[1].flags == "throttled,preempted"
    assert math.isnan(read.samples[0].memory_mb)
    entry = json.loads((folder / run_folder.LOG).read_text())
    assert (entry["event"], entry["name"]) == ("stage", "bench")


def test_samples_begin_with_the_nine_columns(tmp_path: Path) -> None:
    with writer(tmp_path / "run") as run:
        run.append_sample(sample(latency_ms=0.5))
    header, row = list(csv.reader((tmp_path / "run" / run_folder.SAMPLES).open()))
    assert ",".join(header[:9]) == (
        "implementation,dtype,batch_size,seq_len,hidden_dim,num_heads,latency_ms,"
        "throughput_tokens_per_sec,memory_mb"
    )
    assert header[9:14] == ["case", "causal", "head_dim", "block", "seed"]
    cells = dict(zip(header, row, strict=True))
    assert cells["hidden_dim"] == "64"
    assert float(cells["throughput_tokens_per_sec"]) == pytest.approx(2 * 32 / 0.5e-3)
    assert (cells["case"], cells["causal"], cells["seed"]) == ("tiny", "true", "7")


def test_rows_are_on_disk_before_the_run_ends(tmp_path: Path) -> None:
    run = writer(tmp_path / "run")
    run.append_sample(sample())
    assert (tmp_path / "run" / run_folder.RESERVE).stat().st_size > 1e5
    unfinished = run_folder.load_run(tmp_path / "run")
    assert unfinished.manifest.status is run_folder.RunStatus.RUNNING
    assert len(unfinished.samples) == 1
    assert unfinished.verify is None
    assert unfinished.results is None


def test_the_space_held_for_the_end_is_given_back(tmp_path: Path) -> None:
    with writer(tmp_path / "run"):
        pass
    assert run_folder.RESERVE not in os.listdir(tmp_path / "run")


def test_a_row_cut_short_is_left_out(tmp_path: Path) -> None:
    with writer(tmp_path / "run") as run:
        run.append_sample(sample(0))
        run.append_sample(sample(1))
    path = tmp_path / "run" / run_folder.SAMPLES
    path.write_bytes(path.read_bytes()[:-4])
    assert [s.block for s in run_folder.load_run(tmp_path / "run").samples] == [0]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (KeyboardInterrupt(), run_folder.RunStatus.INTERRUPTED),
        (UsageError("why"), run_folder.RunStatus.FAILED),
    ],
)
def test_how_the_run_ended_is_recorded(
    tmp_path: Path, error: BaseException, status: run_folder.RunStatus
) -> None:
    def interrupted_run() -> None:
        with writer(tmp_path / "run") as run:
            run.append_sample(sample())
            raise error

    with pytest.raises(type(error)):
        interrupted_run()
    read = run_folder.load_run(tmp_path / "run")
    assert read.manifest.status is status
    assert read.manifest.error == str(error)
    assert len(read.samples) == 1


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kept.txt").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        writer(tmp_path)
    with pytest.raises(UsageError, match="is a file"):
        writer(tmp_path / "kept.txt")
    assert os.listdir(tmp_path) == ["kept.txt"]


def test_a_folder_that_cannot_be_made() -> None:
    with pytest.raises(UsageError, match="cannot write to /proc: "):
        writer(Path("/proc/no/such"))


def test_a_full_disk_keeps_what_was_measured(tmp_path: Path) -> None:
    """A file-size limit stands for the full disk: the write fails with an OSError in the same places."""
    folder = tmp_path / "run"
    script = f"""
import importlib.util, resource, signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
spec = importlib.util.spec_from_file_location("writing", {__file__!r})
t = importlib.util.module_from_spec(spec)
spec.loader.exec_module(t)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with t.writer(Path({str(folder)!r})) as run:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    for block in range(10_000):
        run.append_sample(t.sample(block))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode != 0
    assert "UnwritableError: cannot write to" in done.stderr
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 4096
    read = run_folder.load_run(folder)
    assert len(read.samples) > 20
    assert read.manifest.status is run_folder.RunStatus.FAILED
    assert "cannot write" in read.manifest.error


def test_what_was_left_out_is_read_from_the_log(tmp_path: Path) -> None:
    assert run_folder.load_skipped(tmp_path) == {}
    with writer(tmp_path / "run") as run:
        run.log("note", text="tiny/fp32: not timed")
        run.log("skipped", key="tiny/fp32/ours", reason="wrong after timing")
    with (tmp_path / "run" / run_folder.LOG).open("a") as file:
        file.write('{"event": "skipped", "key": "cut')
    assert run_folder.load_skipped(tmp_path / "run") == {"tiny/fp32/ours": "wrong after timing"}


def test_json_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, PLAN)
    before = path.read_text()
    with pytest.raises(TypeError):
        write_json(path, object())
    assert path.read_text() == before
    assert os.listdir(tmp_path) == ["x.json"]


def test_what_is_not_a_run_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a folder"):
        run_folder.load_run(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"has no manifest\.json"):
        run_folder.load_run(tmp_path)
    (tmp_path / run_folder.MANIFEST).write_text("[]")
    with pytest.raises(UsageError, match="schema_version"):
        run_folder.load_run(tmp_path)
    (tmp_path / run_folder.MANIFEST).write_text('{"schema_version": 1')
    with pytest.raises(UsageError, match="cannot be read"):
        run_folder.load_run(tmp_path)


def test_a_newer_schema_is_named(tmp_path: Path) -> None:
    with writer(tmp_path / "run"):
        pass
    path = tmp_path / "run" / run_folder.MANIFEST
    manifest = json.loads(path.read_text()) | {"schema_version": 99, "unheard_of": 1}
    path.write_text(json.dumps(manifest))
    with pytest.raises(UsageError, match=r"newer cudadent42 \(schema 99"):
        run_folder.load_run(tmp_path / "run")


def test_the_default_path_names_suite_and_revision() -> None:
    name = run_folder.default_path("default", REVISION).name
    assert name.endswith("Z-default-01234567-dirty")
    assert run_folder.default_path("default", None).name.endswith(f"-default-v{__version__}")


def test_runs_that_begin_in_one_second_get_folders_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(
            pool.map(
                lambda _: run_folder.create_default_folder("default", REVISION, tmp_path / "runs"), range(24)
            )
        )
    assert len(set(made)) == 24
    assert all(path.is_dir() for path in made)


def test_revision_of_this_tree() -> None:
    current = revision()
    assert current is None or len(current.commit) == 40

"""The command line as a user has it: real processes, a real run of a suite that is small."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cudadent42.runs.run_folder import load_run
from cudadent42.stages.report.view import View
from cudadent42.version import __version__
from flashmoe_science.jit.cache import default_cache
from warm_python import with_usual_signals

ROOT = Path(__file__).resolve().parents[3]

SUITE = """
name = "unit"
dtypes = ["fp32", "bf16"]
repeats = 8
warmup = 1
case = [
    { name = "one", batch = 1, num_heads = 2, seqlen = 32, head_dim = 64 },
    { name = "two", batch = 2, num_heads = 4, num_kv_heads = 2, seqlen = 40, head_dim = 32, causal = true },
]
"""


def environment(**changes: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT / "src"), "COLUMNS": "140"} | changes


def start(*arguments: str, **changes: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "cudadent42", *arguments],
        env=environment(**changes),
        preexec_fn=with_usual_signals,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def cudadent42(*arguments: str, **changes: str) -> tuple[int, str, str]:
    process = start(*arguments, **changes)
    out, err = process.communicate()
    return process.returncode, out, err


@pytest.fixture(scope="session")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("suite") / "unit.toml"
    path.write_text(SUITE)
    return path


# ---------------------------------------------------------------- a whole run


@pytest.fixture(scope="session")
def run(suite: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """Folder, standard output and standard error of a run that must pass."""
    folder = tmp_path_factory.mktemp("run") / "folder"
    code, out, err = cudadent42("run", "--suite", str(suite), "--device", "cpu", "--output-dir", str(folder))
    assert code == 0, err
    return folder, out, err


def test_a_run_leaves_everything_in_its_folder(run: tuple[Path, str, str]) -> None:
    folder, _, _ = run
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        "manifest.json",
        "samples.csv",
        "results.json",
        "verify.json",
        "report.html",
        "report.md",
        "log.jsonl",
    }
    results = json.loads((folder / "results.json").read_text())
    assert results["speedup_geomean"] > 0
    cells = {(case["name"], case["dtype"]) for case in results["cases"]}
    assert cells == {("one", "fp32"), ("two", "fp32"), ("one", "bf16"), ("two", "bf16")}
    for case in results["cases"]:
        assert case["ci_low"] <= case["speedup"] <= case["ci_high"]
        assert case["verdict"] in ("faster", "slower", "equal", "undecided")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["status"] == "finished"
    assert manifest["build"]["kernels"][0]["recipe"]["sources"]
    assert manifest["command"][:2] == ["cudadent42", "run"]
    stages = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    # What is called faster is audited; whether it is, is the machine's to say.
    assert [entry["name"] for entry in stages if entry["event"] == "stage" and entry["name"] != "audit"] == [
        "build",
        "verify",
        "bench",
        "compare",
        "report",
    ]


def test_a_run_keeps_one_row_per_timed_call(run: tuple[Path, str, str]) -> None:
    rows = list(csv.DictReader((run[0] / "samples.csv").open()))
    assert len(rows) == 4 * 3 * 8  # cells x (pytorch, its control, cudadent42) x repeats
    assert {row["implementation"] for row in rows} == {"pytorch", "pytorch_control", "cudadent42"}
    assert all(float(row["latency_ms"]) > 0 for row in rows)
    for cell in {(row["case"], row["dtype"], row["block"]) for row in rows}:
        assert sum((row["case"], row["dtype"], row["block"]) == cell for row in rows) == 3


def test_a_run_ends_with_a_table_and_a_line_of_verdict(run: tuple[Path, str, str]) -> None:
    folder, out, err = run
    lines = [line.rstrip() for line in out.splitlines() if line.strip()]
    # On a busy machine not all of the eight blocks count, and fewer allow no verdict.
    on = f", on {re.escape(View(load_run(folder)).device_words)}"
    few = rf"undecided: cudadent42 against pytorch{on}; fewer than 8 blocks that count allow no verdict;"
    assert re.match(
        rf"(faster|slower|equal|undecided): cudadent42 against pytorch, [\d.]+× .* of 4 cases{on}|{few}",
        lines[-1],
    )
    assert sum(bool(re.match(r" (one|two) +(fp32|bf16) ", line)) for line in lines) == 4
    assert f"run folder: {folder}" in lines
    assert "Traceback" not in err
    for stage in ("preflight", "build", "verify", "bench", "compare", "report"):
        assert f"{stage}: started" in err


def test_the_report_can_be_written_again(run: tuple[Path, str, str]) -> None:
    folder, _, _ = run
    page = (folder / "report.html").read_bytes()
    (folder / "report.html").unlink()
    code, out, err = cudadent42("report", str(folder), "--json")
    assert code == 0, err
    assert json.loads(out)["html"] == str(folder / "report.html")
    assert len((folder / "report.html").read_bytes()) == len(page)


def test_a_folder_in_use_is_refused_and_left_alone(run: tuple[Path, str, str], suite: Path) -> None:
    folder, _, _ = run
    before = sorted((path.name, path.stat().st_mtime_ns) for path in folder.iterdir())
    code, _, err = cudadent42("run", "--suite", str(suite), "--device", "cpu", "--output-dir", str(folder))
    assert code == 2
    assert "is not empty" in err
    assert sorted((path.name, path.stat().st_mtime_ns) for path in folder.iterdir()) == before


def test_bench_prints_one_json_document(suite: Path, tmp_path: Path) -> None:
    code, out, err = cudadent42(
        *("bench", "--suite", str(suite), "--device", "cpu", "--case", "one/fp32", "--repeats", "4"),
        *("--no-save-csv", "--json", "--output-dir", str(tmp_path / "run")),
    )
    assert code == 0, err
    document = json.loads(out)
    assert document["schema_version"] == 1
    assert document["folder"] == str(tmp_path / "run")
    assert document["verification_passed"] is True
    assert [case["name"] for case in document["results"]["cases"]] == ["one"]
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert "results.json" in names
    assert not {"samples.csv", "report.html"} & names


def test_what_is_wrong_is_not_timed_and_the_exit_code_says_so(suite: Path, tmp_path: Path) -> None:
    plug_in = tmp_path / "wrong.py"
    plug_in.write_text(
        "import torch\n"
        "def attention(query, key, value, *, causal, softmax_scale):\n"
        "    return torch.zeros_like(query)\n"
    )
    code, _, err = cudadent42(
        *("run", "--suite", str(suite), "--device", "cpu", "--dtype", "fp32", "--case", "one"),
        *("--implementations", f"{plug_in}:attention", "--output-dir", str(tmp_path / "run")),
    )
    assert code == 3
    assert "verification failed" in err
    rows = list(csv.DictReader((tmp_path / "run/samples.csv").open()))
    assert not any("wrong.py" in row["implementation"] for row in rows)
    verify = json.loads((tmp_path / "run/verify.json").read_text())
    assert any(not case["passed"] and "wrong.py" in case["implementation"] for case in verify["cases"])
    assert (tmp_path / "run/report.html").exists()


@pytest.mark.usefixtures("warm_texts")
def test_children_are_waited_for_below_a_parent_that_ignores_their_end() -> None:
    text = """
import signal, subprocess, sys
from cudadent42.commands.program import make_app, run_program

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
app = make_app()
app.command("ask")(lambda: print(subprocess.run(["false"]).returncode))
sys.argv[1:] = ["ask"]
sys.exit(run_program(app))
"""
    result = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert (result.stdout, result.returncode) == ("1\n", 0), result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_an_interrupted_run_keeps_what_was_measured(
    suite: Path, tmp_path: Path, number: signal.Signals
) -> None:
    folder = tmp_path / "run"
    process = start(
        "run", "--suite", str(suite), "--device", "cpu", "--repeats", "9999", "--output-dir", str(folder)
    )
    samples = folder / "samples.csv"
    while not (samples.exists() and samples.read_bytes().count(b"\n") > 30):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    process.send_signal(number)
    _, err = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in err
    kept = re.search(rf"(\d+) samples are kept in {re.escape(str(folder))}", err)
    assert kept is not None
    assert samples.read_bytes().count(b"\n") == int(kept[1]) + 1
    assert json.loads((folder / "manifest.json").read_text())["status"] == "interrupted"
    code, _, err = cudadent42("report", str(folder))
    assert code == 0, err
    page = (folder / "report.md").read_text()
    assert "Partial: " in page
    assert "The run was interrupted" in page
    assert "9999 planned blocks" in page
    assert not (folder / "results.json").exists()


def test_a_kernel_that_does_not_compile(suite: Path, tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "kernel.cpp:1: error: no" >&2\nexit 1\n'
    )
    compiler.chmod(0o755)
    code, _, err = cudadent42(
        *("run", "--suite", str(suite), "--device", "cpu", "--output-dir", str(tmp_path / "run")),
        CXX=str(compiler),
        FLASHMOE_CACHE_DIR=str(tmp_path / "cache"),
    )
    assert code == 5, err
    assert "kernel.cpp:1: error: no" in err
    assert "Traceback" not in err
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    assert manifest["status"] == "failed"
    assert manifest["build"]["failures"]


def test_a_machine_that_is_not_ready_is_not_measured(suite: Path, tmp_path: Path) -> None:
    arguments = ("--suite", str(suite), "--device", "cpu", "--output-dir", str(tmp_path / "run"))
    code, _, err = cudadent42("bench", *arguments, CXX="/no/such/compiler")
    assert code == 4
    assert "/no/such/compiler" in err
    assert "fix: " in err
    assert not (tmp_path / "run").exists()
    # Told to go on, it does: without the kernel that cannot be compiled.
    code, _, err = cudadent42(
        *("bench", *arguments, "--ignore-preflight", "--repeats", "3", "--case", "one/fp32"),
        *("--implementations", "pytorch_math"),
        CXX="/no/such/compiler",
        FLASHMOE_CACHE_DIR=str(tmp_path / "cache"),
    )
    assert code == 0, err
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    assert any(check["status"] == "fail" for check in manifest["machine"]["checks"])


def test_a_gpu_that_is_not_there(suite: Path) -> None:
    code, _, err = cudadent42("run", "--suite", str(suite), "--device", "cuda:99")
    assert code == 4
    assert "fix: cudadent42 run --device c" in err


# ---------------------------------------------------------------- the other commands


def test_verify_alone(suite: Path) -> None:
    code, out, err = cudadent42(
        "verify", "--suite", str(suite), "--device", "cpu", "--dtype", "fp32", "--case", "two", "--json"
    )
    assert code == 0, err
    document = json.loads(out)
    assert document["passed"] is True
    assert any(case["case"] == "two/fp32" for case in document["cases"])


def test_a_race_of_variants(suite: Path, tmp_path: Path) -> None:
    """Named as a user names them: by commas, which also stand in brackets."""
    folder = tmp_path / "run"
    names = ["cudadent42[portable]", "cudadent42"]
    code, out, err = cudadent42(
        *("run", "--suite", str(suite), "--device", "cpu", "--dtype", "fp32", "--case", "one"),
        *("--repeats", "1", "--warmup", "0", "--ignore-preflight"),
        *("--implementations", ",".join(names), "--output-dir", str(folder)),
    )
    assert code == 0, err
    rows = list(csv.DictReader((folder / "samples.csv").open()))
    assert {row["implementation"] for row in rows} == {"pytorch", "pytorch_control", *names}
    assert all(name in out for name in names)
    manifest = json.loads((folder / "manifest.json").read_text())
    built = [kernel["recipe"] for kernel in manifest["build"]["kernels"]]
    assert "portable" in {each["architecture"].split(":")[1] for each in built}
    report = (folder / "report.html").read_text()
    assert "cudadent42[portable]" in report
    code, _, err = cudadent42(
        "run", "--suite", str(suite), "--device", "cpu", "--implementation", "cudadent42[fast]"
    )
    assert code == 2
    assert "there is no variant 'fast'" in err


def test_preflight_json() -> None:
    code, out, err = cudadent42("preflight", "--device", "cpu", "--json")
    document = json.loads(out)
    assert document["ready"] is (code == 0), err
    assert {check["name"] for check in document["checks"]} >= {
        "python",
        "torch",
        "compiler",
        "disk",
        "driver",
    }


def test_preflight_on_a_bare_python() -> None:
    """Without site-packages: no torch, no typer, no rich."""
    command = [sys.executable, "-S", "-m", "cudadent42", "preflight"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 4
    assert "Traceback" not in done.stderr
    assert "torch is not installed" in done.stdout
    assert re.search(r"fix: .* -m pip install .*typer", done.stdout)
    assert done.stdout.splitlines()[-1].startswith("Preflight failed: packages, torch")
    done = subprocess.run([*command[:-1], "run"], env=environment(), capture_output=True, text=True)
    assert done.returncode == 4
    assert "-m cudadent42 preflight" in done.stderr
    done = subprocess.run([*command, "--bogus"], env=environment(), capture_output=True, text=True)
    assert done.returncode == 2


def test_build_shows_the_recipe() -> None:
    code, out, err = cudadent42("build", "--device", "cpu", "--verbose")
    assert code == 0, err
    assert "attention_forward" in out
    assert re.search(r"attention_forward\.cpp sha256:[0-9a-f]{64}", out)


def test_the_cache_is_listed_and_cleared(tmp_path: Path) -> None:
    # Compiled once for all tests: this one's cache begins with what the user's has.
    assert cudadent42("build", "--device", "cpu")[0] == 0
    folder = {
        "FLASHMOE_CACHE_DIR": str(tmp_path / "cache"),
        "FLASHMOE_CACHE_SEED": str(default_cache().directory),
    }
    assert cudadent42("build", "--device", "cpu", **folder)[0] == 0
    listed = json.loads(cudadent42("cache", "list", "--json", **folder)[1])
    assert "attention_forward" in {entry["recipe"]["kernel"] for entry in listed["entries"]}
    count = len(listed["entries"])
    assert f"{count} kernels" in cudadent42("cache", "list", **folder)[1]
    assert json.loads(cudadent42("cache", "clear", "--json", **folder)[1])["entries"] == count
    assert json.loads(cudadent42("cache", "list", "--json", **folder)[1])["entries"] == []


def test_suites_and_implementations_are_listed() -> None:
    suites = json.loads(cudadent42("suites", "--json")[1])["suites"]
    assert {"default", "hopper", "small"} <= {item["name"] for item in suites}
    lines = cudadent42("suites")[1].splitlines()
    # A name as long as the longest still ends before its description begins.
    assert [line.split()[0] for line in lines[::2]] == [item["name"] for item in suites]
    names = {
        item["name"] for item in json.loads(cudadent42("implementations", "--json")[1])["implementations"]
    }
    assert {"pytorch", "cudadent42"} <= names


def test_version() -> None:
    assert cudadent42("--version")[1] == f"cudadent42 {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("run", "--suite", "nonesuch"),
            "unknown suite 'nonesuch'; expected one of backward-cpu, backward-short, backward, decode-fp8-cpu",
        ),
        (("run", "--suite", "no/file.toml"), "cannot read the suite no/file.toml"),
        (("run", "--case", "tinny"), "unknown case 'tinny'"),
        (("run", "--dtype", "fp8"), "unknown dtype 'fp8'"),
        (("run", "--implementations", "nobody"), "unknown implementation 'nobody'"),
        (("run", "--implementations", "no/such.py:f"), "no/such.py"),
        (("run", "--repeats", "0"), "--repeats 0"),
        (("run", "--repeats", "x"), "--repeats"),
        (("run", "--device", "tpu"), "--device 'tpu': expected auto, cpu, cuda or cuda:N"),
        (("run", "--timer", "sundial"), "--timer"),
        (("run", "--device", "cpu", "--output-dir", "/proc/no/run"), "cannot write to /proc"),
        (("run", "--device", "cpu", "--output-dir", "x" * 300), "File name too long"),
        (("implementations", "--device", "foo"), "--device 'foo': expected auto, cpu, cuda or cuda:N"),
        (("report", "no/run"), "no/run is not a folder"),
        (("build", "--device", "cuda", "--arch", "x"), "unknown GPU architecture"),
        (("nonesuch",), "nonesuch"),
    ],
)
def test_bad_input_is_a_line_and_exit_2(arguments: tuple[str, ...], message: str) -> None:
    code, out, err = cudadent42(*arguments)
    assert message in err
    assert "Traceback" not in err
    assert out == ""
    assert code == 2


IMPORTS_TORCH = [
    pytest.param(arguments, marks=pytest.mark.slow)
    for arguments in (("implementations",), ("preflight", "--device", "cpu"))
]


@pytest.mark.usefixtures("fresh_processes")
@pytest.mark.parametrize("arguments", [("suites",), ("suites", "--json"), *IMPORTS_TORCH])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_standard_output_is_a_line_and_exit_2(arguments: tuple[str, ...], unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "cudadent42", *arguments]
        done = subprocess.run(
            command,
            env=environment(PYTHONUNBUFFERED=unbuffered),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 2
    assert re.fullmatch(r"error: .*No space left on device\n", done.stderr)


@pytest.mark.usefixtures("fresh_processes")
@pytest.mark.parametrize("arguments", [("suites",), ("suites", "--json"), IMPORTS_TORCH[1]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_seen_enough_is_no_error(arguments: tuple[str, ...], unbuffered: str) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "cudadent42", *arguments]
    done = subprocess.run(
        command, env=environment(PYTHONUNBUFFERED=unbuffered), stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_errors_of_the_kernels_are_a_line(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    code, _, err = cudadent42("build", "--device", "cpu", FLASHMOE_CACHE_DIR=str(tmp_path / "cache"))
    assert code == 4
    assert err.count("error: ") == 1
    assert "Traceback" not in err


def test_debug_shows_the_traceback() -> None:
    code, _, err = cudadent42("report", "no/run", "--debug")
    assert code != 0
    assert "Traceback" in err
    assert "UsageError: no/run is not a folder" in err


def test_the_command_line_is_read_without_torch() -> None:
    script = (
        "import sys, cudadent42.commands.cli\n"
        "heavy = {'torch', 'numpy', 'scipy', 'matplotlib', 'rich', 'cuda'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], env=environment(), check=True)

"""The page on adding an operation does what it says: its files are written out, installed, verified and raced."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs/add-an-operation.md"
BLOCK = re.compile(r"```(?:python|cpp|toml)\n(?:#|//) (\S+)\n(.*?)```", re.DOTALL)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the page."""
    folder = tmp_path_factory.mktemp("page") / "rms-norm"
    files = dict(BLOCK.findall(PAGE.read_text(encoding="utf-8")))
    tree = re.search(r"```text\nrms-norm/\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert tree
    assert {Path(name).name for name in files} == set(re.findall(r"\S+\.(?:toml|py|cpp)", tree[1]))
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def site(project: Path) -> Path:
    """Where it is installed."""
    if importlib.util.find_spec("hatchling") is None or importlib.util.find_spec("pip") is None:
        pytest.skip("installing a package offline needs hatchling and pip; ./test.sh installs them")
    folder = project.parent / "site"
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*command, "--quiet", "--target", str(folder), str(project)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder


def cudadent42(*words: str, path: tuple[Path, ...], cwd: Path) -> subprocess.CompletedProcess[str]:
    folders = [*map(str, path), str(ROOT / "src")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "cudadent42", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=cwd)


@pytest.fixture(scope="module")
def run(project: Path, site: Path) -> Path:
    """The folder of the page's race."""
    folder = project.parent / "run"
    options = ("--device", "cpu", "--repeats", "2", "--output-dir", str(folder), "--ignore-preflight")
    done = cudadent42("run", "--suite", "suite.toml", *options, path=(site,), cwd=project)
    if "no C++ compiler" in done.stderr:
        pytest.skip("the page's kernel needs a C++ compiler")
    assert done.returncode in (0, 6), done.stderr + done.stdout  # 6: two blocks decide nothing
    return folder


def test_it_is_listed_beside_the_others(site: Path, tmp_path: Path) -> None:
    done = cudadent42("implementations", "--json", path=(site,), cwd=tmp_path)
    rows = json.loads(done.stdout)["implementations"]
    assert [row["name"] for row in rows if row["operation"] == "rms_norm"] == [
        "pytorch",
        "composed",
        "kernel",
    ]
    assert {"attention", "moe"} < {row["operation"] for row in rows}


def test_it_is_verified(run: Path) -> None:
    judged = json.loads((run / "verify.json").read_text())["cases"]
    assert all(each["passed"] for each in judged)
    own = {each["input"] for each in judged if each["implementation"] == "kernel"}
    assert own == {"random", "zero_rows", "tiny", "one_nan", "odd_size", "one_column", "after timing"}


def test_it_is_raced(run: Path) -> None:
    with (run / "samples.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["implementation"] for row in rows} == {"pytorch", "pytorch_control", "composed", "kernel"}
    assert {(row["case"], row["seq_len"], row["hidden_dim"]) for row in rows} == {
        ("decode", "1", "4096"),
        ("prompt", "128", "1024"),
    }
    results = json.loads((run / "results.json").read_text())
    assert {each["implementation"] for each in (*results["cases"], *results["others"])} == {
        "composed",
        "kernel",
    }
    assert "rows × hidden" in (run / "report.html").read_text(encoding="utf-8")


def test_the_record_names_it(run: Path, site: Path, tmp_path: Path) -> None:
    cases = json.loads((run / "manifest.json").read_text())["plan"]["cases"]
    assert {case["operation"] for case in cases} == {"rms_norm"}
    done = cudadent42("report", str(run), path=(site,), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    without = cudadent42("report", str(run), path=(), cwd=tmp_path)
    assert without.returncode == 2
    assert (
        "unknown operation 'rms_norm'; expected one of attention, attention_backward, attention_training_step, "
        "attention_varlen, moe, moe_backward, moe_training_step." in without.stderr
    )


def test_a_kernel_that_is_wrong_is_found(project: Path, site: Path, tmp_path: Path) -> None:
    """Adversarial inputs are asked of a plug-in file too."""
    (tmp_path / "wrong.py").write_text(
        "def norm(x, weight, *, epsilon):\n"
        "    return x * (x.square().mean(-1, keepdim=True)).rsqrt() * weight\n"
    )
    words = ("--suite", str(project / "suite.toml"), "--implementations", "wrong.py:norm", "--device", "cpu")
    done = cudadent42("verify", *words, "--ignore-preflight", "--json", path=(site,), cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    failed = [each for each in json.loads(done.stdout)["cases"] if not each["passed"]]
    assert {each["implementation"] for each in failed} == {"wrong.py:norm"}
    assert "zero_rows" in {each["input"] for each in failed}

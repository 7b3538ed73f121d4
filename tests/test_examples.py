"""The scripts under ``examples/`` run, and say what they promise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"


def run(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    if "DeviceError" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("script", "words", "says"),
    [
        ("attention.py", (), "output (1, 8, 256, 64), log-sum-exp (1, 8, 256)"),
        ("experts.py", (), "output (16, 256)"),
        ("explain.py", (), "flash_attention on "),
        ("read_run.py", ("benchmarks/results/2026-11-20-cpu-default",), "cudadent42 over pytorch: faster"),
    ],
)
def test_an_example_runs(script: str, words: tuple[str, ...], says: str) -> None:
    assert says in run(f"examples/{script}", *words)


def test_attention_is_pytorchs_but_for_rounding() -> None:
    (line,) = [line for line in run("examples/attention.py").splitlines() if "difference" in line]
    assert float(line.rpartition(" ")[2]) <= 2**-5


def test_the_plug_in_passes_verification() -> None:
    words = ("--implementation", "examples/my_attention.py:attention", "--suite", "small", "--case", "tiny")
    out = run(
        "-m", "cudadent42", "verify", *words, "--dtype", "bf16", "--device", "cpu", "--ignore-preflight"
    )
    assert "verification passed: " in out


def test_every_example_is_listed() -> None:
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    scripts = [path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")]
    assert [name for name in scripts if f"]({name})" not in page] == []

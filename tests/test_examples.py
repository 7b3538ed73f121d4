"""The scripts under ``examples/`` run, and say what they promise."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"


SHORT = ("--length", "128")
"""Products of bfloat16 take PyTorch a second each step where a CPU has none."""


@functools.cache
def run(*words: str) -> str:
    """Standard output; what several tests look at runs once."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"},
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
        ("own_module.py", SHORT, "taken: flash_attention on "),
        ("compile_and_export.py", (), "compiled: one graph, "),
        ("read_run.py", ("benchmarks/results/2026-11-20-cpu-default",), "cudadent42 over pytorch: faster"),
    ],
)
def test_an_example_runs(script: str, words: tuple[str, ...], says: str) -> None:
    assert says in run(f"examples/{script}", *words)


MODELS = [
    ("train_gpt.py", ("--steps", "6", "--length", "32"), "12 scaled_dot_product_attention taken", ()),
    ("finetune_llama.py", ("--steps", "3"), "6 Hugging Face attention taken", ("transformers", "accelerate")),
    ("serve.py", ("--requests", "6", "--tokens", "4"), "6 of 6 answers are the same", ("transformers",)),
    ("serve_qwen3_moe.py", ("--tokens", "4"), "16 Hugging Face experts taken", ("transformers",)),
]


@pytest.mark.parametrize(("script", "words", "says", "packages"), MODELS, ids=lambda each: str(each)[:20])
def test_a_model_runs(script: str, words: tuple[str, ...], says: str, packages: tuple[str, ...]) -> None:
    """What was taken is said, and how long both took; how long, decides nothing."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    out = run(f"examples/{script}", *words)
    assert says in out
    assert re.search(r"^a (step|token) takes .* ours: [0-9.]+x$", out, re.MULTILINE), out


@pytest.mark.parametrize(
    ("script", "words", "ratio"),
    [
        ("own_module.py", SHORT, "PyTorch's step over ours"),
        ("compile_and_export.py", (), "eager over compiled"),
    ],
)
def test_an_example_says_what_was_taken_and_the_ratio(
    script: str, words: tuple[str, ...], ratio: str
) -> None:
    out = run(f"examples/{script}", *words)
    assert re.search(rf"^{ratio}: [0-9.]+x$", out, re.MULTILINE), out
    assert re.search(r"^taken(: | by )", out, re.MULTILINE), out


def test_a_gpt_learns_the_same_with_ours() -> None:
    out = run("examples/train_gpt.py", "--steps", "6", "--length", "32")
    pytorch, ours = (
        [float(number) for number in re.findall(r"loss ([0-9.]+) at first, ([0-9.]+) after", line)[0]]
        for line in out.splitlines()
        if "at first" in line
    )
    assert ours == pytest.approx(pytorch, abs=2e-3)


def test_attention_is_pytorchs_but_for_rounding() -> None:
    (line,) = [line for line in run("examples/attention.py").splitlines() if "difference" in line]
    assert float(line.rpartition(" ")[2]) <= 2**-5


def test_an_exported_program_gives_the_same_bits() -> None:
    assert "same bits at another size: True" in run("examples/compile_and_export.py")


def test_a_hand_written_module_trains_as_with_pytorchs_attention() -> None:
    (line,) = [
        line for line in run("examples/own_module.py", *SHORT).splitlines() if line.startswith("losses ")
    ]
    words = [word.rstrip(";") for word in line.split()]
    first, second = (float(word) for word in words if word.startswith("0.") and not word.endswith("%"))
    assert first == pytest.approx(second, rel=1e-2)
    assert float(line.split("differ by ")[1].partition("%")[0]) < 2


def test_the_plug_in_passes_verification() -> None:
    words = ("--implementation", "examples/my_attention.py:attention", "--suite", "small", "--case", "tiny")
    out = run(
        "-m", "cudadent42", "verify", *words, "--dtype", "bf16", "--device", "cpu", "--ignore-preflight"
    )
    assert "verification passed: " in out


def test_the_race_runs_to_its_report(tmp_path: Path) -> None:
    """With few blocks, which allow no verdict: how fast something is decides nothing here."""
    folder = tmp_path / "run"
    words = ("--ignore-preflight", "--repeats", "2", "--warmup", "0", "--output-dir", str(folder))
    done = subprocess.run(
        [EXAMPLES / "race.sh", *words],
        cwd=tmp_path,
        env=os.environ | {"CUDADENT42_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "verification passed: " in done.stdout + done.stderr
    assert "my_attention.py:attention" in (folder / "report.md").read_text(encoding="utf-8")


def test_every_example_is_listed() -> None:
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    scripts = [path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")]
    assert [name for name in scripts if f"]({name})" not in page] == []

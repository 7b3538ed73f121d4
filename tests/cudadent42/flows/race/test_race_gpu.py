"""On a GPU: revisions of the library, whose kernels are built for the cases of the race alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cudadent42.base.observer import Quiet
from cudadent42.flows.race import RaceOptions, race
from cudadent42.plan import Choices, RunOptions
from cudadent42.runs.run_folder import load_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.parametrize(
    ("suite", "case", "own"),
    [("hopper", "d128-causal-512", "attention_"), ("moe", "qwen3-30b-16", "moe_")],
    ids=["attention", "experts"],
)
def test_the_same_revision_twice(tmp_path: Path, suite: str, case: str, own: str) -> None:
    options = RaceOptions(
        run=RunOptions(
            choices=Choices(suite=suite, cases=(case,), budget_s=20.0),
            device="cuda",
            output=tmp_path / "run",
            ignore_preflight=True,
            with_report=False,
        ),
        repository=ROOT,
    )
    outcome = race("WORKTREE", "HEAD", options, Quiet())
    assert outcome.verify.passed
    assert [row.name for row in outcome.results.cases] == [case]
    built = load_run(outcome.folder).build
    assert built is not None
    assert built.kernels
    assert all(kernel.recipe.kernel.startswith(own) for kernel in built.kernels)

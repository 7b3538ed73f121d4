"""The honest kernels once more, with other values and other chances: an accusation may be one in a hundred."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import lab
import pytest
from test_honest import NAMES

from cudadent42.model.events import Event
from cudadent42.worker.parent import Worker
from cudadent42.worker.stages import run_stage

pytestmark = pytest.mark.slow

RUNS = int(os.environ.get("HONEST_RUNS", "5"))
"""Which the environment may raise, for a night's search."""


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.mark.parametrize("number", range(RUNS))
def test_every_honest_kernel_is_clean(number: int, tmp_path: Path) -> None:
    """Values of the inputs differ by the plan's seed in verification, and are drawn by the parent while it is timed."""
    seed = random.SystemRandom().getrandbits(31)
    names = list(NAMES)
    random.Random(seed).shuffle(names)
    plan = replace(lab.plan_for(names), seed=seed)

    def ignore(event: Event) -> None:
        return

    with Worker(tmp_path / "worker.log") as worker:
        verified = run_stage("verify", plan, on_event=ignore, worker=worker)
        benched = run_stage("bench", plan, on_event=ignore, verified=verified, worker=worker)
    seen = lab.Seen(verified, benched, plan)
    said = {name: seen.evidence(name).strip() for name in names}
    assert not {name: words for name, words in said.items() if words}, f"seed {seed}"
    assert not benched.skipped, f"seed {seed}"

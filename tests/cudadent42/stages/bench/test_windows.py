"""How many calls the windows of a block hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cudadent42.model.records import Plan, TimerKind, VerifyReport
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.stages.bench.measurement import measure

CASE = AttentionCase("small", "fp32", 1, 2, 2, 64, 64, 32)
CANDIDATE = """
from torch.nn.functional import scaled_dot_product_attention as sdpa

def attention(q, k, v, *, causal, softmax_scale):
    return sdpa(q, k, v, is_causal=causal, scale=softmax_scale)
"""


@pytest.mark.parametrize("timer", [TimerKind.CPU, TimerKind.CALL])
@pytest.mark.parametrize(
    ("baseline", "candidate", "taken"), [(2, 1, 2), (1, 2, 1), (3, 4, 3), (2, 5, 5), (9, 3, 3), (4, 4, 4)]
)
def test_sides_that_are_near_in_speed_have_windows_of_as_many_calls(
    timer: TimerKind,
    baseline: int,
    candidate: int,
    taken: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine the first call of a window costs more, and how many fill one is a matter of rounding: the same
    code was called slower, in all blocks alike, and the control, which has the baseline's windows, did not show it."""
    (tmp_path / "mine.py").write_text(CANDIDATE)
    name = f"{tmp_path / 'mine.py'}:attention"
    fill = iter((baseline, candidate))
    monkeypatch.setattr("cudadent42.timing.timers.calls_for_window", lambda *_: next(fill))
    plan = Plan("test", "cpu", (CASE,), "pytorch", ("pytorch", name), 2, 0, seed=3, timer=timer)
    threads = torch.get_num_threads()
    try:
        report = measure(plan, VerifyReport(()), emit=lambda event: None)
    finally:
        torch.set_num_threads(threads)
    assert {sample.implementation: sample.inner for sample in report.samples} == {
        "pytorch": baseline,
        "pytorch_control": baseline,
        name: taken,
    }

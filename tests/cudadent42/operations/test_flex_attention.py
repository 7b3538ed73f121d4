"""flex_attention as a peer of attention over a batch of sequences, on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cudadent42.model.implementations import Planned, UnsupportedCaseError
from cudadent42.operations.attention_varlen import flex
from cudadent42.operations.attention_varlen.case import VarlenCase
from cudadent42.operations.attention_varlen.implementations import ALL
from cudadent42.operations.attention_varlen.inputs import random_inputs
from cudadent42.operations.attention_varlen.reference import varlen_float64
from cudadent42.suites.loader import load_suite

PACKED = VarlenCase("packed", "fp32", 4, 4, 2, longest=60, shortest=7, head_dim=16, queries=0)
CASES = {
    "prompts": PACKED,
    "full": replace(PACKED, causal=False),
    "window": replace(PACKED, window=5),
    "a few queries each": replace(PACKED, queries=3),
    "more queries than keys": replace(PACKED, queries=70),
    "a head for each": replace(PACKED, num_kv_heads=4),
    "ALiBi": replace(PACKED, alibi=True),
    "ALiBi, full, a few queries each": replace(PACKED, alibi=True, causal=False, queries=3),
    "narrow values": replace(PACKED, value_dim=8),
}


def _nothing() -> None:
    return


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_it_is(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return function

    flex._compiled.cache_clear()
    monkeypatch.setattr(torch, "compile", as_it_is)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_it_sees_what_float64_sees(case: VarlenCase) -> None:
    inputs = random_inputs(case, 3, 0, "cpu")
    call = flex.prepare_flex(case, inputs)
    assert isinstance(call, Planned)
    assert call.plan().shape[-2:] == (case.tokens, sum(case.seqlens_k)), "the mask of blocks is a step's"
    torch.testing.assert_close(call().double(), varlen_float64(case, inputs, _nothing), rtol=0, atol=1e-5)
    inputs.query.mul_(0.5)
    torch.testing.assert_close(call().double(), varlen_float64(case, inputs, _nothing), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"page_size": 16}, "slots without a key are NaN"),
        ({"tree": "chain", "queries": 4}, "not asked for trees"),
        ({"dtype": "bf16", "fp8_scales": "all"}, "caches in FP8"),
    ],
)
def test_what_it_does_not_take_is_said(changes: dict[str, Any], why: str) -> None:
    case = replace(PACKED, **changes)
    with pytest.raises(UnsupportedCaseError, match=why):
        flex.prepare_flex(case, random_inputs(case, 3, 0, "cpu"))


def test_prompts_are_raced_with_it_on_gpus() -> None:
    peer = next(each for each in ALL if each.name == "flex_attention")
    assert peer.devices == ("cuda",)
    assert peer.name in load_suite("prefill-varlen").implementations


COMPILED = """
import torch
from test_flex_attention import PACKED, _nothing, flex, random_inputs, varlen_float64

inputs = random_inputs(PACKED, 3, 0, "cpu")
call = flex.prepare_flex(PACKED, inputs)
torch.testing.assert_close(call().double(), varlen_float64(PACKED, inputs, _nothing), rtol=0, atol=1e-5)
"""


@pytest.mark.slow
def test_it_compiles() -> None:
    """In a process of its own: PyTorch's compiler refuses one in which others have imported distutils."""
    path = os.pathsep.join((str(Path(__file__).parent), *sys.path))
    subprocess.run([sys.executable, "-c", COMPILED], env={**os.environ, "PYTHONPATH": path}, check=True)

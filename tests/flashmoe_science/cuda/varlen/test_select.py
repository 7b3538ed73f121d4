"""Which kernel takes a call of `attention_varlen`, and what a plan knows of lengths."""

from __future__ import annotations

import pytest
import torch
from emulated_varlen import problem_of
from hypothesis import given
from hypothesis import strategies as st
from problems import H200, L4
from varlen_cases import Shape, packed

from flashmoe_science.cuda.varlen.select import MODULES, OVERRIDE_VARIABLE, VarlenKernel, bucket, select
from flashmoe_science.errors import InputError, NoKernelError

PROBLEM = problem_of(packed(Shape((1,), (1,), 4, 2, 64, dtype=torch.bfloat16)))


def test_every_kernel_has_a_module() -> None:
    assert set(MODULES) == set(VarlenKernel)


@given(st.integers(0, 1 << 24))
def test_a_bucket_holds_its_lengths_and_there_are_few(most: int) -> None:
    assert most <= bucket(most) <= 2 * most
    assert len({bucket(length) for length in range(0, 10_000)}) == 15


@pytest.mark.parametrize("device", [H200, L4])
def test_prompts_go_to_a_kernel(device: object) -> None:
    assert select(PROBLEM, device, 8191) in VarlenKernel  # type: ignore[arg-type]


@pytest.mark.parametrize("device", [H200, L4])
@pytest.mark.parametrize(
    ("queries", "kernel"), [(1, VarlenKernel.DECODE), (8, VarlenKernel.DECODE), (16, VarlenKernel.PORTABLE)]
)
def test_few_queries_go_to_the_decode_kernel(device: object, queries: int, kernel: VarlenKernel) -> None:
    assert select(PROBLEM, device, bucket(queries)) is kernel  # type: ignore[arg-type]


def test_a_kernel_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OVERRIDE_VARIABLE, "portable")
    assert select(PROBLEM, H200, 1) is VarlenKernel.PORTABLE
    monkeypatch.setenv(OVERRIDE_VARIABLE, "fast")
    with pytest.raises(InputError, match="FLASHMOE_CUDA_VARLEN='fast' names no kernel; expected one of"):
        select(PROBLEM, H200, 1)


def test_no_kernel_says_why_each_does_not_take_it() -> None:
    problem = problem_of(packed(Shape((1,), (1,), 1, 1, 576, 512, dtype=torch.bfloat16)))
    with pytest.raises(
        NoKernelError, match=r"attention_varlen \(.*portable: head_dim is 576, and it takes at most 256"
    ):
        select(problem, H200, 1023)

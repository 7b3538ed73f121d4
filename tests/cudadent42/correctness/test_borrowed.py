"""Whose work an implementation does is seen by its operators, or by its bits."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NoReturn

import pytest
import torch
from torch import Tensor

import bare_torch
from cudadent42.correctness.borrowed import LEAST_ENTRIES, Borrowed, look, operators
from cudadent42.correctness.truth import Truth, find_truth
from cudadent42.operations import numerics
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.registry import get

CASE = AttentionCase("small", "fp32", 1, 2, 2, 64, 64, 32)
SDPA = torch.nn.functional.scaled_dot_product_attention


@pytest.fixture(scope="module")
def truth() -> Truth:
    return find_truth(CASE, numerics(CASE).input_sets(CASE, 0, 1, "cpu")[0])


def seen(truth: Truth, call: Callable[[], Tensor], *, times: int = 1) -> Borrowed:
    borrowed = Borrowed()
    for _ in range(times):
        look(borrowed, truth, call, call(), get("pytorch", "attention"))
    return borrowed


def sdpa(truth: Truth) -> Tensor:
    inputs = truth.inputs
    return SDPA(inputs.query, inputs.key, inputs.value, is_causal=CASE.causal, scale=inputs.scale)


def test_the_baselines_operator_is_named(truth: Truth) -> None:
    evidence = seen(truth, lambda: sdpa(truth)).evidence
    assert "the baseline pytorch runs" in evidence
    assert "_scaled_dot_product_flash_attention_for_cpu" in evidence


def test_work_around_it_hides_nothing(truth: Truth) -> None:
    assert seen(truth, lambda: (sdpa(truth).double() * 1.0).float() + 0.0).by_operators


def test_in_another_thread_its_bits_tell(truth: Truth) -> None:
    with ThreadPoolExecutor(1) as pool:
        borrowed = seen(truth, lambda: pool.submit(sdpa, truth).result())
    assert not borrowed.by_operators
    assert borrowed.entries >= LEAST_ENTRIES
    assert "bit for bit" in borrowed.evidence


def test_in_an_operator_of_its_own_its_bits_tell(truth: Truth) -> None:
    """What an operator calls is not seen below the mode."""
    library = torch.library.Library("cudadent42_test_borrowed", "DEF")
    library.define("attention(Tensor q, Tensor k, Tensor v, float scale) -> Tensor")
    library.impl("attention", lambda q, k, v, scale: SDPA(q, k, v, scale=scale), "CPU")
    inputs = truth.inputs
    own = torch.ops.cudadent42_test_borrowed.attention
    scale = inputs.query.shape[-1] ** -0.5
    borrowed = seen(truth, lambda: own(inputs.query, inputs.key, inputs.value, scale))
    assert not borrowed.by_operators
    assert "bit for bit" in borrowed.evidence


def test_one_case_of_two_with_the_same_bits_is_no_evidence(truth: Truth) -> None:
    results = iter([truth.pytorch, truth.pytorch, truth.pytorch + 1e-6, truth.pytorch])
    assert not seen(truth, lambda: next(results), times=2).evidence


def test_operators_of_its_own_are_no_evidence(truth: Truth) -> None:
    """PyTorch's operators in another order, or another algorithm by them, are whoever's wrote it."""
    inputs = truth.inputs
    plain = numerics(CASE).pytorch_plain
    assert operators(lambda: plain(CASE, inputs))
    assert not seen(truth, lambda: plain(CASE, inputs)).evidence
    halves = [slice(0, 32), slice(32, 64)]

    def by_halves() -> Tensor:
        parts = [
            SDPA(inputs.query[:, :, half], inputs.key, inputs.value, scale=inputs.scale) for half in halves
        ]
        return torch.cat(parts, dim=2)

    assert not seen(truth, by_halves).evidence


@pytest.mark.parametrize(("off", "words"), [(0.0, "bit for bit"), (1e-6, "")])
def test_of_what_raises_below_a_mode_the_bits_tell(truth: Truth, off: float, words: str) -> None:
    def call() -> Tensor:
        if torch._C._len_torch_dispatch_stack():
            raise RuntimeError("not below a mode")
        return truth.pytorch + off

    evidence = seen(truth, call).evidence
    assert words in evidence
    assert bool(evidence) is bool(words)


def test_a_buffer_that_is_written_again_below_a_mode_hides_no_bits(truth: Truth) -> None:
    buffer = truth.pytorch.clone()

    def call() -> Tensor:
        buffer.copy_(truth.pytorch)
        if torch._C._len_torch_dispatch_stack():
            buffer.view(torch.int32).view(-1)[0].copy_(truth.pytorch.view(torch.int32).view(-1)[1])
        return buffer

    assert "bit for bit" in seen(truth, call).evidence


@pytest.mark.parametrize("where", ["prepare", "call", "context"])
def test_a_baseline_that_raises_below_a_mode_ends_nothing(truth: Truth, where: str) -> None:
    def refuse(*_: object) -> NoReturn:
        raise RuntimeError("not below a mode")

    refusing = {
        "prepare": {"prepare": refuse},
        "call": {"prepare": lambda case, inputs: refuse},
        "context": {"context": refuse},
    }
    baseline = replace(get("pytorch", "attention"), name="compiled", **refusing[where])
    borrowed = Borrowed()
    look(borrowed, truth, lambda: sdpa(truth), sdpa(truth), baseline)
    assert "what PyTorch runs" in borrowed.evidence  # which is asked for beside the baseline


def test_nothing_of_the_compiler_is_imported_for_it() -> None:
    """A second of a processor for every run."""
    program = (
        "import sys, torch\n"
        "from cudadent42.correctness.borrowed import operators\n"
        "query = torch.ones(1, 1, 4, 8)\n"
        "assert operators(lambda: torch.nn.functional.scaled_dot_product_attention(query, query, query))\n"
        "print([name for name in sys.modules if name.startswith(('torch._dynamo', 'sympy'))])\n"
    )
    done = bare_torch.run(program)
    assert done.stdout == "[]\n", done.stderr
